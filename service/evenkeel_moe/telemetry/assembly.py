"""Assembles the reports of single ranks into complete steps, and explains which steps are not used.

A step is complete when every rank of its epoch's active mask has reported it (R18): the experts of
a silent rank have an unknown load, not a small one. The counts of a complete step must also add up
(R19). The assembler is pure and its memory is bounded; the caller stores, counts and logs.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.load import (
    PHASE_CODE,
    CountingSide,
    LoadReport,
    LoadWindow,
    Phase,
    StepTable,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.telemetry.step_buffer import (
    NO_STEP,
    AddedSteps,
    EpochMap,
    StepBuffer,
    StepRules,
    derive_epoch_map,
)
from evenkeel_moe.telemetry.step_kernels import StepFlag, sum_slots


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

    def __init__(self, samples_per_reason: int = 8) -> None:
        self.rank_steps: dict[Reason, int] = defaultdict(int)
        self._samples: dict[Reason, deque[tuple[EpRank, str]]] = {}
        self._samples_per_reason = samples_per_reason

    def add(self, rank: EpRank, rejection: Rejection) -> None:
        """Count one rejection and keep its explanation as a sample."""
        self.rank_steps[rejection.reason] += rejection.rank_steps
        kept = self._samples.setdefault(rejection.reason, deque(maxlen=self._samples_per_reason))
        kept.append((rank, rejection.detail))

    def samples(self, reason: Reason) -> tuple[tuple[EpRank, str], ...]:
        """Return (rank, explanation) of the newest rejections for a reason."""
        return tuple(self._samples.get(reason, ()))


class StepAssembler:
    """Assembles the steps of one generation of one deployment.

    Ranks report their steps in rising order; a step that every rank has passed can never be
    completed.

    Args:
        shape: as the generation declared it.
        max_pending: largest number of incomplete steps held; beyond it the oldest is dropped.
    """

    def __init__(self, shape: ModelShape, *, max_pending: int = 256) -> None:
        if max_pending < 1:
            raise InvalidInput(f"max_pending is {max_pending}, must be at least 1")
        self.shape = shape
        self.max_pending = max_pending
        self.summed_to: Mapping[Phase, int] = {}
        """The step of each phase up to which source-side sums are known, from a restored window."""
        self._buffers: dict[CountingSide, StepBuffer] = {}
        self._epochs: dict[int, EpochMap] = {}
        self._rules = self._make_rules(1, 0)

    def learn_epoch(
        self, epoch: Epoch, placement: Placement, active: NDArray[np.bool_] | None = None
    ) -> None:
        """Store the placement of an epoch; it replaces an earlier one of the same epoch.

        Args:
            epoch: of the committed placement, or of the one a wave would lead to.
            placement: its map.
            active: (R,) bool - ranks that take part; None means all.

        Raises:
            ShapeMismatch: the placement is of another deployment.
        """
        if placement.sizes != self.shape.sizes:
            raise ShapeMismatch(
                f"map is (L, S, R, E) = {placement.sizes}, the deployment is {self.shape.sizes}"
            )
        mask = np.ones(self.shape.num_ranks, np.bool_) if active is None else active
        self._epochs.pop(epoch, None)
        self._epochs[epoch] = derive_epoch_map(placement, mask)
        while len(self._epochs) > 8:
            del self._epochs[next(iter(self._epochs))]
        self._rules = self._make_rules(self._rules.stride, self._rules.stride_from)

    def sample(self, stride: int, from_step: int) -> None:
        """From a step on, use only steps with step % stride == 0 (R18)."""
        if stride < 1:
            raise InvalidInput(f"stride is {stride}, must be at least 1")
        self._rules = self._make_rules(stride, from_step)

    def _make_rules(self, stride: int, stride_from: int) -> StepRules:
        maps = self._epochs.values()
        active = np.array([one.active for one in maps], np.bool_).reshape(-1, self.shape.num_ranks)
        needed = np.array([one.needed for one in maps], np.int64)
        return StepRules(
            stride, stride_from, np.array(list(self._epochs), np.int64), active, needed
        )

    def pending(self) -> int:
        """Return the number of incomplete steps."""
        return sum(buffer.num_pending for buffer in self._buffers.values())

    def highest_step(self, rank: EpRank) -> int | None:
        """Return the highest step received from a rank; None before the first."""
        highest = NO_STEP
        for buffer in self._buffers.values():
            highest = max(highest, buffer.highest[rank])
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
        if (mismatch := buffer.mismatch(report)) is not None:
            rejection = Rejection(Reason.BAD_LENGTH, len(report.steps), mismatch)
            return Intake(report.last_step, rejected=(rejection,))
        last = report.last_step
        repeated = last is not None and last <= buffer.highest[report.rank]
        wrong = self._wrong_sums(report)
        flags, lacking = buffer.check(report, wrong, self._rules)
        dropped: list[Rejection] = []
        if lacking:
            self._make_room(buffer, report, flags, lacking, dropped)
            again, _ = buffer.check(report, wrong, self._rules)
            flags[(flags == 0) & (again > 0)] = StepFlag.NO_ROOM
        added = buffer.add(report, flags, self._rules)
        rejected = [*self._refusals(buffer, report, added), *dropped] if added.seen else dropped
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
        self,
        buffer: StepBuffer,
        report: LoadReport,
        flags: NDArray[np.uint8],
        lacking: int,
        rejected: list[Rejection],
    ) -> None:
        """Drop the oldest steps, of the buffer or of the report, so that the others fit."""
        pending = buffer.pending
        begun = buffer.rows["step"][pending]
        new = np.setdiff1d(report.steps["step"][flags & StepFlag.REFUSED == 0], begun)
        newest = int(np.sort(np.concatenate([begun, new]))[lacking - 1])
        for row in pending[begun <= newest]:
            self._give_up(buffer, row, rejected)
        buffer.closed_to = max(buffer.closed_to, newest)

    def _refusals(
        self, buffer: StepBuffer, report: LoadReport, added: AddedSteps
    ) -> Iterator[Rejection]:
        """Explain which steps of a report were not used."""
        rank, steps = report.rank, report.steps

        def those(flag: int) -> StepTable:
            return steps[added.flags & flag > 0] if added.seen & flag else steps[:0]

        if len(duplicate := those(StepFlag.DUPLICATE)["step"]):
            detail = f"rank {rank} steps {duplicate[0]}..{duplicate[-1]} were reported before"
            yield Rejection(Reason.DUPLICATE_STEP, len(duplicate), detail)
        if len(late := those(StepFlag.LATE)["step"]):
            closed = f"came after step {buffer.closed_to} was closed"
            detail = f"rank {rank} steps {late[0]}..{late[-1]} {closed}"
            yield Rejection(Reason.LATE_STEP, len(late), detail)
        if len(refused := those(StepFlag.NO_ROOM)["step"]):
            waiting = f"{self.max_pending} later steps are waiting for other ranks"
            detail = f"rank {rank} steps {refused[0]}..{refused[-1]}: {waiting}"
            yield Rejection(Reason.LATE_STEP, len(refused), detail)
        if len(unknown := those(StepFlag.UNKNOWN_EPOCH)):
            step, epoch = unknown["step"][0], unknown["epoch"][0]
            detail = (
                f"rank {rank} step {step} ran under epoch {epoch}, known are {sorted(self._epochs)}"
            )
            yield Rejection(Reason.UNKNOWN_EPOCH, len(unknown), detail)
        if len(wrong := those(StepFlag.SUM_MISMATCH)):
            place = int(np.flatnonzero(added.flags & StepFlag.SUM_MISMATCH)[0])
            sums, want = (
                report.counts[place].sum(axis=1),
                int(wrong["tokens"][0]) * self.shape.top_k,
            )
            layer = int((sums != want).argmax())
            detail = (
                f"rank {rank} step {wrong['step'][0]} layer {layer}: counts sum to"
                f" {sums[layer]}, tokens x top_k = {wrong['tokens'][0]} x {self.shape.top_k}"
            )
            yield Rejection(Reason.SUM_MISMATCH, len(wrong), detail)
        if len(other := those(StepFlag.OTHER_EPOCH)["step"]):
            detail = f"rank {rank} ran step {other[0]} under another epoch than the ranks before it"
            yield Rejection(Reason.EPOCH_DISAGREES, len(other), detail)

    def _source_sums(self, report: LoadReport, added: AddedSteps) -> dict[Phase, NDArray[np.int64]]:
        """Return the (L, E) tokens by phase of the accepted steps whose sums are not yet known."""
        used = (added.rows >= 0) & (report.steps["dummy"] == 0)
        codes, steps = report.steps["phase"], report.steps["step"]
        found = [
            (
                phase,
                used & (codes == PHASE_CODE[phase]) & (steps > self.summed_to.get(phase, NO_STEP)),
            )
            for phase in Phase
        ]
        return {phase: report.counts[mask].sum(axis=0) for phase, mask in found if mask.any()}

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
            buffer.tokens[rows],
            buffer.compute_s[rows],
        )
        unsummed = None
        if bad.any():
            rejected.append(self._sum_mismatch(buffer, rows[bad], known[bad], sums[bad]))
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
            too_large[part] = sum_slots(
                buffer.counts,
                buffer.reported,
                rows[part],
                known.first,
                known.others,
                counts[part],
                sums[part],
            )
            first = part.stop
        want = shape.top_k * buffer.tokens[rows].sum(axis=1)
        return counts, sums, too_large | (sums != want[:, None]).any(axis=1)

    def _sum_mismatch(
        self,
        buffer: StepBuffer,
        rows: NDArray[np.int64],
        known: NDArray[np.void],
        sums: NDArray[np.int64],
    ) -> Rejection:
        """Explain steps that do not add up, at least one; sums: (n, L)."""
        tokens = int(buffer.tokens[rows[0]].sum())
        layer = int(np.abs(sums[0] - tokens * self.shape.top_k).argmax())
        detail = (
            f"step {known['step'][0]} layer {layer}: counts of all ranks sum to {sums[0, layer]},"
            f" tokens x top_k = {tokens} x {self.shape.top_k}"
        )
        return Rejection(Reason.SUM_MISMATCH, int(known["num_reported"].sum()), detail)

    def _drop_passed(self, buffer: StepBuffer, rejected: list[Rejection]) -> None:
        """Give up incomplete steps that every rank has passed."""
        passed = buffer.lowest
        if passed > buffer.passed_to:
            buffer.passed_to = passed
            for row in buffer.pending:
                if buffer.rows["step"][row] <= passed:
                    self._give_up(buffer, row, rejected)

    def _give_up(self, buffer: StepBuffer, row: np.int64, rejected: list[Rejection]) -> None:
        """Release an incomplete step and close all steps up to it."""
        (known,) = buffer.release(np.array([row]))
        step, reported = int(known["step"]), int(known["num_reported"])
        buffer.closed_to = max(buffer.closed_to, step)
        detail = f"step {step} was reported by {reported} of {self.shape.num_ranks} ranks"
        rejected.append(Rejection(Reason.INCOMPLETE_STEP, reported, detail))
