"""Step loads on their way out: a preallocated ring that never makes the engine wait."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel.model.load import Phase, StepMeta

__all__ = ["Recorded", "Recorder"]

_Row = tuple[int, int, Phase, int, bool, float | None]
"""Fields of a StepMeta."""


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A run of steps taken out of the ring."""

    steps: tuple[StepMeta, ...]
    counts: NDArray[np.int64]
    """(n, L, W) [tokens]."""
    dropped_steps: int
    """Steps overwritten before anyone took them, since the take before."""


class Recorder:
    """One writer, the engine's thread; one reader, the agent's. No lock between them.

    The writer fills the row of step number `_written % capacity` and then raises `_written`; the
    reader copies rows and afterwards looks at `_written` again: rows the writer may have come round
    to meanwhile are thrown away and counted.

    Args:
        capacity: steps kept; the oldest are overwritten.
        layers: L.
        width: counts of one layer: slots per rank, or E.
    """

    def __init__(self, capacity: int, layers: int, width: int) -> None:
        self._capacity = capacity
        self._counts = np.zeros((capacity, layers, width), np.int64)
        # Written once here, so that the engine's thread never waits for the kernel to bring a page.
        self._counts.fill(0)
        # Plain tuples: on the engine's thread one store into a list costs a tenth of one into a structured array.
        self._meta: list[_Row] = [(-1, 0, Phase.PREFILL, 0, False, None)] * capacity
        self._written = 0
        self._taken = 0
        self.dropped_total = 0
        """Steps lost since the start."""

    def record(
        self,
        step: int,
        counts: NDArray[np.int64],
        *,
        epoch: int,
        tokens: int,
        phase: Phase,
        dummy: bool = False,
        compute_s: float | None = None,
    ) -> None:
        """Note one step; counts: (L, W) [tokens]."""
        row = self._written % self._capacity
        self._counts[row] = counts
        self._meta[row] = (step, epoch, phase, tokens, dummy, compute_s)
        self._written += 1

    @property
    def last_step(self) -> int:
        """Newest step recorded, -1 before the first."""
        return int(self._meta[(self._written - 1) % self._capacity][0]) if self._written else -1

    @property
    def waiting(self) -> int:
        """Steps recorded and not taken, at most the capacity."""
        return min(self._written - self._taken, self._capacity)

    def take(self, max_steps: int, stride: int = 1, from_step: int = 0) -> Recorded | None:
        """The oldest steps not yet taken, None when there are none.

        Args:
            max_steps: at most so many.
            stride: from `from_step` on only steps with step % stride == 0; the others are passed over.
            from_step: where the stride begins.
        """
        # One row of distance to the writer: it may be filling the row at `_written` right now.
        first = max(self._taken, self._written - self._capacity + 1)
        last = min(self._written, first + max_steps)
        lost = first - self._taken
        if last <= first:
            return None
        rows = np.arange(first, last) % self._capacity
        rows_of_meta, counts = self._copy(rows)
        overrun = max(0, self._written - self._capacity + 1 - first)
        lost += min(overrun, last - first)
        metas, counts = [_meta(row) for row in rows_of_meta[overrun:]], counts[overrun:]
        self._taken = last
        self.dropped_total += lost
        if stride > 1:
            keep = [at for at, meta in enumerate(metas) if meta.step < from_step or meta.step % stride == 0]
            metas, counts = [metas[at] for at in keep], counts[keep]
        if not metas and not lost:
            return None
        return Recorded(tuple(metas), counts, lost)

    def _copy(self, rows: NDArray[np.int64]) -> tuple[list[_Row], NDArray[np.int64]]:
        return [self._meta[row] for row in rows.tolist()], self._counts[rows]


def _meta(row: _Row) -> StepMeta:
    """Engines hand in numpy's and torch's numbers too: made plain here, off their thread."""
    step, epoch, phase, tokens, dummy, compute_s = row
    seconds = None if compute_s is None else float(compute_s)
    return StepMeta(int(step), int(epoch), phase, int(tokens), bool(dummy), seconds)
