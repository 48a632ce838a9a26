"""Replica budget between layers: a copy given up in one layer pays for a copy in another on the same rank."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import change_gain, copies_of_change
from evenkeel_moe.planning.policies.keel.state import Curves, Layer, Split, refresh

__all__ = ["edges"]


@kernel
def edges(
    layer: Layer, curves: Curves, split: Split, price: float
) -> tuple[
    NDArray[np.float64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.float64],
    NDArray[np.int64],
    int,
]:
    """The best copy to add to and to drop from every rank of one layer.

    Returns:
        add: (R,) net gain of the best further copy, -inf where no slot or expert is left.
        add_slot, add_expert: (R,) where and which.
        drop: (R,) net gain (mostly negative) of giving up the copy missed least, -inf where none can go.
        drop_slot: (R,)
        evaluations used.
    """
    refresh(layer, curves)
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    add, drop = np.full(ranks, -np.inf), np.full(ranks, -np.inf)
    add_slot, add_expert = np.full(ranks, -1), np.full(ranks, -1)
    drop_slot = np.full(ranks, -1)
    borne = np.zeros(experts)
    for expert in range(experts):
        for rank in range(ranks):
            borne[expert] += layer.held[expert, rank] * layer.slope[expert, rank]
    used = 0
    for rank in range(ranks):
        free = -1
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            old = layer.row[slot]
            if old < 0:
                free = slot if free < 0 else free
            elif layer.copies[old] > 1:
                _, cost = copies_of_change(layer, rank, old, -1)
                used += 1
                gain = change_gain(layer, curves, split, slot, -1) - price * cost
                if gain > drop[rank]:
                    drop[rank], drop_slot[rank] = gain, slot
        if free < 0:
            continue
        for expert in range(experts):
            if layer.held[expert, rank] > 0:
                continue
            _, cost = copies_of_change(layer, rank, -1, expert)
            copies = layer.copies[expert]
            promise = borne[expert] / (copies * (copies + 1)) - layer.slope[expert, rank] / (
                copies + 1
            )
            if promise - price * cost <= add[rank]:
                continue
            used += 1
            gain = change_gain(layer, curves, split, free, expert) - price * cost
            if gain > add[rank]:
                add[rank], add_slot[rank], add_expert[rank] = gain, free, expert
    return add, add_slot, add_expert, drop, drop_slot, used
