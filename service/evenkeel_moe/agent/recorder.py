"""A bounded queue of step loads on their way to the controller.

It never blocks the engine and copies nothing on the engine's thread.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.model.load import MAX_STEP, MAX_TOKENS, Phase, StepMeta, StepTable, step_table

_log = structlog.get_logger(__name__)

_Row = tuple[int, NDArray[np.int64], int, int, Phase, bool, float | None]
"""Step, counts, epoch, tokens, phase, dummy, compute_s."""


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """Steps taken out of the queue."""

    steps: StepTable
    counts: NDArray[np.int64]
    """(n, L, W) [tokens]."""
    dropped_steps: int
    """Steps lost since the previous take: replaced by newer ones, or refused as invalid."""


class Recorder:
    """A queue with one writer, the engine's thread, one reader, the agent's, and no lock.

    After a forward pass the caches hold the model's weights, so every cache line that `record`
    touches is a miss. It therefore only appends the engine's array as it is. The reader's thread
    checks and copies it.

    Args:
        capacity: steps kept; beyond this the oldest are dropped.
        layers: L.
        width: W, counts of one layer: slots per rank, or E.
    """

    __slots__ = ("_capacity", "_newest", "_overwritten", "_refused", "_reported", "_rows", "_shape")

    def __init__(self, capacity: int, layers: int, width: int) -> None:
        # The writer appends at the end and drops the first when the queue is full; the reader takes
        # the first. Each of these is atomic; reading the length before is not. A list, because its
        # append costs the least with cold caches.
        self._rows: list[_Row] = []
        self._capacity = capacity
        self._shape = (layers, width)
        self._newest = -1
        self._overwritten = 0
        self._refused = 0
        self._reported = 0

    def record(
        self,
        step: int,
        counts: NDArray[np.int64],
        epoch: int,
        tokens: int,
        phase: Phase,
        dummy: bool = False,
        compute_s: float | None = None,
    ) -> None:
        """Queue one step; counts: (L, W) [tokens], kept, and made read-only when taken."""
        self._rows.append((step, counts, epoch, tokens, phase, dummy, compute_s))
        if len(self._rows) > self._capacity:
            with suppress(IndexError):  # the reader has taken them all meanwhile
                del self._rows[0]
                self._overwritten += 1

    @property
    def counts_per_step(self) -> int:
        """L * W, the counts of one step."""
        return math.prod(self._shape)

    @property
    def last_step(self) -> int:
        """The newest step recorded; -1 before the first."""
        try:
            return int(self._rows[-1][0])
        except Exception:  # the queue is empty, or the step is no number: a swap must not fail
            return self._newest

    @property
    def waiting(self) -> int:
        """The number of steps recorded and not taken, at most the capacity."""
        return len(self._rows)

    @property
    def dropped_total(self) -> int:
        """The number of steps lost since the start."""
        return self._overwritten + self._refused

    def take(self, max_steps: int, stride: int = 1, from_step: int = 0) -> Recorded | None:
        """Take the oldest steps out of the queue; None when there are none.

        Args:
            max_steps: the most steps to take.
            stride: from `from_step` on, keep only the steps with step % stride == 0.
            from_step: the first step the stride applies to.
        """
        # Before the rows are removed, so that `last_step` never falls.
        self._newest = self.last_step
        rows: list[_Row] = []
        with suppress(IndexError):
            while len(rows) < max_steps:
                rows.append(self._rows.pop(0))
        kept = [
            (meta, row[1])
            for row in rows
            if (meta := self._usable(row)) is not None
            and (meta.step < from_step or meta.step % stride == 0)
        ]
        lost = self.dropped_total - self._reported
        if not kept and not lost:
            return None
        self._reported += lost
        counts = np.empty((len(kept), *self._shape), np.int64)
        for into, (_, one) in zip(counts, kept, strict=True):
            one.flags.writeable = False
            into[:] = one
        return Recorded(step_table(meta for meta, _ in kept), counts, lost)

    def _usable(self, row: _Row) -> StepMeta | None:
        """Return the metadata of a valid step; None for a step that no report can carry.

        Invalid statistics must end neither the engine nor the reporter. They are counted, and
        logged the 1st, 2nd, 4th, ... time.
        """
        counts = row[1]
        with suppress(Exception):  # the engine passed something that is no number
            meta = _meta(row)
            if _is_valid(meta) and _are_counts(counts, self._shape):
                return meta
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            step, _, epoch, tokens, _, _, compute_s = row
            _log.error(
                "step_refused",
                step=_loggable(step),
                epoch=_loggable(epoch),
                tokens=_loggable(tokens),
                compute_s=str(compute_s),
                counts=type(counts).__name__,
                shape=getattr(counts, "shape", None),
                dtype=str(getattr(counts, "dtype", None)),
                wanted=self._shape,
                times=self._refused,
            )
        return None


def _is_valid(meta: StepMeta) -> bool:
    """Return True if the controller accepts the step; one refused step costs its whole report."""
    seconds = meta.compute_s
    return (
        0 <= meta.step <= MAX_STEP
        and 0 <= meta.epoch <= MAX_STEP
        and 0 <= meta.tokens <= MAX_TOKENS
        and (seconds is None or 0 <= seconds < math.inf or math.isnan(seconds))
    )


def _are_counts(counts: object, shape: tuple[int, int]) -> bool:
    """Return True if an array can be counts of a report: real numbers, none of them NaN."""
    return (
        isinstance(counts, np.ndarray)
        and counts.shape == shape
        and counts.dtype.kind in "iuf"
        and bool(0 <= counts.min(initial=0) and counts.max(initial=0) <= MAX_TOKENS)
    )


def _loggable(number: Any) -> object:
    """Return a plain int, or else a short text: the log takes no numpy number and no NaN."""
    try:
        return int(number)
    except Exception:  # Any object may come from an engine; a log line must not fail.
        return repr(number)[:50]


def _meta(row: _Row) -> StepMeta:
    """Convert numpy's and torch's numbers to Python's, here rather than on the engine's thread."""
    step, _, epoch, tokens, phase, dummy, compute_s = row
    seconds = None if compute_s is None else float(compute_s)
    return StepMeta(int(step), int(epoch), Phase(phase), int(tokens), bool(dummy), seconds)
