"""The placement of a group of which ranks have left: what stays, and a slot for what would be lost.

Pure, and without compiled kernels: an engine's process loads no compiler.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape

Former = tuple[int | None, ...]
"""(M,): the rank that each rank of the new group had in the old one; None for one that joins."""


def surviving_placement(placement: Placement, former: Former, shape: ModelShape) -> Placement:
    """Return the placement of a group after deaths: what survives, and a slot for what does not.

    Args:
        placement: of the group before.
        former: the ranks of that which are left.
        shape: of their group.

    Raises:
        InfeasiblePlan: they have no room for all experts.
        ShapeMismatch: they have fewer slots than experts.
    """
    return adopt_lost(rows_that_stay(placement, former), shape)


def rows_that_stay(placement: Placement, former: Former) -> Placement:
    """Return the rows of those who stay, and empty slots; an expert may have no slot."""
    layers, ranks, width = placement.num_layers, placement.num_ranks, placement.slots_per_rank
    old = placement.phy2log.reshape(layers, ranks, width)
    new = np.full((layers, len(former), width), EMPTY, np.int32)
    for rank, before in enumerate(former):
        if before is not None:
            new[:, rank] = old[:, before]
    return Placement(new.reshape(layers, -1), len(former), placement.num_logical_experts)


def adopt_lost(placement: Placement, shape: ModelShape) -> Placement:
    """Return the placement with a slot for every expert that has none, as after ranks have died.

    An expert comes to an empty slot of the rank with the fewest experts. Where no such rank has
    room, a replica of the expert with the most goes: one of this layer, else one of another layer
    on a rank with an empty slot in this one. Everything else stays in its slot.

    Args:
        placement: of the ranks that are left.
        shape: of their group.

    Raises:
        InfeasiblePlan: the ranks have no room for an expert.
    """
    layers, ranks, width = shape.num_layers, shape.num_ranks, shape.slots_per_rank
    pool = layers * width if shape.pool_slots_per_rank is None else shape.pool_slots_per_rank
    rows = placement.phy2log.reshape(layers, ranks, width).copy()
    for layer, expert in np.argwhere(placement.logcnt == 0).tolist():
        used, empty = (rows != EMPTY).sum(axis=(0, 2)), rows[layer] == EMPTY
        room = np.where(empty.any(axis=1) & (used < pool), used, np.iinfo(np.int64).max)
        rank = int(room.argmin())
        if room[rank] < pool:
            slot = int(empty[rank].argmax())
        else:
            spare = _replicas(rows, shape)
            elsewhere = np.where(empty.any(axis=1)[None, :, None], spare, 0)
            choice = spare[layer] if spare[layer].max() > 1 else elsewhere
            if choice.max() < 2:
                raise InfeasiblePlan(
                    f"layer {layer}: {ranks} ranks with {width} slots in a layer and {pool} in all"
                    f" have no room for expert {expert}, which none of them has",
                    Reason.EXPERT_WITHOUT_REPLICA,
                )
            *other, rank, slot = map(int, np.unravel_index(choice.argmax(), choice.shape))
            if other:
                rows[other[0], rank, slot] = EMPTY
                slot = int(empty[rank].argmax())
        rows[layer, rank, slot] = expert
    return Placement(rows.reshape(layers, -1), ranks, shape.num_logical_experts)


def _replicas(rows: NDArray[np.int32], shape: ModelShape) -> NDArray[np.int32]:
    """Return (L, R, N) how many replicas the expert in each slot has; 0 for an empty slot."""
    layers = len(rows)
    counts = Placement(rows.reshape(layers, -1), shape.num_ranks, shape.num_logical_experts).logcnt
    found = np.take_along_axis(counts, rows.reshape(layers, -1), axis=1).reshape(rows.shape)
    return np.where(rows == EMPTY, 0, found)
