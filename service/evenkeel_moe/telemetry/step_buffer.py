"""The assembler's memory: steps begun and not complete, and how the slots of an epoch add up."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.load import CountingSide, LoadReport
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.telemetry import step_kernels as kernels

__all__ = ["NO_STEP", "Board", "Entered", "EpochMap", "Rules", "derive_map"]

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class EpochMap:
    """How the slots of one epoch add up to logical experts."""

    active: NDArray[np.bool_]
    """(R,)"""
    needed: int
    first: NDArray[np.int32]
    """(L, E): where in a board's row, (R * L * slots_per_rank), an expert's first slot is; -1 for one without."""
    others: NDArray[np.int32]
    """(n, 2): where each further slot is, and its expert among all of all layers, layer * E + expert."""


def derive_map(placement: Placement, active: NDArray[np.bool_]) -> EpochMap:
    """The map of one epoch; active: (R,) bool."""
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
    return EpochMap(active, int(active.sum()), first.reshape(layers, experts), others)


class Rules(NamedTuple):
    """Which steps may enter a board."""

    stride: int
    stride_from: int
    epochs: NDArray[np.int64]
    """(k,) epochs whose maps are known."""
    active: NDArray[np.bool_]
    """(k, R) ranks that take part in each."""
    needed: NDArray[np.int64]
    """(k,) how many they are."""


class Entered(NamedTuple):
    """What became of a report's n steps."""

    fate: NDArray[np.uint8]
    """(n,) flags of `Fate`."""
    seen: int
    """All of them together."""
    rows: NDArray[np.int64]
    """(n,) where in the board they are, -1 for those refused."""
    num_steps: int
    """So many were not refused."""


class Board:
    """Steps begun and not complete, of one counting side. Rows are reused; a row is one step."""

    def __init__(self, side: CountingSide, shape: ModelShape, capacity: int) -> None:
        self.side = side
        layers, ranks = shape.num_layers, shape.num_ranks
        # Zero pages cost nothing until a row is used, and rows used before are used first.
        if side is CountingSide.DESTINATION:
            self._of_report = (layers, shape.slots_per_rank)
            self.counts = np.zeros((capacity, ranks, layers * shape.slots_per_rank), np.uint32)
            """(capacity, R, L * slots_per_rank): what one rank reports lies together, and is what an earlier step left until
            it reported. SOURCE: (capacity, L, E)."""
        else:
            self._of_report = (layers, shape.num_logical_experts)
            # Sums over ranks need more bits than one rank's counts.
            self.counts = np.zeros((capacity, *self._of_report), np.int64)
        self.tokens = np.zeros((capacity, ranks), np.int64)
        self.compute_s = np.full((capacity, ranks), np.nan)
        self.reported = np.zeros((capacity, ranks), np.bool_)
        self.rows = np.zeros(capacity, kernels.ROW)
        self._order = np.arange(capacity)
        """Every row once: first those waited for, in the order of their steps, then the free ones."""
        self.num_pending = 0
        self.highest = [NO_STEP] * ranks
        """Highest step each rank reported on this side."""
        self.passed = NO_STEP
        """Steps up to here no rank will report again."""
        self.floor = NO_STEP
        """Steps up to here are closed."""

    @property
    def pending(self) -> NDArray[np.int64]:
        """Rows of the steps waited for, the oldest first."""
        return self._order[: self.num_pending].copy()

    def misfit(self, report: LoadReport) -> str | None:
        """Why a report cannot be of this group, None where it can; what follows writes by its rank and shape."""
        num_ranks, shape = len(self.highest), (len(report.steps), *self._of_report)
        if not 0 <= report.rank < num_ranks:
            return f"rank {report.rank} is none of {num_ranks}"
        if report.counts.shape != shape:
            return (
                f"rank {report.rank} has counts of shape {report.counts.shape}, the group {shape}"
            )
        return None

    def judge(
        self, report: LoadReport, wrong: NDArray[np.bool_], rules: Rules
    ) -> tuple[NDArray[np.uint8], int]:
        """Who may enter.

        Args:
            report: without a misfit; its steps rise.
            wrong: (n,) which of them do not add up.
            rules: what is known and asked for.

        Returns:
            (n,) fates, 0 for a step that may enter, and how many rows more than there are they need.
        """
        steps = report.steps
        fate = np.empty(len(steps), np.uint8)
        new = kernels.judge(
            steps, wrong, report.rank, self.highest[report.rank], self.floor, rules.stride, rules.stride_from,
            rules.epochs, rules.active, self.rows, self._order, self.num_pending, fate,
        )  # fmt: skip
        return fate, max(0, new - (len(self.rows) - self.num_pending))

    def enter(self, report: LoadReport, fate: NDArray[np.uint8], rules: Rules) -> Entered:
        """Write the steps that `judge` let in and found room for; fate: as it gave them, changed here."""
        steps, rank = report.steps, report.rank
        rows = np.empty(len(steps), np.int64)
        self.num_pending, num_steps, seen = kernels.enter(
            steps, rank, rules.epochs, rules.needed, self.rows, self._order, self.num_pending, self.tokens,
            self.compute_s, self.reported, fate, rows,
        )  # fmt: skip
        if self.side is CountingSide.DESTINATION:
            # Counts of a dummy step on this rank still are real tokens of other ranks: the sum decides.
            kernels.put(
                report.counts.reshape(len(steps), self.counts.shape[2]), rows, rank, self.counts
            )
        else:
            self._add(report, rows)
        if len(steps):
            self.highest[rank] = max(self.highest[rank], int(steps["step"][-1]))
        return Entered(fate, seen, rows, num_steps)

    def _add(self, report: LoadReport, rows: NDArray[np.int64]) -> None:
        """SOURCE: every rank's counts are of the same experts."""
        taken = rows >= 0
        rows = rows[taken]
        counts = np.where(report.steps["dummy"][taken, None, None], 0, report.counts[taken])
        first = self.rows["num_reported"][rows] == 1
        self.counts[rows[first]] = counts[first]
        self.counts[rows[~first]] += counts[~first]

    def close(self, rows: NDArray[np.int64]) -> NDArray[np.void]:
        """Wait for some steps no longer. What was known of them; their counts stay until another step begins."""
        self.num_pending = kernels.close(rows, self.rows, self._order, self.num_pending)
        return self.rows[rows]
