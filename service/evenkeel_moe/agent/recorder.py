"""Step loads on their way out: a bounded queue that never makes the engine wait and copies nothing on its thread."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.model.load import MAX_STEP, MAX_TOKENS, Phase, StepMeta, StepTable, step_table

__all__ = ["Recorded", "Recorder"]

_log = structlog.get_logger(__name__)

_Row = tuple[int, NDArray[np.int64], int, int, Phase, bool, float | None]
"""Step, counts, and the other fields of a StepMeta."""


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A run of steps taken out of the queue."""

    steps: StepTable
    counts: NDArray[np.int64]
    """(n, L, W) [tokens]."""
    dropped_steps: int
    """Steps lost since the take before: they made room for newer ones, or their counts had another shape, or a number is none."""


class Recorder:
    """One writer, the engine's thread; one reader, the agent's. No lock between them.

    After a forward pass the caches hold the model's weights, and every line of memory that `record` touches is waited
    for. So it only appends the engine's array as it is; what is to be checked and copied is left to the reader's thread.

    Args:
        capacity: steps kept; the oldest make room.
        layers: L.
        width: counts of one layer: slots per rank, or E.
    """

    __slots__ = ("_capacity", "_newest", "_overwritten", "_refused", "_rows", "_said", "_shape")

    def __init__(self, capacity: int, layers: int, width: int) -> None:
        # The writer appends at the end and, where it is full, drops the first; the reader takes the first. Each is atomic,
        # looking how many there are before is not. A list, for its append costs the least with cold caches.
        self._rows: list[_Row] = []
        self._capacity = capacity
        self._shape = (layers, width)
        self._newest = -1
        self._overwritten = 0
        self._refused = 0
        self._said = 0

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
        """Note one step; counts: (L, W) [tokens], kept, and made read-only when they are taken."""
        self._rows.append((step, counts, epoch, tokens, phase, dummy, compute_s))
        if len(self._rows) > self._capacity:
            with suppress(IndexError):  # the reader took them all meanwhile
                del self._rows[0]
                self._overwritten += 1

    @property
    def last_step(self) -> int:
        """Newest step recorded, -1 before the first."""
        try:
            return int(self._rows[-1][0])
        except (
            Exception
        ):  # no step, or none that is a number: a swap asks, and must not fail for it
            return self._newest

    @property
    def waiting(self) -> int:
        """Steps recorded and not taken, at most the capacity."""
        return len(self._rows)

    @property
    def dropped_total(self) -> int:
        """Steps lost since the start."""
        return self._overwritten + self._refused

    def take(self, max_steps: int, stride: int = 1, from_step: int = 0) -> Recorded | None:
        """The oldest steps not yet taken, None when there are none.

        Args:
            max_steps: at most so many.
            stride: from `from_step` on only steps with step % stride == 0; the others are passed over.
            from_step: where the stride begins.
        """
        self._newest = self.last_step  # Before the rows go: it must not fall back meanwhile.
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
        lost = self.dropped_total - self._said
        if not kept and not lost:
            return None
        self._said += lost
        counts = np.empty((len(kept), *self._shape), np.int64)
        for into, (_, one) in zip(counts, kept, strict=True):
            one.flags.writeable = False
            into[:] = one
        return Recorded(step_table(meta for meta, _ in kept), counts, lost)

    def _usable(self, row: _Row) -> StepMeta | None:
        """What a report says of a step; None where none can carry it: statistics must not end the engine, nor their
        reporter, so it is counted, and said the 1st, 2nd, 4th, ... time."""
        counts = row[1]
        with suppress(Exception):  # whatever an engine hands in that is no number
            meta = _meta(row)
            if _can_be(meta) and isinstance(counts, np.ndarray) and counts.shape == self._shape:
                return meta
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            step, _, epoch, tokens, _, _, compute_s = row
            _log.error(
                "step_refused",
                step=_said(step),
                epoch=_said(epoch),
                tokens=_said(tokens),
                compute_s=str(compute_s),
                counts=type(counts).__name__,
                shape=getattr(counts, "shape", None),
                wanted=self._shape,
                times=self._refused,
            )
        return None


def _can_be(meta: StepMeta) -> bool:
    """Whether the controller takes it: one step of which it does not would cost its whole report."""
    seconds = meta.compute_s
    return (
        0 <= meta.step <= MAX_STEP
        and 0 <= meta.epoch <= MAX_STEP
        and 0 <= meta.tokens <= MAX_TOKENS
        and (seconds is None or 0 <= seconds < math.inf or math.isnan(seconds))
    )


def _said(number: Any) -> object:
    """A number for the log, which takes neither numpy's nor NaN."""
    try:
        return int(number)
    except Exception:
        return repr(number)[:50]


def _meta(row: _Row) -> StepMeta:
    """Engines hand in numpy's and torch's numbers too: made plain here, off their thread."""
    step, _, epoch, tokens, phase, dummy, compute_s = row
    seconds = None if compute_s is None else float(compute_s)
    return StepMeta(int(step), int(epoch), Phase(phase), int(tokens), bool(dummy), seconds)
