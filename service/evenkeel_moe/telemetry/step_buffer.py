"""The memory of the assembler: incomplete steps, and the map of each epoch."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.load import CountingSide, LoadReport
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.telemetry import step_kernels as kernels
from evenkeel_moe.telemetry.step_kernels import NO_STEP


class EpochMap(NamedTuple):
    """The slots of each logical expert in one epoch."""

    first: NDArray[np.int32]
    """(L, E) index of the first slot of an expert in a row of the buffer, (R * L * slots_per_rank);
    -1 for an expert without a slot."""
    others: NDArray[np.int32]
    """(n, 2) index of each further slot, and its expert as layer * E + expert."""


def derive_epoch_map(placement: Placement) -> EpochMap:
    """Derive the map of one epoch."""
    layers, ranks, width = placement.num_layers, placement.num_ranks, placement.slots_per_rank
    experts = placement.num_logical_experts
    by_rank = placement.phy2log.reshape(layers, ranks, width).transpose(1, 0, 2)
    layer_of = np.broadcast_to(np.arange(layers)[:, None], by_rank.shape)
    slots = np.flatnonzero(by_rank >= 0)
    expert_in = (layer_of * experts + by_rank).reshape(-1)[slots]
    known, at = np.unique(expert_in, return_index=True)
    first = np.full(layers * experts, -1, np.int32)
    first[known] = slots[at]
    others = np.delete(np.column_stack((slots, expert_in)), at, axis=0).astype(np.int32)
    return EpochMap(first.reshape(layers, experts), others)


class StepRules(NamedTuple):
    """The rules by which steps are accepted into a buffer."""

    stride: int
    stride_from: int
    epochs: NDArray[np.int64]
    """(k,) epochs whose maps are known."""


class AddedSteps(NamedTuple):
    """The outcome for the n steps of a report."""

    flags: NDArray[np.uint8]
    """(n,) bits of `StepFlag`."""
    seen: int
    """The union of all flags; 0 if nothing was entered for lack of rows."""
    rows: NDArray[np.int64]
    """(n,) their rows in the buffer, -1 for refused steps."""
    num_steps: int
    """Number of steps that were not refused."""
    lacking: int
    """Rows that were lacking to enter the report."""


class StepBuffer:
    """The incomplete steps of one counting side. A row holds one step; rows are reused."""

    def __init__(self, side: CountingSide, shape: ModelShape, capacity: int) -> None:
        self.side = side
        layers, ranks = shape.num_layers, shape.num_ranks
        # Pages of zeros take no memory until a row is used, and the first free row is used.
        if side is CountingSide.DESTINATION:
            self._of_report = (layers, shape.slots_per_rank)
            self.counts = np.zeros((capacity + 1, ranks, layers * shape.slots_per_rank), np.uint32)
            """(capacity + 1, R, L * slots_per_rank): the counts of a rank are contiguous. Until it
            reports, they are those of an earlier step. The last row takes the counts of refused
            steps, whose row is -1. SOURCE: (capacity, L, E)."""
        else:
            self._of_report = (layers, shape.num_logical_experts)
            # Sums over ranks need more bits than one rank's counts.
            self.counts = np.zeros((capacity, *self._of_report), np.int64)
        self.board = kernels.Board(
            np.zeros(capacity, kernels.ROW),
            np.zeros((capacity, ranks), np.int64),
            np.zeros((capacity, ranks)),
            np.full(ranks, NO_STEP, np.int64),
        )
        self.board.rows["step"] = NO_STEP
        self.lowest = NO_STEP
        """The step that all ranks have passed: none will report steps up to it any more."""
        self.passed_to = NO_STEP
        """Incomplete steps up to this one were given up."""
        self.closed_to = NO_STEP
        """Steps up to this one are not accepted any more."""

    @property
    def pending(self) -> NDArray[np.int64]:
        """The rows of the pending steps, oldest first."""
        steps = self.board.rows["step"]
        used = np.flatnonzero(steps != NO_STEP)
        return used[np.argsort(steps[used])]

    def mismatch(self, report: LoadReport) -> str | None:
        """Return why a report cannot be of this group; None if it can.

        `add` relies on its rank and shape.
        """
        num_ranks, shape = len(self.board.highest), (len(report.steps), *self._of_report)
        if not 0 <= report.rank < num_ranks:
            return f"rank {report.rank} is none of {num_ranks}"
        if report.counts.shape != shape:
            return (
                f"rank {report.rank} has counts of shape {report.counts.shape}, the group {shape}"
            )
        return None

    def add(self, report: LoadReport, wrong: NDArray[np.bool_], rules: StepRules) -> AddedSteps:
        """Enter the steps of a report that are acceptable; if there is no room for all, enter none.

        Args:
            report: without a mismatch; its steps rise.
            wrong: (n,) True for steps that do not add up.
            rules: by which steps are accepted.
        """
        steps, rank = report.steps, report.rank
        flags, rows = np.empty(len(steps), np.uint8), np.empty(len(steps), np.int64)
        num_steps, seen, lacking, lowest = kernels.enter_steps(
            steps, wrong, rank, self.closed_to, *rules, self.board, flags, rows
        )
        self.lowest = max(self.lowest, lowest)
        if self.side is CountingSide.DESTINATION:
            # A dummy step of this rank still counts real tokens of other ranks; their sum decides.
            self.counts[rows, rank] = report.counts.reshape(len(steps), self.counts.shape[2])
        elif num_steps:
            self._add_source(report, rows)
        return AddedSteps(flags, seen, rows, num_steps, lacking)

    def _add_source(self, report: LoadReport, rows: NDArray[np.int64]) -> None:
        """Add SOURCE counts, which are of the same experts for all ranks."""
        taken = rows >= 0
        rows = rows[taken]
        counts = np.where(report.steps["dummy"][taken, None, None], 0, report.counts[taken])
        first = self.board.rows["num_reported"][rows] == 1
        self.counts[rows[first]] = counts[first]
        self.counts[rows[~first]] += counts[~first]

    def release(self, rows: NDArray[np.int64]) -> NDArray[np.void]:
        """Free the rows of some steps and return what is known of them.

        Their counts stay until another step takes the row.
        """
        known = self.board.rows[rows]
        self.board.rows["step"][rows] = NO_STEP
        return known
