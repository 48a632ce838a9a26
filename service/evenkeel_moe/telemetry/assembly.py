"""Assembles the reports of single ranks into complete steps, and explains which steps are not used.

A step is complete when every rank has reported it (R18): the experts of a silent rank have an
unknown load, not a small one. The counts of a complete step must also add up (R19). The assembler
is pure and its memory is bounded; the caller stores, counts and logs.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.load import PHASE_CODE, CountingSide, LoadReport, LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.telemetry.step_buffer import (
    AddedSteps,
    EpochMap,
    StepBuffer,
    StepRules,
    derive_epoch_map,
)
from evenkeel_moe.telemetry.step_kernels import NO_STEP, StepFlag, sum_slots

_SAMPLES = 8
"""Rejections of a reason that are kept."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Steps that were not used, and why."""

    reason: Reason
    rank_steps: int
    """Number of steps, counted once for each rank that reported them."""
    detail: str
    """The explanation, with its numbers."""


class Intake(NamedTuple):
    """The outcome of one report."""

    highest_step: int | None
    """Highest step received from the rank so far, used or not; the rank may forget all up to it."""
    accepted_steps: int = 0
    rejected: tuple[Rejection, ...] = ()
    complete: tuple[tuple[Phase, LoadWindow], ...] = ()
    """Steps this report completed, by phase, oldest first."""
    unsummed: LoadWindow | None = None
    """Steps that do not add up (R19), oldest first: complete ones, or the rank's own counts on the
    SOURCE side. They are never load, but tell how the engine counts. None if there are none."""
    source: Mapping[Phase, NDArray[np.int64]] | None = None
    """(L, E) [tokens] that the rank routed in the accepted steps, by phase; None for DESTINATION
    reports."""
    repeated: bool = False
    """True if the rank had reported all these steps before; False without steps."""


class Quarantine:
    """Counts rejections by reason and keeps a few samples of each, newest last."""

    def __init__(self) -> None:
        self.rank_steps: dict[Reason, int] = defaultdict(int)
        self._samples: dict[Reason, deque[tuple[EpRank, str]]] = defaultdict(
            lambda: deque(maxlen=_SAMPLES)
        )

    def add(self, rank: EpRank, rejection: Rejection) -> None:
        """Count one rejection and keep its explanation as a sample."""
        self.rank_steps[rejection.reason] += rejection.rank_steps
        self._samples[rejection.reason].append((rank, rejection.detail))

    def samples(self, reason: Reason) -> tuple[tuple[EpRank, str], ...]:
        """Return (rank, explanation) of the newest rejections for a reason."""
        return tuple(self._samples.get(reason, ()))


