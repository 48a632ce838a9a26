"""From reports of single ranks to complete steps: what may enter a window, and why the rest may not.

A step is complete when every rank of its epoch's active mask reported it (R18): a silent rank makes its
experts unknown, never cold. What is complete must also add up (R19). Pure: reports in, steps out, in
bounded memory; the caller stores, counts and logs.
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
from evenkeel_moe.telemetry.step_buffer import NO_STEP, Board, Entered, EpochMap, Rules, derive_map
from evenkeel_moe.telemetry.step_kernels import Fate, add_up

__all__ = ["Intake", "Quarantine", "Rejection", "StepAssembler"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Steps that were not used."""

    reason: Reason
    rank_steps: int
    """One for each rank's report of one step."""
    detail: str
    """With the numbers."""


class Intake(NamedTuple):
    """What became of one report."""

    highest_step: int | None
    """Highest step taken in from the rank so far, used or not: it may forget all up to it."""
    accepted_steps: int = 0
    rejected: tuple[Rejection, ...] = ()
    complete: tuple[tuple[Phase, LoadWindow], ...] = ()
    """Steps this report completed, by phase, oldest first."""
    source: Mapping[Phase, NDArray[np.int64]] | None = None
    """(L, E) [tokens] this rank routed in the accepted steps, by phase; None for DESTINATION reports."""
    repeated: bool = False
    """Its rank had reported all its steps before; False where there are none."""


class Quarantine:
    """Counts what was rejected by reason and keeps a few samples of each, newest last."""

    def __init__(self, samples_per_reason: int = 8) -> None:
        self.rank_steps: dict[Reason, int] = defaultdict(int)
        self._samples: dict[Reason, deque[tuple[EpRank, str]]] = {}
        self._samples_per_reason = samples_per_reason

    def add(self, rank: EpRank, rejection: Rejection) -> None:
        """Count one rejection and keep its words."""
        self.rank_steps[rejection.reason] += rejection.rank_steps
        kept = self._samples.setdefault(rejection.reason, deque(maxlen=self._samples_per_reason))
        kept.append((rank, rejection.detail))

    def samples(self, reason: Reason) -> tuple[tuple[EpRank, str], ...]:
        """(rank, words) of the newest rejections for a reason."""
        return tuple(self._samples.get(reason, ()))


