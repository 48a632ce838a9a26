"""Finds which slot should take a further copy of which expert.

A replacement gains at most what the gradient promises. That bound is far above the gain with the
sharp norm, and in large layers there are many candidates below it. There the relief of single ranks
is computed exactly and used as a tighter bound. It misses moves whose gain needs two ranks relieved
together.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.planning.policies.keel.gains import (
    add_power_change,
    gain_above,
    gain_of_power_change,
    norms_of,
)
from evenkeel_moe.planning.policies.keel.moves import replacement_gain
from evenkeel_moe.planning.policies.keel.open_slots import (
    OpenSlots,
    borne_slopes,
    open_slots,
    tighten,
)
from evenkeel_moe.planning.policies.keel.replacements_by_work import best_replacement_by_work
from evenkeel_moe.planning.policies.keel.state import (
    LayerState,
    SearchObjective,
    SmoothCosts,
    slots_of_experts,
)


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
    borne, dear = borne_slopes(layer)
    slots = open_slots(layer, room, spare, price, borne)
    if len(slots.slot) == 0:
        return -1, -1, least, 0, 0
    if not objective.work.proportional:
        return best_replacement_by_work(
            layer, objective, slots, price * dear, price, allowance, least, evaluations
        )
    if objective.quick and not objective.nearest:
        # Where no promise reaches the bar, nothing is computed exactly.
        if not _any_promise(layer, borne, dear, (slots.drop + slots.saved).max(), price, least):
            return -1, -1, least, 0, 0
        tighten(layer, objective.costs, slots)
    return _best_of_open_slots(
        layer, objective, slots, borne, price * dear, price, allowance, least, evaluations
    )


@kernel
def _best_of_open_slots(
    layer: LayerState,
    objective: SearchObjective,
    slots: OpenSlots,
    borne: NDArray[np.float64],
    dear: NDArray[np.float64],
    price: float,
    allowance: int,
    best: float,
    evaluations: int,
) -> tuple[int, int, float, int, int]:
    """Find the best of `slots`, as `best_replacement`; `dear` is (E,) the least price of a copy."""
    row, held, had, copy_price = layer.row, layer.held, layer.had, layer.copy_price
    work, share, copies_of, slope = layer.work, layer.share, layer.copies, layer.slope
    rank_load, powers, out = layer.rank_load, layer.powers, layer.scratch
    norms = norms_of(layer, objective.costs.doublings)
    slot_of, rank_of, drop, alone, saved, given_up, freed = slots
    costs, tight = objective.costs, objective.quick and not objective.nearest
    most = (alone + saved).max()
    first, following = slots_of_experts(row, copies_of.shape[0])
    slot, chosen, best_copies, used = -1, -1, 0, 0
    for expert in range(copies_of.shape[0]):
        part = 1.0 / (copies_of[expert] + 1.0)
        eased, rest = borne[expert] * part / copies_of[expert], most - dear[expert]
        if tight and eased + rest > best:
            out[:] = 0.0
            _add_relief(work, share, rank_load, powers, costs, first, following, expert, part, out)
            eased = gain_of_power_change(norms, out)
        if eased + rest <= best:
            continue
        for n in range(len(alone)):
            if eased + alone[n] + saved[n] <= best or held[expert, rank_of[n]] > 0:
                continue
            rank, old = rank_of[n], row[slot_of[n]]
            # The new copy costs its rank what the gradient says, and never less than nothing.
            promise = eased + min(drop[n] - slope[expert, rank] * part, alone[n])
            copies = int(not had[expert, rank]) - given_up[n]
            cost = copy_price[expert, rank] - freed[n]
            if copies > max(allowance, 0) or promise - price * cost <= best:
                continue
            if used >= evaluations:
                return slot, chosen, best, best_copies, used
            used += 1
            if objective.nearest:
                gain = replacement_gain(layer, objective, slot_of[n], expert)
            else:
                one, out[:] = max(old, 0), 0.0
                gone, more = (-1.0, 1.0 / (copies_of[old] - 1.0)) if old >= 0 else (0.0, 0.0)
                for on in range(rank_load.shape[0]):
                    by_old = (gone if on == rank else more) * share[one, on]
                    by_new = part if on == rank else -part * share[expert, on]
                    if by_old == 0.0 and by_new == 0.0:
                        continue
                    add_power_change(
                        work, one, by_old, expert, by_new, rank_load, powers, on, costs, out
                    )
                gain = gain_above(best + price * cost, norms, out)
            if gain - price * cost > best:
                best, best_copies, slot, chosen = gain - price * cost, copies, slot_of[n], expert
    return slot, chosen, best, best_copies, used


@inlined
def _add_relief(
    work: NDArray[np.float64],
    share: NDArray[np.float64],
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    costs: SmoothCosts,
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    expert: int,
    part: float,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) the change of all powered costs if a further copy relieved the others.

    That copy takes the share `part` of the expert off them and costs its own rank nothing.
    """
    per_rank = following.shape[0] // rank_load.shape[0]
    at = first[expert]
    while at >= 0:
        at_rank = at // per_rank
        by = -part * share[expert, at_rank]
        add_power_change(work, expert, by, 0, 0.0, rank_load, powers, at_rank, costs, out)
        at = following[at]
        while at >= 0 and at // per_rank == at_rank:
            at = following[at]


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
