"""The assembler's memory: steps begun and not complete, and how the slots of an epoch add up."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel.compiled import kernel
from evenkeel.model.load import CountingSide, Phase, StepMeta
from evenkeel.model.placement import Placement
from evenkeel.model.topology import ModelShape

__all__ = ["MIXED", "NO_STEP", "PHASES", "PHASE_CODE", "Board", "EpochMap", "add_up", "derive_map"]

PHASES = tuple(Phase)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}
MIXED = PHASE_CODE[Phase.MIXED]
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class EpochMap:
    """How the slots of one epoch add up to logical experts."""

    active: NDArray[np.bool_]
    """(R,)"""
    needed: int
    experts: NDArray[np.int32]
    """(R, L, slots_per_rank): the logical expert in every slot, -1 in an empty one. As in a board's row: rank by rank."""


def derive_map(placement: Placement, active: NDArray[np.bool_]) -> EpochMap:
    """The map of one epoch; active: (R,) bool."""
    layers, ranks, width = placement.num_layers, placement.num_ranks, placement.slots_per_rank
    by_rank = placement.phy2log.reshape(layers, ranks, width).transpose(1, 0, 2)
    return EpochMap(active, int(active.sum()), np.array(by_rank, np.int32, order="C"))


@kernel
def add_up(
    counts: NDArray[np.uint32],
    rows: NDArray[np.int64],
    experts: NDArray[np.int32],
    total: NDArray[np.uint32],
    sums: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Sums over the slots of each expert, in one pass over a board's rows.

    Args:
        counts: (capacity, R, L * slots_per_rank) [tokens] of a DESTINATION board.
        rows: (n,) its rows to add up.
        experts: of the `EpochMap` they ran under.
        total: (n, L, E) [tokens], written: by expert. Worthless for a step that overflowed.
        sums: (n, L) [tokens], written: over all experts; counts of empty slots are in none.

    Returns:
        (n,) whether an expert's tokens exceed 32 bits.
    """
    overflowed = np.zeros(len(rows), np.bool_)
    num_ranks, num_layers, width = experts.shape
    num_experts = np.uint64(total.shape[2])
    expert_in = experts.reshape(-1)
    for i in range(len(rows)):
        row = counts[rows[i]].reshape(-1)
        total[i] = 0
        sums[i] = 0
        seen = np.uint64(0)
        # Unsigned: of a signed index numba would ask whether it counts from the end.
        place = np.uint64(0)
        for _ in range(num_ranks):
            for layer in range(num_layers):
                by_expert = total[i, layer]
                in_layer = np.uint64(0)
                for _ in range(width):
                    expert = np.uint64(expert_in[place])
                    if expert < num_experts:  # An empty slot's -1 is not.
                        tokens = np.uint64(row[place])
                        in_layer += tokens
                        tokens += np.uint64(by_expert[expert])
                        by_expert[expert] = np.uint32(tokens)
                        seen |= tokens
                    place += np.uint64(1)
                sums[i, layer] += np.int64(in_layer)
        overflowed[i] = seen > np.uint64(0xFFFFFFFF)
    return overflowed


class Board:
    """Steps begun and not complete, of one counting side. Rows are reused; a row is one step."""

    def __init__(self, side: CountingSide, shape: ModelShape, capacity: int) -> None:
        self.side = side
        layers = shape.num_layers
        # Zero pages cost nothing until a row is used, and the free list hands out used rows first.
        if side is CountingSide.DESTINATION:
            self.counts = np.zeros((capacity, shape.num_ranks, layers * shape.slots_per_rank), np.uint32)
            """(capacity, R, L * slots_per_rank): what one rank reports lies together. SOURCE: (capacity, L, E)."""
        else:
            # Sums over ranks need more bits than one rank's counts.
            self.counts = np.zeros((capacity, layers, shape.num_logical_experts), np.int64)
        self.tokens = np.zeros((capacity, shape.num_ranks), np.int64)
        self.compute_s = np.full((capacity, shape.num_ranks), np.nan)
        # One value of a row is read at a time: lists are faster than arrays at that.
        self.num_reported = [0] * capacity
        self.epoch = [0] * capacity
        self.phase = [0] * capacity
        self.real = [False] * capacity
        self.torn = [False] * capacity
        self.row_of: dict[int, int] = {}
        self.free = list(range(capacity - 1, -1, -1))
        self.highest = [NO_STEP] * shape.num_ranks
        """Highest step each rank reported on this side."""
        self.passed = NO_STEP
        """Steps up to here no rank will report again."""
        self.floor = NO_STEP
        """Steps up to here are closed."""

    def open(self, step: int, meta: StepMeta) -> int:
        """A clean row for a step; the caller made room."""
        row = self.free.pop()
        self.row_of[step] = row
        self.counts[row] = 0
        self.tokens[row] = 0
        self.compute_s[row] = np.nan
        self.num_reported[row] = 0
        self.epoch[row] = meta.epoch
        self.phase[row] = PHASE_CODE[meta.phase]
        self.real[row] = False
        self.torn[row] = False
        return row

    def close(self, step: int) -> int:
        """Free a step's row; its contents stay until it is used again. Returns the row."""
        row = self.row_of.pop(step)
        self.free.append(row)
        return row