class StepAssembler:
    """Assembles the steps of one generation of one deployment.

    Ranks report their steps in rising order; a step that every rank has passed can never be
    completed.

    Args:
        shape: as the generation declared it.
        max_pending: most incomplete steps held, at least 1; beyond it the oldest is dropped.
        closed_to: steps up to this one are late: they belong to an earlier generation.
    """

    def __init__(
        self, shape: ModelShape, *, max_pending: int = 256, closed_to: int = NO_STEP
    ) -> None:
        self.shape = shape
        self.max_pending = max_pending
        self.summed_to: Mapping[Phase, int] = {}
        """The step of each phase up to which source-side sums are known, from a restored window."""
        self._closed_to = closed_to
        self._buffers: dict[CountingSide, StepBuffer] = {}
        self._epochs: dict[int, EpochMap] = {}
        self._rules = StepRules(1, 0, np.zeros(0, np.int64))

    def learn_epoch(self, epoch: Epoch, placement: Placement) -> None:
        """Store the placement of an epoch; it replaces an earlier one of the same epoch.

        Args:
            epoch: of the committed placement, or of the one a wave would lead to.
            placement: its map.

        Raises:
            ShapeMismatch: the placement is of another deployment.
        """
        placement.check_sizes(self.shape)
        self._epochs.pop(epoch, None)
        self._epochs[epoch] = derive_epoch_map(placement)
        while len(self._epochs) > 8:
            del self._epochs[next(iter(self._epochs))]
        self._rules = self._rules._replace(epochs=np.array(list(self._epochs), np.int64))

    def sample(self, stride: int, from_step: int) -> None:
        """From a step on, use only steps with step % stride == 0 (R18)."""
        self._rules = self._rules._replace(stride=stride, stride_from=from_step)

    def pending(self) -> int:
        """Return the number of incomplete steps."""
        return sum(len(buffer.pending) for buffer in self._buffers.values())

    def highest_step(self, rank: EpRank) -> int | None:
        """Return the highest step received from a rank; None before the first."""
        reported = [buffer.board.highest.item(rank) for buffer in self._buffers.values()]
        highest = max(reported, default=NO_STEP)
        return None if highest == NO_STEP else highest

    def take(self, report: LoadReport) -> Intake:
        """Take one report. It never raises for what a rank sent; a repeated report changes nothing.

        The codec has checked that no count is negative and that the steps rise.
        """
        buffer = self._buffers.get(report.side)
        if buffer is None:
            buffer = self._buffers[report.side] = StepBuffer(
                report.side, self.shape, self.max_pending
            )
            buffer.closed_to = self._closed_to
        if (mismatch := buffer.mismatch(report)) is not None:
            rejection = Rejection(Reason.BAD_LENGTH, len(report.steps), mismatch)
            return Intake(report.last_step, rejected=(rejection,))
        last = report.last_step
        repeated = last is not None and last <= buffer.board.highest[report.rank]
        wrong = self._wrong_sums(report)
        dropped: list[Rejection] = []
        added = buffer.add(report, wrong, self._rules)
        if added.lacking:
            self._make_room(buffer, report, added, dropped)
            added = buffer.add(report, wrong, self._rules)
        flags = added.flags
        refused = added.seen & ~StepFlag.COMPLETE
        rejected = [*self._refusals(buffer, report, added), *dropped] if refused else dropped
        complete: tuple[tuple[Phase, LoadWindow], ...] = ()
        unsummed = self._unsummed(report, flags) if added.seen & StepFlag.SUM_MISMATCH else None
        if added.seen & StepFlag.COMPLETE:
            rows = added.rows[flags & StepFlag.COMPLETE > 0]
            complete, of_all = self._complete(buffer, rows, rejected)
            unsummed = unsummed or of_all
        self._drop_passed(buffer, rejected)
        return Intake(
            self.highest_step(report.rank),
            added.num_steps,
            tuple(rejected),
            complete,
            unsummed,
            self._source_sums(report, added) if report.side is CountingSide.SOURCE else None,
            repeated,
        )

    # --- one report -------------------------------------------------------------------------------

    def _wrong_sums(self, report: LoadReport) -> NDArray[np.bool_]:
        """Return (n,) True for steps that break R19 on the SOURCE side.

        In some layer their counts do not sum to tokens x top_k. Dummy steps have no counts.
        """
        if report.side is CountingSide.DESTINATION or not len(report.steps):
            return np.zeros(len(report.steps), np.bool_)
        sums, want = report.counts.sum(axis=2), report.steps["tokens"] * self.shape.top_k
        wrong: NDArray[np.bool_] = (sums != want[:, None]).any(axis=1) & (
            report.steps["dummy"] == 0
        )
        return wrong

    def _unsummed(self, report: LoadReport, flags: NDArray[np.uint8]) -> LoadWindow:
        """Return the steps of a report of the SOURCE side that do not add up."""
        wrong = flags & StepFlag.SUM_MISMATCH > 0
        steps = report.steps[wrong]
        by_rank = np.zeros((len(steps), self.shape.num_ranks))
        return LoadWindow(
            report.counts[wrong].astype(np.uint32),
            steps["step"].copy(),
            steps["epoch"].copy(),
            by_rank.astype(np.int64),
            by_rank * np.nan,
        )

    def _make_room(
        self, buffer: StepBuffer, report: LoadReport, added: AddedSteps, rejected: list[Rejection]
    ) -> None:
        """Drop the oldest steps, of the buffer or of the report, so that the others fit."""
        pending = buffer.pending
        begun = buffer.board.rows["step"][pending]
        new = report.steps["step"][(added.flags == 0) & (added.rows < 0)]
        newest = int(np.sort(np.concatenate([begun, new]))[added.lacking - 1])
        for row in pending[begun <= newest]:
            self._give_up(buffer, row, rejected)
        buffer.closed_to = max(buffer.closed_to, newest)

    def _refusals(
        self, buffer: StepBuffer, report: LoadReport, added: AddedSteps
    ) -> Iterator[Rejection]:
        """Explain which steps of a report were not used."""
        told = (
            (StepFlag.DUPLICATE, Reason.DUPLICATE_STEP, "reported before"),
            (
                StepFlag.LATE,
                Reason.LATE_STEP,
                f"step {buffer.closed_to} and all before it are closed",
            ),
            (StepFlag.UNKNOWN_EPOCH, Reason.UNKNOWN_EPOCH, f"known are {sorted(self._epochs)}"),
            (StepFlag.SUM_MISMATCH, Reason.SUM_MISMATCH, ""),
            (StepFlag.OTHER_EPOCH, Reason.EPOCH_DISAGREES, "ranks before ran under another one"),
        )
        for flag, reason, words in told:
            chosen = np.flatnonzero(added.flags & flag)
            if not len(chosen):
                continue
            steps = report.steps[chosen]
            who = f"rank {report.rank} "
            if flag == StepFlag.SUM_MISMATCH:
                sums = report.counts[chosen[0]].sum(axis=1)
                detail = who + self._which_sum(steps["step"][0], sums, steps["tokens"][0])
            else:
                which = f"steps {steps['step'][0]}..{steps['step'][-1]} of epoch"
                detail = f"{who}{which} {steps['epoch'][0]}: {words}"
            yield Rejection(reason, len(chosen), detail)

    def _which_sum(
        self, step: int, sums: NDArray[np.int64], tokens: int, counts: str = "counts"
    ) -> str:
        """Explain a step that does not add up; sums: (L,) of the counts over the experts."""
        layer = int(np.abs(sums - tokens * self.shape.top_k).argmax())
        return (
            f"step {step} layer {layer}: {counts} sum to {sums[layer]},"
            f" tokens x top_k = {tokens} x {self.shape.top_k}"
        )

    def _source_sums(self, report: LoadReport, added: AddedSteps) -> dict[Phase, NDArray[np.int64]]:
        """Return the (L, E) tokens by phase of the accepted steps whose sums are not yet known."""
        used = (added.rows >= 0) & (report.steps["dummy"] == 0)
        codes, steps = report.steps["phase"], report.steps["step"]
        sums: dict[Phase, NDArray[np.int64]] = {}
        for phase in Phase:
            new = steps > self.summed_to.get(phase, NO_STEP)
            if (mask := used & new & (codes == PHASE_CODE[phase])).any():
                sums[phase] = report.counts[mask].sum(axis=0)
        return sums

    # --- steps that end ---------------------------------------------------------------------------

    def _complete(
        self, buffer: StepBuffer, rows: NDArray[np.int64], rejected: list[Rejection]
    ) -> tuple[tuple[tuple[Phase, LoadWindow], ...], LoadWindow | None]:
        """Release complete steps, in rising order, and make windows of those that can be used.

        Returns:
            The windows by phase; and the steps that do not add up, None if there are none.
        """
        known = buffer.release(rows)
        mixed_epochs = known["mixed_epochs"] > 0
        if mixed_epochs.any():
            detail = f"step {known['step'][mixed_epochs][0]} ran under more than one epoch"
            count = int(known["num_reported"][mixed_epochs].sum())
            rejected.append(Rejection(Reason.EPOCH_DISAGREES, count, detail))
        usable = (known["real"] > 0) & ~mixed_epochs
        if not usable.any():
            return (), None
        rows, known = rows[usable], known[usable]
        counts, sums, bad = self._logical_counts(buffer, rows, known["epoch"])
        window = LoadWindow(
            counts,
            known["step"].copy(),
            known["epoch"].copy(),
            buffer.board.tokens[rows],
            buffer.board.compute_s[rows],
        )
        unsummed = None
        if bad.any():
            tokens = int(window.tokens[bad][0].sum())
            counted = "counts of all ranks"
            detail = self._which_sum(known["step"][bad][0], sums[bad][0], tokens, counted)
            count = int(known["num_reported"][bad].sum())
            rejected.append(Rejection(Reason.SUM_MISMATCH, count, detail))
            # Counts that overflowed are not those of the ranks.
            unsummed = window.slice(bad & (counts.sum(axis=2) == sums).all(axis=1))
            known, window = known[~bad], window.slice(~bad)
        found = [(phase, known["phase"] == PHASE_CODE[phase]) for phase in Phase]
        by_phase = tuple(
            (phase, window if mask.all() else window.slice(mask))
            for phase, mask in found
            if mask.any()
        )
        return by_phase, unsummed

    def _logical_counts(
        self, buffer: StepBuffer, rows: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the counts by logical expert and check that they add up (R19).

        Returns:
            (n, L, E) counts, (n, L) their sums, and (n,) True for steps that do not add up. Counts
            of such a step may have overflowed; their sums have not.
        """
        shape, most = self.shape, np.iinfo(np.uint32).max
        if buffer.side is CountingSide.SOURCE:
            counts = buffer.counts[rows]
            return counts.astype(np.uint32), counts.sum(axis=2), counts.max(axis=(1, 2)) > most
        counts = np.empty((len(rows), shape.num_layers, shape.num_logical_experts), np.uint32)
        sums = np.empty((len(rows), shape.num_layers), np.int64)
        too_large = np.zeros(len(rows), np.bool_)
        # One run of steps of the same epoch at a time, nearly always all. The map of the epoch is
        # known, because it has just shown that the step is complete.
        first = 0
        for epoch, run in groupby(epochs.tolist()):
            part = slice(first, first + sum(1 for _ in run))
            known = self._epochs[epoch]
            too_large[part] = sum_slots(buffer.counts, rows[part], *known, counts[part], sums[part])
            first = part.stop
        want = shape.top_k * buffer.board.tokens[rows].sum(axis=1)
        return counts, sums, too_large | (sums != want[:, None]).any(axis=1)

    def _drop_passed(self, buffer: StepBuffer, rejected: list[Rejection]) -> None:
        """Give up incomplete steps that every rank has passed."""
        passed = buffer.lowest
        if passed > buffer.passed_to:
            buffer.passed_to = passed
            for row in buffer.pending:
                if buffer.board.rows["step"][row] <= passed:
                    self._give_up(buffer, row, rejected)

    def _give_up(self, buffer: StepBuffer, row: np.int64, rejected: list[Rejection]) -> None:
        """Release an incomplete step and close all steps up to it."""
        (known,) = buffer.release(np.array([row]))
        step, reported = int(known["step"]), int(known["num_reported"])
        buffer.closed_to = max(buffer.closed_to, step)
        detail = f"step {step} was reported by {reported} of {self.shape.num_ranks} ranks"
        rejected.append(Rejection(Reason.INCOMPLETE_STEP, reported, detail))