class StepAssembler:
    """Complete steps of one generation of one deployment.

    Ranks report their steps in rising order; a step that every rank has passed can never be completed.

    Args:
        shape: as the generation declared.
        max_pending: most incomplete steps held; the oldest gives way.
    """

    def __init__(self, shape: ModelShape, *, max_pending: int = 256) -> None:
        if max_pending < 1:
            raise InvalidInput(f"max_pending is {max_pending}, must be at least 1")
        self.shape = shape
        self.max_pending = max_pending
        self.summed_to: Mapping[Phase, int] = {}
        """Steps of a phase up to which source-side sums are known already, from a window that was taken back."""
        self._boards: dict[CountingSide, Board] = {}
        self._epochs: dict[int, EpochMap] = {}
        self._rules = self._make_rules(1, 0)

    def learn_epoch(
        self, epoch: Epoch, placement: Placement, active: NDArray[np.bool_] | None = None
    ) -> None:
        """The map an epoch runs, or will run, under; the newest word on an epoch holds.

        Args:
            epoch: of the committed placement, or of the one a wave would lead to.
            placement: its map.
            active: (R,) bool - ranks that take part; None means all.
        """
        if placement.sizes != self.shape.sizes:
            raise ShapeMismatch(
                f"map is (L, S, R, E) = {placement.sizes}, the deployment is {self.shape.sizes}"
            )
        mask = np.ones(self.shape.num_ranks, np.bool_) if active is None else active
        self._epochs.pop(epoch, None)
        self._epochs[epoch] = derive_map(placement, mask)
        while len(self._epochs) > 8:
            del self._epochs[next(iter(self._epochs))]
        self._rules = self._make_rules(self._rules.stride, self._rules.stride_from)

    def knows_epoch(self, epoch: int) -> bool:
        """Whether reports of this epoch can be used."""
        return epoch in self._epochs

    def sample(self, stride: int, from_step: int) -> None:
        """From a step on use only those with step % stride == 0 (R18)."""
        if stride < 1:
            raise InvalidInput(f"stride is {stride}, must be at least 1")
        self._rules = self._make_rules(stride, from_step)

    def _make_rules(self, stride: int, stride_from: int) -> Rules:
        maps = self._epochs.values()
        active = np.array([one.active for one in maps], np.bool_).reshape(-1, self.shape.num_ranks)
        needed = np.array([one.needed for one in maps], np.int64)
        return Rules(stride, stride_from, np.array(list(self._epochs), np.int64), active, needed)

    def pending(self) -> int:
        """Steps begun and not complete."""
        return sum(board.num_pending for board in self._boards.values())

    def highest_step(self, rank: EpRank) -> int | None:
        """Highest step taken in from a rank; None before the first."""
        highest = NO_STEP
        for board in self._boards.values():
            highest = max(highest, board.highest[rank])
        return None if highest == NO_STEP else highest

    def take(self, report: LoadReport) -> Intake:
        """Take one report in. Never raises on what a rank sent; a report twice changes nothing.

        The counts are trusted to have no negative value and the steps to rise: the codec saw to that.
        """
        board = self._boards.get(report.side)
        if board is None:
            board = self._boards[report.side] = Board(report.side, self.shape, self.max_pending)
        if (misfit := board.misfit(report)) is not None:
            rejection = Rejection(Reason.BAD_LENGTH, len(report.steps), misfit)
            return Intake(report.last_step, rejected=(rejection,))
        last = report.last_step
        repeated = last is not None and last <= board.highest[report.rank]
        wrong = self._wrong_sums(report)
        fate, lacking = board.judge(report, wrong, self._rules)
        gave_way: list[Rejection] = []
        if lacking:
            self._make_room(board, report, fate, lacking, gave_way)
            again, _ = board.judge(report, wrong, self._rules)
            fate[(fate == 0) & (again > 0)] = Fate.CROWDED
        entered = board.enter(report, fate, self._rules)
        rejected = (
            [*self._refusals(board, report, entered), *gave_way] if entered.seen else gave_way
        )
        complete: tuple[tuple[Phase, LoadWindow], ...] = ()
        if entered.seen & Fate.COMPLETE:
            complete = self._complete(board, entered.rows[fate & Fate.COMPLETE > 0], rejected)
        self._drop_passed(board, rejected)
        return Intake(
            self.highest_step(report.rank),
            entered.num_steps,
            tuple(rejected),
            complete,
            self._source_sums(report, entered) if report.side is CountingSide.SOURCE else None,
            repeated,
        )

    # --- one report -------------------------------------------------------------------------------

    def _wrong_sums(self, report: LoadReport) -> NDArray[np.bool_]:
        """R19 for SOURCE, (n,): whether in some layer the counts do not sum to tokens x top_k. Dummy steps have none."""
        if report.side is CountingSide.DESTINATION or not len(report.steps):
            return np.zeros(len(report.steps), np.bool_)
        sums, want = report.counts.sum(axis=2), report.steps["tokens"] * self.shape.top_k
        wrong: NDArray[np.bool_] = (sums != want[:, None]).any(axis=1) & (
            report.steps["dummy"] == 0
        )
        return wrong

    def _make_room(
        self,
        board: Board,
        report: LoadReport,
        fate: NDArray[np.uint8],
        lacking: int,
        rejected: list[Rejection],
    ) -> None:
        """Let the oldest steps give way, begun ones or those of the report."""
        pending = board.pending
        begun = board.rows["step"][pending]
        new = np.setdiff1d(report.steps["step"][fate & Fate.REFUSED == 0], begun)
        newest = int(np.sort(np.concatenate([begun, new]))[lacking - 1])
        for row in pending[begun <= newest]:
            self._give_up(board, row, rejected)
        board.floor = max(board.floor, newest)

    def _refusals(self, board: Board, report: LoadReport, entered: Entered) -> Iterator[Rejection]:
        """Why steps of a report were not used, in words."""
        rank, steps = report.rank, report.steps

        def those(flag: int) -> StepTable:
            return steps[entered.fate & flag > 0] if entered.seen & flag else steps[:0]

        if len(duplicate := those(Fate.DUPLICATE)["step"]):
            detail = f"rank {rank} steps {duplicate[0]}..{duplicate[-1]} were reported before"
            yield Rejection(Reason.DUPLICATE_STEP, len(duplicate), detail)
        if len(late := those(Fate.LATE)["step"]):
            detail = (
                f"rank {rank} steps {late[0]}..{late[-1]} came after step {board.floor} was closed"
            )
            yield Rejection(Reason.LATE_STEP, len(late), detail)
        if len(crowded := those(Fate.CROWDED)["step"]):
            waiting = f"{self.max_pending} later steps are waiting for other ranks"
            detail = f"rank {rank} steps {crowded[0]}..{crowded[-1]}: {waiting}"
            yield Rejection(Reason.LATE_STEP, len(crowded), detail)
        if len(unknown := those(Fate.UNKNOWN_EPOCH)):
            step, epoch = unknown["step"][0], unknown["epoch"][0]
            detail = (
                f"rank {rank} step {step} ran under epoch {epoch}, known are {sorted(self._epochs)}"
            )
            yield Rejection(Reason.UNKNOWN_EPOCH, len(unknown), detail)
        if len(wrong := those(Fate.SUM_MISMATCH)):
            place = int(np.flatnonzero(entered.fate & Fate.SUM_MISMATCH)[0])
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
        if len(torn := those(Fate.TORN)["step"]):
            detail = f"rank {rank} ran step {torn[0]} under another epoch than the ranks before it"
            yield Rejection(Reason.EPOCH_DISAGREES, len(torn), detail)

    def _source_sums(self, report: LoadReport, entered: Entered) -> dict[Phase, NDArray[np.int64]]:
        used = (entered.rows >= 0) & (report.steps["dummy"] == 0)
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
        self, board: Board, rows: NDArray[np.int64], rejected: list[Rejection]
    ) -> tuple[tuple[Phase, LoadWindow], ...]:
        """Close complete steps, rising, and make windows of those that may be used."""
        known = board.close(rows)
        torn = known["torn"] > 0
        if torn.any():
            detail = f"step {known['step'][torn][0]} ran under more than one epoch"
            count = int(known["num_reported"][torn].sum())
            rejected.append(Rejection(Reason.EPOCH_DISAGREES, count, detail))
        usable = (known["real"] > 0) & ~torn
        if not usable.any():
            return ()
        rows, known = rows[usable], known[usable]
        counts, sums, bad = self._logical_counts(board, rows, known["epoch"])
        if bad.any():
            rejected.append(self._sum_mismatch(board, rows[bad], known[bad], sums[bad]))
            rows, known, counts = rows[~bad], known[~bad], counts[~bad]
        window = LoadWindow(
            counts,
            known["step"].copy(),
            known["epoch"].copy(),
            board.tokens[rows],
            board.compute_s[rows],
        )
        found = [(phase, known["phase"] == PHASE_CODE[phase]) for phase in Phase]
        return tuple(
            (phase, window if mask.all() else _pick(window, mask))
            for phase, mask in found
            if mask.any()
        )

    def _logical_counts(
        self, board: Board, rows: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]:
        """(n, L, E) counts by logical expert, (n, L) their sums, and (n,) which do not add up (R19).

        Counts of a step that does not add up may have overflowed; their sums have not.
        """
        shape, most = self.shape, np.iinfo(np.uint32).max
        if board.side is CountingSide.SOURCE:
            counts = board.counts[rows]
            return counts.astype(np.uint32), counts.sum(axis=2), counts.max(axis=(1, 2)) > most
        counts = np.empty((len(rows), shape.num_layers, shape.num_logical_experts), np.uint32)
        sums = np.empty((len(rows), shape.num_layers), np.int64)
        too_large = np.zeros(len(rows), np.bool_)
        # A run of one epoch at a time, nearly always all. Known: it said a moment ago that the step is complete.
        first = 0
        for epoch, run in groupby(epochs.tolist()):
            part = slice(first, first + sum(1 for _ in run))
            known = self._epochs[epoch]
            too_large[part] = add_up(
                board.counts,
                board.reported,
                rows[part],
                known.first,
                known.others,
                counts[part],
                sums[part],
            )
            first = part.stop
        want = shape.top_k * board.tokens[rows].sum(axis=1)
        return counts, sums, too_large | (sums != want[:, None]).any(axis=1)

    def _sum_mismatch(
        self,
        board: Board,
        rows: NDArray[np.int64],
        known: NDArray[np.void],
        sums: NDArray[np.int64],
    ) -> Rejection:
        """Steps that do not add up, at least one; sums: (n, L)."""
        tokens = int(board.tokens[rows[0]].sum())
        layer = int(np.abs(sums[0] - tokens * self.shape.top_k).argmax())
        detail = (
            f"step {known['step'][0]} layer {layer}: counts of all ranks sum to {sums[0, layer]},"
            f" tokens x top_k = {tokens} x {self.shape.top_k}"
        )
        return Rejection(Reason.SUM_MISMATCH, int(known["num_reported"].sum()), detail)

    def _drop_passed(self, board: Board, rejected: list[Rejection]) -> None:
        """Give up steps that every rank has passed without all reporting them."""
        passed = min(board.highest)
        if passed > board.passed:
            board.passed = passed
            for row in board.pending:
                if board.rows["step"][row] <= passed:
                    self._give_up(board, row, rejected)

    def _give_up(self, board: Board, row: np.int64, rejected: list[Rejection]) -> None:
        (known,) = board.close(np.array([row]))
        step, reported = int(known["step"]), int(known["num_reported"])
        board.floor = max(board.floor, step)
        detail = f"step {step} was reported by {reported} of {self.shape.num_ranks} ranks"
        rejected.append(Rejection(Reason.INCOMPLETE_STEP, reported, detail))


def _pick(window: LoadWindow, mask: NDArray[np.bool_]) -> LoadWindow:
    return LoadWindow(
        window.counts[mask],
        window.steps[mask],
        window.epochs[mask],
        window.tokens[mask],
        window.compute_s[mask],
    )
