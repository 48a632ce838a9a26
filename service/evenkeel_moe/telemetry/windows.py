"""The window in memory: a bounded number of the newest complete steps of one phase."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import PER_STEP, LoadWindow, Phase
from evenkeel_moe.model.topology import ModelShape

_BLOCKS = 4
_CELLS_AT_ONCE = 1 << 23
"""Cells of steps x layers x slots: a few tenths of a second of a core."""
_SHORT = 16
"""Parts of fewer steps are joined, so that a window never consists of many tiny parts."""


def source_bytes(shape: ModelShape) -> int:
    """Return the bytes of the source-side sums of one window."""
    return _BLOCKS * 8 * shape.num_ranks * shape.num_layers * shape.num_logical_experts


def join_windows(parts: Sequence[LoadWindow]) -> LoadWindow:
    """Concatenate at least one window; the source-side sums are those of the last."""
    if len(parts) == 1:
        return parts[0]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_STEP}
    return replace(parts[-1], **joined)


def newest_parts(
    parts: Iterable[LoadWindow], after: int = -1, most: int | None = None
) -> list[LoadWindow]:
    """Return the newest steps of consecutive parts, oldest first, without copies and empty parts.

    Args:
        parts: oldest first.
        after: only steps after this one are returned.
        most: largest number of steps; None for all.
    """
    found: list[LoadWindow] = []
    for part in reversed(list(parts)):
        part = part.last(len(part) - int(np.searchsorted(part.steps, after, side="right")))
        if most is not None:
            part = part.last(most)
            most -= len(part)
        if len(part):
            found.append(part)
    return found[::-1]


def steps_at_once(layers: int, slots: int) -> int:
    """Return how many steps of L layers and S slots the event loop may work on at a time.

    For most shapes that is a whole window, for the largest one step. What is left waits for the
    next call, so that no shape stops the loop for as long as a lease.
    """
    return max(1, _CELLS_AT_ONCE // (layers * slots))


def in_chunks(parts: Iterable[LoadWindow], most: int) -> Iterator[list[LoadWindow]]:
    """Divide consecutive parts into chunks of `most` steps, without copies and empty parts.

    The last chunk may be shorter.
    """
    chunk: list[LoadWindow] = []
    room = most
    for part in parts:
        while len(part):
            taken, part = part.slice(slice(0, room)), part.slice(slice(room, None))
            chunk.append(taken)
            room -= len(taken)
            if not room:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def new_steps(
    windows: Mapping[Phase, Sequence[LoadWindow]],
    newest: dict[Phase, int],
    at_once: int,
    capacity: int | None = None,
) -> Iterator[tuple[Phase, list[LoadWindow]]]:
    """Yield the steps of each phase that were not yielded before, in parts, oldest first.

    Args:
        windows: each in parts, oldest first.
        newest: number of the newest step of each phase that was yielded before.
        at_once: most steps of a phase; later ones wait for the next call.
        capacity: newest steps of a phase that count; None for all.

    Mutates: `newest`, in which it notes the steps.
    """
    for phase, parts in windows.items():
        new = newest_parts(parts, newest.get(phase, -1), capacity)
        for chunk in islice(in_chunks(new, at_once), 1):
            newest[phase] = int(chunk[-1].steps[-1])
            yield phase, chunk


class StepRing:
    """The newest `capacity` complete steps, in rising step order.

    Steps stay in the parts in which they came, and parts never change: adding steps copies only
    short parts, and parts that were handed out stay valid.

    An exact sliding source-side sum would need an (R, L, E) array per step. Instead the sums are
    kept in a few blocks, so they cover between three quarters of the window and all of it.
    """

    def __init__(self, shape: ModelShape, capacity: int, *, keeps_sources: bool = True) -> None:
        self.shape = shape
        self.capacity = capacity
        self._keeps_sources = keeps_sources
        self._parts: deque[LoadWindow] = deque()
        self._held = 0
        self._blocks: deque[NDArray[np.int64]] = deque(maxlen=_BLOCKS)
        self._in_block = 0

    def __len__(self) -> int:
        return self._held

    @property
    def newest_step(self) -> int | None:
        """The number of the newest step; None if empty."""
        return int(self._parts[-1].steps[-1]) if self._parts else None

    def append(self, steps: LoadWindow) -> LoadWindow:
        """Add the steps that are newer than all held, and return them; empty if none is newer."""
        newest = -1 if self.newest_step is None else self.newest_step
        new = slice(int(np.searchsorted(steps.steps, newest, side="right")), None)
        added = replace(steps.slice(new).last(self.capacity), source=None)
        if not len(added):
            return added
        parts = self._parts
        parts.append(added)
        # Join the last two short parts if they have about the same length, so that each step is
        # copied only a few times.
        while len(parts) > 1 and len(parts[-2]) <= len(parts[-1]) < _SHORT:
            last = parts.pop()
            parts.append(join_windows((parts.pop(), last)))
        self._held += len(added)
        while self._held - len(parts[0]) >= self.capacity:
            self._held -= len(parts.popleft())
        if self._held > self.capacity:
            parts[0] = parts[0].slice(slice(self._held - self.capacity, None))
            self._held = self.capacity
        self._in_block += len(added)
        return added

    def add_source(self, rank: EpRank, sums: NDArray[np.int64]) -> None:
        """Add the tokens that one rank routed, if such sums are kept; sums: (L, E) int64."""
        if not self._keeps_sources:
            return
        shape = self.shape
        if not self._blocks or self._in_block >= max(1, self.capacity // _BLOCKS):
            self._blocks.append(
                np.zeros((shape.num_ranks, shape.num_layers, shape.num_logical_experts), np.int64)
            )
            self._in_block = 0
        self._blocks[-1][rank] += sums

    def parts(self, after: int = -1) -> list[LoadWindow]:
        """Return the steps after one, oldest first, without source-side sums. They never change."""
        return newest_parts(self._parts, after)

    def window(self, most: int | None = None) -> LoadWindow | None:
        """Return all, or the `most` newest, steps with source-side sums; None if empty."""
        if not self._parts:
            return None
        held = join_windows(newest_parts(self._parts, most=most))
        return replace(held, source=self.source())

    def source(self) -> NDArray[np.uint32] | None:
        """Return the (R, L, E) [tokens] each rank routed; None if none are reported or kept."""
        if not self._blocks:
            return None
        total: NDArray[np.int64] = np.sum(list(self._blocks), axis=0)
        return np.minimum(total, np.iinfo(np.uint32).max).astype(np.uint32)
