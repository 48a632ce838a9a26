"""Finds which copy each rank should add or give up in one layer, where layers share slots.

A copy given up in one layer pays for a copy in another layer on the same rank.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, kernel
from evenkeel_moe.planning.policies.keel.moves import copies_of_replacement, replacement_gain
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective, refresh


class CopyOffers(NamedTuple):
    """The best copy to add to, and to drop from, every rank of one layer. All arrays are (R,)."""

    add: NDArray[np.float64]
    """Net gain of the best further copy; -inf where no slot or expert is left."""
    add_slot: NDArray[np.int64]
    """The slot it takes, -1 for none."""
    add_expert: NDArray[np.int64]
    """Its expert, -1 for none."""
    drop: NDArray[np.float64]
    """Net gain, mostly negative, of giving up the copy whose loss costs least; -inf for none."""
    drop_slot: NDArray[np.int64]
    """The slot of that copy, -1 for none."""


@kernel
def best_copies(
    layer: LayerState, objective: SearchObjective, price: float
) -> tuple[CopyOffers, int]:
    """Find the best copy to add to and to drop from every rank; refreshes the layer.

    Returns:
        the offers, evaluations used.
    """
    refresh(layer, objective)
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    add, drop = np.full(ranks, -np.inf), np.full(ranks, -np.inf)
    add_slot, add_expert = np.full(ranks, -1), np.full(ranks, -1)
    drop_slot = np.full(ranks, -1)
    borne = np.zeros(experts)
    for expert in range(experts):
        for rank in range(ranks):
            borne[expert] += layer.held[expert, rank] * layer.slope[expert, rank]
    used, none = 0, index(-1)
    for rank in range(ranks):
        free = none
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            old = index(layer.row[slot])
            if old < 0:
                free = slot if free < 0 else free
            elif layer.copies[old] > 1:
                _, cost = copies_of_replacement(layer, rank, old, none)
                used += 1
                gain = replacement_gain(layer, objective, slot, none) - price * cost
                if gain > drop[rank]:
                    drop[rank], drop_slot[rank] = gain, slot
        if free < 0:
            continue
        for expert in range(experts):
            if layer.held[expert, rank] > 0:
                continue
            _, cost = copies_of_replacement(layer, rank, none, expert)
            copies = layer.copies[expert]
            promise = borne[expert] / (copies * (copies + 1)) - layer.slope[expert, rank] / (
                copies + 1
            )
            if promise - price * cost <= add[rank]:
                continue
            used += 1
            gain = replacement_gain(layer, objective, free, expert) - price * cost
            if gain > add[rank]:
                add[rank], add_slot[rank], add_expert[rank] = gain, free, expert
    return CopyOffers(add, add_slot, add_expert, drop, drop_slot), used
