"""From reports of single ranks to complete steps: what may enter a window, and why the rest may not.

A step is complete when every rank of its epoch's active mask reported it (R18): a silent rank makes its
experts unknown, never cold. What is complete must also add up (R19). Pure: reports in, steps out, in
bounded memory; the caller stores, counts and logs.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.errors import InvalidInput, Reason, ShapeMismatch
from evenkeel.model.ids import Epoch, EpRank
from evenkeel.model.load import CountingSide, LoadReport, LoadWindow, Phase
from evenkeel.model.placement import Placement
from evenkeel.model.topology import ModelShape
from evenkeel.protocol.board import MIXED, NO_STEP, PHASE_CODE, PHASES, Board, EpochMap, add_up, derive_map

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
        self._boards: dict[CountingSide, Board] = {}
        self._epochs: dict[int, EpochMap] = {}
        self._stride, self._stride_from = 1, 0

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

    def knows_epoch(self, epoch: int) -> bool:
        """Whether reports of this epoch can be used."""
        return epoch in self._epochs

    def sample(self, stride: int, from_step: int) -> None:
        """From a step on use only those with step % stride == 0 (R18)."""
        if stride < 1:
            raise InvalidInput(f"stride is {stride}, must be at least 1")
        self._stride, self._stride_from = stride, from_step

    def pending(self) -> int:
        """Steps begun and not complete."""
        return sum(len(board.row_of) for board in self._boards.values())

    def highest_step(self, rank: EpRank) -> int | None:
        """Highest step taken in from a rank; None before the first."""
        highest = max([board.highest[rank] for board in self._boards.values()], default=NO_STEP)
        return None if highest == NO_STEP else highest

    def take(self, report: LoadReport) -> Intake:
        """Take one report in. Never raises on what a rank sent; a report twice changes nothing.

        The counts are trusted to have the declared shape and no negative value: the codec saw to that.
        """
        board = self._boards.get(report.side)
        if board is None:
            board = self._boards[report.side] = Board(report.side, self.shape, self.max_pending)
        rejected: list[Rejection] = []
        positions = self._make_room(board, report, self._screen(board, report, rejected), rejected)
        done = self._enter(board, report, positions, rejected) if positions else []
        if report.steps:
            highest = report.steps[-1].step
            board.highest[report.rank] = max(board.highest[report.rank], highest)
        complete = self._complete(board, done, rejected) if done else ()
        self._drop_passed(board, rejected)
        return Intake(
            self.highest_step(report.rank),
            len(positions),
            tuple(rejected),
            complete,
            self._source_sums(report, positions) if report.side is CountingSide.SOURCE else None,
        )

    # --- one report -------------------------------------------------------------------------------

    def _screen(self, board: Board, report: LoadReport, rejected: list[Rejection]) -> list[int]:
        """Positions in the report of the steps that may enter the board."""
        duplicate, late, unknown = [], [], []
        highest = board.highest[report.rank]
        positions: list[int] = []
        for position, meta in enumerate(report.steps):
            step = meta.step
            if step <= highest:
                duplicate.append(step)
            elif step >= self._stride_from and step % self._stride:
                continue
            elif step <= board.floor:
                late.append(step)
            elif meta.epoch not in self._epochs:
                unknown.append((step, meta.epoch))
            elif self._epochs[meta.epoch].active[report.rank]:
                positions.append(position)
        if report.side is CountingSide.SOURCE and positions:
            positions = self._screen_sums(report, positions, rejected)
        rank = report.rank
        if duplicate:
            detail = f"rank {rank} steps {duplicate[0]}..{duplicate[-1]} were reported before"
            rejected.append(Rejection(Reason.DUPLICATE_STEP, len(duplicate), detail))
        if late:
            detail = f"rank {rank} steps {late[0]}..{late[-1]} came after step {board.floor} was closed"
            rejected.append(Rejection(Reason.LATE_STEP, len(late), detail))
        if unknown:
            detail = f"rank {rank} step {unknown[0][0]} ran under epoch {unknown[0][1]}, known are {sorted(self._epochs)}"
            rejected.append(Rejection(Reason.UNKNOWN_EPOCH, len(unknown), detail))
        return positions

    def _screen_sums(self, report: LoadReport, positions: list[int], rejected: list[Rejection]) -> list[int]:
        """R19 for SOURCE: in every layer the counts of a step sum to tokens x top_k. Dummy steps have none."""
        sums = report.counts[positions].sum(axis=2)
        want = np.array([0 if report.steps[p].dummy else report.steps[p].tokens for p in positions])
        wrong = (sums != want[:, None] * self.shape.top_k) & np.array(
            [not report.steps[p].dummy for p in positions]
        )[:, None]
        if not wrong.any():
            return positions
        bad = wrong.any(axis=1)
        where, layer = np.argwhere(wrong)[0]
        detail = (
            f"rank {report.rank} step {report.steps[positions[where]].step} layer {layer}: counts sum to"
            f" {sums[where, layer]}, tokens x top_k = {want[where]} x {self.shape.top_k}"
        )
        rejected.append(Rejection(Reason.SUM_MISMATCH, int(bad.sum()), detail))
        return [p for p, is_bad in zip(positions, bad, strict=True) if not is_bad]

    def _make_room(
        self, board: Board, report: LoadReport, positions: list[int], rejected: list[Rejection]
    ) -> list[int]:
        """Let the oldest steps give way, begun ones or those of the report; the positions that stay."""
        if len(positions) <= len(board.free):
            return positions
        new = [report.steps[p].step for p in positions if report.steps[p].step not in board.row_of]
        excess = len(new) - len(board.free)
        if excess <= 0:
            return positions
        oldest = sorted([*board.row_of, *new])[:excess]
        for step in oldest:
            if step in board.row_of:
                self._give_up(board, step, rejected)
        board.floor = max(board.floor, oldest[-1])
        kept = [p for p in positions if report.steps[p].step > board.floor]
        if len(kept) < len(positions):
            first = report.steps[positions[0]].step
            detail = (
                f"rank {report.rank} step {first}: {self.max_pending} later steps are waiting for other ranks"
            )
            rejected.append(Rejection(Reason.LATE_STEP, len(positions) - len(kept), detail))
        return kept

    def _enter(
        self, board: Board, report: LoadReport, positions: list[int], rejected: list[Rejection]
    ) -> list[int]:
        """Write the steps into their rows; the steps now reported by all."""
        rank, row_of = report.rank, board.row_of
        torn: list[int] = []
        done: list[int] = []
        rows: list[int] = []
        tokens: list[int] = []
        compute_s: list[float] = []
        for position in positions:
            meta = report.steps[position]
            step, epoch, phase, real_tokens, dummy, seconds = meta
            row = row_of.get(step)
            if row is None:
                row = board.open(step, meta)
            rows.append(row)
            tokens.append(0 if dummy else real_tokens)
            compute_s.append(math.nan if seconds is None else seconds)
            begun = board.epoch[row]
            if begun != epoch:
                board.torn[row] = True
                torn.append(step)
            if not dummy:
                board.real[row] = True
            if board.phase[row] != PHASE_CODE[phase]:
                board.phase[row] = MIXED
            board.num_reported[row] = reported = board.num_reported[row] + 1
            how = self._epochs.get(begun)
            if how is not None and reported == how.needed:
                done.append(step)
        where = np.array(rows)
        board.tokens[where, rank] = tokens
        board.compute_s[where, rank] = compute_s
        self._write(board, report, positions, where)
        if torn:
            detail = f"rank {rank} ran step {torn[0]} under another epoch than the ranks before it"
            rejected.append(Rejection(Reason.EPOCH_DISAGREES, len(torn), detail))
        return done

    def _write(self, board: Board, report: LoadReport, positions: list[int], rows: NDArray[np.int64]) -> None:
        counts = report.counts
        if len(positions) < len(counts):
            counts = counts[positions]
        if report.side is CountingSide.DESTINATION:
            # Counts of a dummy step on this rank still are real tokens of other ranks: the sum decides.
            board.counts[rows, report.rank] = counts.reshape(len(counts), -1)
            return
        dummy = np.array([report.steps[p].dummy for p in positions])
        board.counts[rows] += np.where(dummy[:, None, None], 0, counts)

    def _source_sums(self, report: LoadReport, positions: list[int]) -> dict[Phase, NDArray[np.int64]]:
        by_phase: dict[Phase, list[int]] = {}
        for position in positions:
            meta = report.steps[position]
            if not meta.dummy:
                by_phase.setdefault(meta.phase, []).append(position)
        return {phase: report.counts[chosen].sum(axis=0) for phase, chosen in by_phase.items()}

    # --- steps that end ---------------------------------------------------------------------------

    def _complete(
        self, board: Board, done: list[int], rejected: list[Rejection]
    ) -> tuple[tuple[Phase, LoadWindow], ...]:
        """Close complete steps and make windows of those that may be used."""
        order = sorted(done)
        closed = [board.close(step) for step in order]
        torn = [row for row in closed if board.torn[row]]
        if torn:
            step = order[closed.index(torn[0])]
            count = sum(board.num_reported[row] for row in torn)
            detail = f"step {step} ran under more than one epoch"
            rejected.append(Rejection(Reason.EPOCH_DISAGREES, count, detail))
        usable = [
            (step, row)
            for step, row in zip(order, closed, strict=True)
            if board.real[row] and not board.torn[row]
        ]
        if not usable:
            return ()
        steps, rows = np.array([s for s, _ in usable], np.int64), np.array([r for _, r in usable], np.int64)
        counts, sums, bad = self._logical_counts(board, rows)
        if bad.any():
            rejected.append(self._sum_mismatch(board, steps, rows, sums, bad))
            steps, rows, counts = steps[~bad], rows[~bad], counts[~bad]
        window = LoadWindow(
            counts,
            steps,
            np.array([board.epoch[row] for row in rows], np.int64),
            board.tokens[rows],
            board.compute_s[rows],
        )
        phases = np.array([board.phase[row] for row in rows], np.int8)
        found = [(phase, phases == code) for code, phase in enumerate(PHASES)]
        return tuple(
            (phase, window if mask.all() else _pick(window, mask)) for phase, mask in found if mask.any()
        )

    def _logical_counts(
        self, board: Board, rows: NDArray[np.int64]
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
        epochs = [board.epoch[row] for row in rows]
        # A run of one epoch at a time, nearly always all. Known: it said a moment ago that the step is complete.
        first = 0
        for epoch, run in groupby(epochs):
            part = slice(first, first + sum(1 for _ in run))
            experts = self._epochs[epoch].experts
            too_large[part] = add_up(board.counts, rows[part], experts, counts[part], sums[part])
            first = part.stop
        want = shape.top_k * board.tokens[rows].sum(axis=1)
        return counts, sums, too_large | (sums != want[:, None]).any(axis=1)

    def _sum_mismatch(
        self,
        board: Board,
        steps: NDArray[np.int64],
        rows: NDArray[np.int64],
        sums: NDArray[np.int64],
        bad: NDArray[np.bool_],
    ) -> Rejection:
        first = int(np.flatnonzero(bad)[0])
        tokens = int(board.tokens[rows[first]].sum())
        layer = int(np.abs(sums[first] - tokens * self.shape.top_k).argmax())
        detail = (
            f"step {steps[first]} layer {layer}: counts of all ranks sum to {sums[first, layer]},"
            f" tokens x top_k = {tokens} x {self.shape.top_k}"
        )
        return Rejection(Reason.SUM_MISMATCH, sum(board.num_reported[row] for row in rows[bad]), detail)

    def _drop_passed(self, board: Board, rejected: list[Rejection]) -> None:
        """Give up steps that every rank has passed without all reporting them."""
        passed = min(board.highest)
        if passed > board.passed:
            board.passed = passed
            for step in sorted(step for step in board.row_of if step <= passed):
                self._give_up(board, step, rejected)

    def _give_up(self, board: Board, step: int, rejected: list[Rejection]) -> None:
        row = board.close(step)
        board.floor = max(board.floor, step)
        reported = board.num_reported[row]
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
