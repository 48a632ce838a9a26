"""Finds which slot should take a further copy of which expert where copies add work of their own.

Where reading weights dominates, a further copy relieves nobody and costs its rank a read, so that
dropping a copy can gain and a copy of a cold expert can be cheaper than of a hot one. The changes
of work are computed exactly, and the gradient bounds the gain as in `replacements`.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import (
    EASED,
    ENTERS,
    STAYS,
    enter_changes,
    gain_of_work_changes,
    leave_changes,
)
from evenkeel_moe.planning.policies.keel.open_slots import OpenSlots, tighten
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective


@kernel
def best_replacement_by_work(
    layer: LayerState,
    objective: SearchObjective,
    slots: OpenSlots,
    dear: NDArray[np.float64],
    price: float,
    allowance: int,
    best: float,
    evaluations: int,
) -> tuple[int, int, float, int, int]:
    """Find the replacement, or the drop of a copy, with the largest net gain above `best`.

    Arguments as in `best_replacement`; `dear` is (E,) the least price of a copy.

    Returns:
        (slot or -1, expert or -1 for a drop, net gain, copies needed, evaluations used).
    """
    held, had, copy_price = layer.held, layer.had, layer.copy_price
    # The changes of each slot's expert are the same for all candidates; then the candidate's.
    enter = 2 * len(slots.slot)
    changes = np.zeros((enter + 2, layer.weight.shape[0]))
    _promise_drops(layer, objective, slots, changes)
    if objective.quick:
        tighten(layer, objective.costs, slots)
    most = (slots.alone + slots.saved).max()
    enter_cost = np.empty(held.shape[1])
    slot, chosen, best_copies, used = -1, -1, 0, 0
    for expert in range(-1 if objective.drops else 0, held.shape[0]):
        eased = 0.0
        if expert >= 0:
            eased = _promise_copy(layer, objective, expert, enter_cost, changes[enter:])
            if eased + most - dear[expert] <= best:
                continue
        for n in range(len(slots.slot)):
            rank, old = slots.rank[n], layer.row[slots.slot[n]]
            copies, cost = -slots.given_up[n], -slots.price[n]
            if expert >= 0:
                if held[expert, rank] > 0:
                    continue
                promise = eased + min(slots.drop[n] - enter_cost[rank], slots.alone[n])
                copies += int(not had[expert, rank])
                cost += copy_price[expert, rank]
            else:
                if old < 0:
                    continue
                promise = slots.drop[n]
            if copies > max(allowance, 0) or promise - price * cost <= best:
                continue
            if used >= evaluations:
                return slot, chosen, best, best_copies, used
            used += 1
            gain = gain_of_work_changes(
                layer, objective.costs, changes, 2 * n, enter, rank, old, expert
            )
            if gain - price * cost > best:
                best, best_copies, slot, chosen = gain - price * cost, copies, slots.slot[n], expert
    return slot, chosen, best, best_copies, used


@kernel
def _promise_drops(
    layer: LayerState,
    objective: SearchObjective,
    slots: OpenSlots,
    changes: NDArray[np.float64],
) -> None:
    """Fill `slots.drop` and `slots.alone` with the gain that the gradient promises for a drop.

    Writes to `changes` two rows for each slot, those of `leave_changes`.
    """
    slope, share, rank_slope = layer.slope, layer.share, layer.rank_slope
    for n in range(len(slots.slot)):
        old, rank = layer.row[slots.slot[n]], slots.rank[n]
        slots.drop[n] = 0.0
        if old >= 0:
            slots.drop[n] = slope[old, rank] * share[old, rank]
            leave_changes(layer, objective, old, changes[2 * n : 2 * n + 2])
            for on in range(rank_slope.shape[1]):
                if on != rank and layer.held[old, on] > 0:
                    for t in range(rank_slope.shape[0]):
                        more = layer.held[old, on] * changes[2 * n + STAYS, t]
                        slots.drop[n] -= more * rank_slope[t, on]
        slots.alone[n] = slots.drop[n]


@kernel
def _promise_copy(
    layer: LayerState,
    objective: SearchObjective,
    expert: int,
    enter_cost: NDArray[np.float64],
    changes: NDArray[np.float64],
) -> float:
    """Return the gain that the gradient promises for the relief of an expert's other copies.

    Writes to `enter_cost` (R,) what it says that the new copy costs each rank, and to `changes`
    (2, T) those of `enter_changes`.
    """
    rank_slope = layer.rank_slope
    enter_changes(layer, objective, expert, changes)
    enter_cost[:] = 0.0
    for t in range(rank_slope.shape[0]):
        for rank in range(rank_slope.shape[1]):
            enter_cost[rank] += changes[ENTERS, t] * rank_slope[t, rank]
    eased = 0.0
    for rank in range(rank_slope.shape[1]):
        if layer.held[expert, rank] > 0:
            for t in range(rank_slope.shape[0]):
                eased -= layer.held[expert, rank] * changes[EASED, t] * rank_slope[t, rank]
    return eased
