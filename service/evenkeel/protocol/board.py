"""The assembler's memory: steps begun and not complete, and how the slots of an epoch add up."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel.model.load import CountingSide, Phase, StepMeta
from evenkeel.model.placement import Placement
from evenkeel.model.topology import ModelShape

__all__ = ["MIXED", "NO_STEP", "PHASES", "PHASE_CODE", "Board", "EpochMap", "derive_map"]

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
    copies: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]
    """(cells, places) of every expert's first copy, then of every second one, and so on: cell layer * E + expert
    has its n-th copy at a place of a board's row. No cell is twice in one pair, so sums need no loop."""


def derive_map(placement: Placement, active: NDArray[np.bool_]) -> EpochMap:
    """The map of one epoch; active: (R,) bool."""
    layers, ranks, width = placement.num_layers, placement.num_ranks, placement.slots_per_rank
    # As in a board's row: rank by rank, each rank layer by layer.
    flat = placement.phy2log.astype(np.int64).reshape(layers, ranks, width).transpose(1, 0, 2)
    cell = (np.arange(layers)[None, :, None] * placement.num_logical_experts + flat).ravel()
    places = np.flatnonzero(flat.ravel() >= 0)
    places = places[np.argsort(cell[places], kind="stable")]
    cells = cell[places]
    _, first, counts = np.unique(cells, return_index=True, return_counts=True)
    copy = np.arange(len(cells)) - np.repeat(first, counts)
    most = max(1, int(counts.max(initial=0)))
    copies = tuple((cells[copy == number], places[copy == number]) for number in range(most))
    return EpochMap(active, int(active.sum()), copies)


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
