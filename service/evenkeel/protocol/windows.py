"""The window in memory: the newest complete steps of one phase, bounded by count."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from evenkeel.errors import InvalidInput
from evenkeel.model.ids import EpRank
from evenkeel.model.load import LoadWindow
from evenkeel.model.topology import ModelShape

__all__ = ["StepRing", "join_windows"]

_BLOCKS = 4


def join_windows(parts: list[LoadWindow]) -> LoadWindow:
    """Windows one after the other; the source-side sums of the last part are kept. At least one part."""
    if len(parts) == 1:
        return parts[0]
    return LoadWindow(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.epochs for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.compute_s for part in parts]),
        parts[-1].source,
    )


class StepRing:
    """The newest `capacity` complete steps, in rising step order.

    Steps are added behind those held; when the buffer is full the newest move to its beginning, or to a new one
    if somebody was given a window of this one: memory that is used for the first time costs more than the copy.

    Source-side sums would need a (R, L, E) array per step to slide exactly; they are kept in a few blocks
    of a part of the window each, so they cover between three quarters of it and all of it.
    """

    def __init__(self, shape: ModelShape, capacity: int) -> None:
        if capacity < 1:
            raise InvalidInput(f"window capacity is {capacity}, must be at least 1")
        self.shape = shape
        self.capacity = capacity
        self._buffer: LoadWindow | None = None
        self._start = 0
        self._end = 0
        self._handed_out = False
        """Whether a window of this buffer may be in use."""
        self._blocks: deque[NDArray[np.int64]] = deque(maxlen=_BLOCKS)
        self._in_block = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def newest_step(self) -> int | None:
        """Number of the newest step; None when empty."""
        return int(self._buffer.steps[self._end - 1]) if self._buffer is not None else None

    def append(self, steps: LoadWindow) -> LoadWindow:
        """Add steps that are newer than all held; the part that was added, empty when none is newer."""
        newest = self.newest_step
        if newest is not None and len(steps) and int(steps.steps[0]) <= newest:
            steps = steps.slice(slice(int(np.searchsorted(steps.steps, newest, side="right")), None))
        added = steps.last(self.capacity)
        if not len(added):
            return added
        buffer = self._make_room(len(added))
        place = slice(self._end, self._end + len(added))
        buffer.counts[place] = added.counts
        buffer.steps[place] = added.steps
        buffer.epochs[place] = added.epochs
        buffer.tokens[place] = added.tokens
        buffer.compute_s[place] = added.compute_s
        self._end += len(added)
        self._start = max(self._start, self._end - self.capacity)
        self._in_block += len(added)
        return added

    def _make_room(self, num_steps: int) -> LoadWindow:
        """The buffer, with place for some more steps, at most `capacity`, at its end."""
        old = self._buffer
        if old is not None and self._end + num_steps <= len(old):
            return old
        kept = slice(max(self._start, self._end + num_steps - self.capacity), self._end)
        count = max(0, kept.stop - kept.start)
        # Twice as long as what is held: every step moves about once, and never over another that is kept.
        buffer = self._allocate(2 * self.capacity) if old is None or self._handed_out else old
        if old is not None and count:
            for name in ("counts", "steps", "epochs", "tokens", "compute_s"):
                getattr(buffer, name)[:count] = getattr(old, name)[kept]
        self._buffer, self._start, self._end, self._handed_out = buffer, 0, count, False
        return buffer

    def _allocate(self, num_steps: int) -> LoadWindow:
        shape = self.shape
        return LoadWindow(
            np.empty((num_steps, shape.num_layers, shape.num_logical_experts), np.uint32),
            np.empty(num_steps, np.int64),
            np.empty(num_steps, np.int64),
            np.empty((num_steps, shape.num_ranks), np.int64),
            np.empty((num_steps, shape.num_ranks)),
        )

    def add_source(self, rank: EpRank, sums: NDArray[np.int64]) -> None:
        """Add one rank's routed tokens; sums: (L, E) int64 [tokens]."""
        shape = self.shape
        if not self._blocks or self._in_block >= max(1, self.capacity // _BLOCKS):
            self._blocks.append(
                np.zeros((shape.num_ranks, shape.num_layers, shape.num_logical_experts), np.int64)
            )
            self._in_block = 0
        self._blocks[-1][rank] += sums

    def window(self) -> LoadWindow | None:
        """What is held, oldest step first; None when empty. Read only; it never changes."""
        self._handed_out = True
        return self.peek()

    def peek(self) -> LoadWindow | None:
        """Like `window`, for use at once: it is worthless when more steps were added."""
        if self._buffer is None:
            return None
        held = self._buffer.slice(slice(self._start, self._end))
        return LoadWindow(
            held.counts, held.steps, held.epochs, held.tokens, held.compute_s, self._source_sums()
        )

    def newer_than(self, step: int) -> LoadWindow | None:
        """A copy of the steps after one, without source-side sums; None when there is none."""
        newest, buffer = self.newest_step, self._buffer
        if buffer is None or newest is None or newest <= step:
            return None
        held = buffer.slice(slice(self._start, self._end))
        first = int(np.searchsorted(held.steps, step, side="right"))
        return LoadWindow(
            held.counts[first:].copy(),
            held.steps[first:].copy(),
            held.epochs[first:].copy(),
            held.tokens[first:].copy(),
            held.compute_s[first:].copy(),
        )

    def _source_sums(self) -> NDArray[np.uint32] | None:
        if not self._blocks:
            return None
        total: NDArray[np.int64] = np.sum(list(self._blocks), axis=0)
        return np.minimum(total, np.iinfo(np.uint32).max).astype(np.uint32)
