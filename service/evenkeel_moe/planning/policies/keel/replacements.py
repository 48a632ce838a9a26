"""Finds which slot should take a further copy of which expert.

A replacement gains at most what the gradient promises. With the sharp norm that bound is far above
the gain, so the relief of single ranks is computed exactly and used as a tighter bound.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.planning.policies.keel.moves import (
    add_power_change,
    gain_of_power_change,
    replacement_gain,
)
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective

__all__ = ["best_replacement"]


@kernel
def best_replacement(
    layer: LayerState,
    objective: SearchObjective,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[int, int, float, int, int]:
    """Find the replacement with the largest net gain above `least`; arguments as in `best_swaps`.

    `spare` is the number of further copies that the layer may hold.

    Returns:
        (slot or -1, expert, net gain, copies needed, evaluations used).
    """
    per_rank = layer.row.shape[0] // layer.held.shape[1]
    row, held, had, copy_price = layer.row, layer.held, layer.had, layer.copy_price
    tight = objective.sharp and not objective.nearest
    borne, dear = _borne_slopes(layer)
    slots, drops, saved = _open_slots(layer, room, spare, price, borne)
    slot, chosen, best, best_copies, used = -1, -1, least, 0, 0
    # A bound is never below the gain, so where none reaches the bar, nothing is computed exactly.
    if len(slots) == 0 or (
        tight and not _any_promise(layer, borne, dear, (drops + saved).max(), price, best)
    ):
        return slot, chosen, best, best_copies, used
    alone = _drops_alone(layer, objective, slots, drops) if tight else drops
    most = (alone + saved).max()
    first, following = _slots_of_experts(row, layer.copies.shape[0])
    for expert in range(layer.copies.shape[0]):
        part = 1.0 / (layer.copies[expert] + 1.0)
        eased = borne[expert] * part / layer.copies[expert]
        rest = most - price * dear[expert]
        if tight and eased + rest > best:
            eased = _relief(layer, objective, expert, first, following)
        if eased + rest <= best:
            continue
        for place in range(len(slots)):
            if eased + alone[place] + saved[place] <= best:
                continue
            rank, old = slots[place] // per_rank, row[slots[place]]
            if held[expert, rank] > 0:
                continue
            # The new copy costs its rank what the gradient says, and never less than nothing.
            promise = eased + min(drops[place] - layer.slope[expert, rank] * part, alone[place])
            copies, cost = int(not had[expert, rank]), copy_price[expert, rank]
            if old >= 0:
                copies -= int(not had[old, rank])
                cost -= copy_price[old, rank]
            if (copies > allowance and copies > 0) or promise - price * cost <= best:
                continue
            if used >= evaluations:
                return slot, chosen, best, best_copies, used
            used += 1
            gain = _exact_gain(layer, objective, slots[place], expert) - price * cost
            if gain > best:
                slot, chosen, best, best_copies = slots[place], expert, gain, copies
    return slot, chosen, best, best_copies, used


@inlined
def _relief(
    layer: LayerState,
    objective: SearchObjective,
    expert: int,
    first: NDArray[np.int64],
    following: NDArray[np.int64],
) -> float:
    """Return the gain if a further copy of an expert took its share off the others at no cost."""
    per_rank = layer.row.shape[0] // layer.rank_load.shape[0]
    part = 1.0 / (layer.copies[expert] + 1.0)
    load, rank_load, powers, out = layer.load, layer.rank_load, layer.powers, layer.scratch
    out[:] = 0.0
    at = first[expert]
    while at >= 0:
        rank = at // per_rank
        by = -part * layer.share[expert, rank]
        add_power_change(load, expert, by, 0, 0.0, rank_load, powers, rank, objective, out)
        at = following[at]
        while at >= 0 and at // per_rank == rank:
            at = following[at]
    return gain_of_power_change(layer.weight, layer.norm, layer.power_sum, objective.doublings, out)


@inlined
def _exact_gain(layer: LayerState, objective: SearchObjective, slot: int, expert: int) -> float:
    """Return the gain if a slot takes another expert."""
    if objective.nearest:
        gain = replacement_gain(layer, objective, slot, expert)
    else:
        gain = _gain_under_even_split(layer, objective, slot, expert)
    return gain


@inlined
def _gain_under_even_split(
    layer: LayerState, objective: SearchObjective, slot: int, expert: int
) -> float:
    """Return the gain if a slot takes another expert, where every copy has the same share."""
    rank, old = slot // (layer.row.shape[0] // layer.rank_load.shape[0]), layer.row[slot]
    load, rank_load, powers, out = layer.load, layer.rank_load, layer.powers, layer.scratch
    share = layer.share
    part = 1.0 / (layer.copies[expert] + 1.0)
    more = 1.0 / (layer.copies[old] - 1.0) if old >= 0 else 0.0
    one = max(old, 0)
    out[:] = 0.0
    for on in range(rank_load.shape[0]):
        by_old = 0.0
        if old >= 0:
            by_old = -share[old, on] if on == rank else more * share[old, on]
        by_new = part if on == rank else -part * share[expert, on]
        if by_old != 0.0 or by_new != 0.0:
            add_power_change(
                load, one, by_old, expert, by_new, rank_load, powers, on, objective, out
            )
    return gain_of_power_change(layer.weight, layer.norm, layer.power_sum, objective.doublings, out)


@kernel
def _slots_of_experts(
    row: NDArray[np.int32], experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (E,) the first slot of every expert, (S,) the next slot of the same; -1 for none."""
    first, following = np.full(experts, -1), np.full(row.shape[0], -1)
    for slot in range(row.shape[0] - 1, -1, -1):
        if row[slot] >= 0:
            following[slot] = first[row[slot]]
            first[row[slot]] = slot
    return first, following


