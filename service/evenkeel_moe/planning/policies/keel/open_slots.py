"""The slots of a layer that another expert may enter, and bounds on the gain of emptying them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.gains import (
    add_power_change,
    gain_of_power_change,
    norms_of,
)
from evenkeel_moe.planning.policies.keel.state import LayerState, SmoothCosts


class OpenSlots(NamedTuple):
    """The slots of a layer that another expert may enter. All arrays are (N,)."""

    slot: NDArray[np.int64]
    """Empty slots with room, and slots whose expert has another copy."""
    rank: NDArray[np.int64]
    """The rank of the slot."""
    drop: NDArray[np.float64]
    """Gain that the gradient promises for emptying the slot."""
    alone: NDArray[np.float64]
    """Bound on the gain of emptying it; where `quick` tighter than `drop`."""
    saved: NDArray[np.float64]
    """Price of the copy in the slot, which emptying it saves."""
    given_up: NDArray[np.int64]
    """1 if the copy in the slot has a price, else 0."""
    price: NDArray[np.float64]
    """That price over the price of a move, as `LayerState.copy_price`."""


@kernel
def borne_slopes(layer: LayerState) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (E,) each expert's slopes summed over its copies, (E,) its least price of a copy.

    That price is 0 while a rank that holds the expert in the current placement is without it.
    """
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    row, slope, had, cheapest = layer.row, layer.slope, layer.had, layer.cheapest
    borne, left = np.zeros(experts), layer.homes.copy()
    slot = 0
    for rank in range(ranks):
        for _ in range(per_rank):
            expert = row[slot]
            if expert >= 0:
                borne[expert] += slope[expert, rank]
                left[expert] -= int(had[expert, rank])
            slot += 1
    return borne, np.where(left > 0, 0.0, cheapest)


@kernel
def open_slots(
    layer: LayerState,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    borne: NDArray[np.float64],
) -> OpenSlots:
    """Find the slots that another expert may enter; `borne` is that of `borne_slopes`."""
    num_slots = layer.row.shape[0]
    per_rank = num_slots // layer.rank_load.shape[0]
    row, copies, share, slope = layer.row, layer.copies, layer.share, layer.slope
    slots, ranks = np.empty(num_slots, np.int64), np.empty(num_slots, np.int64)
    drop, freed = np.zeros(num_slots), np.zeros(num_slots)
    given_up = np.zeros(num_slots, np.int64)
    count = 0
    for slot in range(num_slots):
        old, rank = row[slot], slot // per_rank
        if old >= 0 and copies[old] > 1:
            others = borne[old] / copies[old] - slope[old, rank] * share[old, rank]
            rest = others * (1.0 / (copies[old] - 1.0))
            drop[count] = slope[old, rank] * share[old, rank] - rest
            freed[count] = layer.copy_price[old, rank]
            given_up[count] = int(not layer.had[old, rank])
        elif old >= 0 or spare <= 0 or room[rank] <= 0:
            continue
        slots[count], ranks[count] = slot, rank
        count += 1
    return OpenSlots(
        slots[:count],
        ranks[:count],
        drop[:count],
        drop[:count].copy(),
        price * freed[:count],
        given_up[:count],
        freed[:count],
    )


@kernel
def tighten(layer: LayerState, costs: SmoothCosts, slots: OpenSlots) -> None:
    """Fill `slots.alone` with a tighter bound than the gradient's on the gain of emptying alone.

    It is the relief of the slot's rank, minus what the gradient says that the ranks of the other
    copies lose. Their gradient only grows when this rank is relieved.
    """
    share, slope, alone = layer.share, layer.slope, slots.alone
    work, rank_load, powers, out = layer.work, layer.rank_load, layer.powers, layer.scratch
    norms = norms_of(layer, costs.doublings)
    for n in range(len(alone)):
        rank, old = slots.rank[n], layer.row[slots.slot[n]]
        alone[n] = 0.0
        if old >= 0:
            by = share[old, rank]
            out[:] = 0.0
            add_power_change(work, old, -by, 0, 0.0, rank_load, powers, rank, costs, out)
            eased = gain_of_power_change(norms, out)
            alone[n] = slots.drop[n] - slope[old, rank] * by + eased