@kernel
def _borne_slopes(layer: LayerState) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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
def _any_promise(
    layer: LayerState,
    borne: NDArray[np.float64],
    dear: NDArray[np.float64],
    most: float,
    price: float,
    best: float,
) -> bool:
    """Return True if the gradient promises more than `best` for a further copy of any expert."""
    copies = layer.copies
    for expert in range(borne.shape[0]):
        promise = borne[expert] / (copies[expert] + 1.0) / copies[expert]
        if promise + most - price * dear[expert] > best:
            return True
    return False


@kernel
def _open_slots(
    layer: LayerState,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    borne: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Find the slots that another expert may enter.

    Returns:
        slots: (N,) empty slots with room, and slots whose expert has another copy.
        drops: (N,) gain that the gradient promises for emptying the slot.
        saved: (N,) price of the copy in the slot, which emptying it saves.
    """
    num_slots = layer.row.shape[0]
    per_rank = num_slots // layer.rank_load.shape[0]
    row, copies, share, slope = layer.row, layer.copies, layer.share, layer.slope
    slots, drops = np.empty(num_slots, np.int64), np.zeros(num_slots)
    saved = np.zeros(num_slots)
    count = 0
    for slot in range(num_slots):
        old, rank = row[slot], slot // per_rank
        if old < 0:
            if spare > 0 and room[rank] > 0:
                slots[count] = slot
                count += 1
        elif copies[old] > 1:
            others = borne[old] / copies[old] - slope[old, rank] * share[old, rank]
            drops[count] = slope[old, rank] * share[old, rank] - others * (
                1.0 / (copies[old] - 1.0)
            )
            saved[count] = price * layer.copy_price[old, rank]
            slots[count] = slot
            count += 1
    return slots[:count], drops[:count], saved[:count]


@kernel
def _drops_alone(
    layer: LayerState,
    objective: SearchObjective,
    slots: NDArray[np.int64],
    drops: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return (N,) a bound on the gain of emptying each of some slots (N,).

    It is the relief of the slot's rank, minus what the gradient says that the ranks of the other
    copies lose. Their gradient only grows when this rank is relieved.
    """
    per_rank = layer.row.shape[0] // layer.rank_load.shape[0]
    row, share, slope = layer.row, layer.share, layer.slope
    load, rank_load, powers, out = layer.load, layer.rank_load, layer.powers, layer.scratch
    alone = np.zeros(len(slots))
    for place in range(len(slots)):
        rank, old = slots[place] // per_rank, row[slots[place]]
        if old >= 0:
            by = share[old, rank]
            out[:] = 0.0
            add_power_change(load, old, -by, 0, 0.0, rank_load, powers, rank, objective, out)
            eased = gain_of_power_change(
                layer.weight, layer.norm, layer.power_sum, objective.doublings, out
            )
            alone[place] = drops[place] - slope[old, rank] * by + eased
    return alone
