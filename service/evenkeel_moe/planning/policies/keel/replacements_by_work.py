"""Finds which slot should take a further copy of which expert where copies add work of their own.

Where reading weights dominates, a further copy relieves nobody and costs its rank a read, so that
dropping a copy can gain and a copy of a cold expert can be cheaper than of a hot one. The changes
of work are computed exactly, and the gradient bounds the gain as in `replacements`.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, inlined, kernel
from evenkeel_moe.planning.policies.keel.gains import (
    add_power_change,
    gain_above,
    norms_of,
    sum_of_products,
)
from evenkeel_moe.planning.policies.keel.moves import (
    EASED,
    ENTERS,
    LEAVES,
    STAYS,
    add_work_changes,
    enter_changes,
    leave_changes,
)
from evenkeel_moe.planning.policies.keel.open_slots import OpenSlots, tighten
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective, SmoothCosts


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
    row, held, had, copy_price = layer.row, layer.held, layer.had, layer.copy_price
    rank_load, powers, rank_slope = layer.rank_load, layer.powers, layer.rank_slope
    norms, out = norms_of(layer, objective.costs.doublings), layer.scratch
    one_more, slope, costs = layer.one_more, layer.slope, objective.costs
    changes, others = _promise_drops(layer, objective, slots)
    enter, relief, enter_cost = 2 * len(slots.slot), np.zeros(len(out)), np.empty(held.shape[1])
    if objective.quick:
        tighten(layer, costs, slots)
    most = (slots.alone + slots.saved).max()
    slot, chosen, best_copies, used = -1, -1, 0, 0
    for expert in range(-1 if objective.drops else 0, held.shape[0]):
        eased, relieved = 0.0, expert < 0  # `relief` begins as zeros.
        if expert >= 0:
            eased = _promise_relief(one_more, slope, rank_slope, held, layer.copies[expert], expert)
            if eased + most - dear[expert] <= best:
                continue
            enter_changes(one_more, layer.work, layer.copies[expert], expert, changes, enter)
            _promise_cost(layer.step_slope, changes[enter + ENTERS], enter_cost)
            relieved = False
        for n in range(len(slots.slot)):
            rank, old = slots.rank[n], row[slots.slot[n]]
            if (expert < 0 and old < 0) or (expert >= 0 and held[expert, rank] > 0):
                continue
            copies, cost, promise = -slots.given_up[n], -slots.price[n], slots.drop[n]
            if expert >= 0:
                promise = eased + min(slots.drop[n] - enter_cost[rank], slots.alone[n])
                copies += int(not had[expert, rank])
                cost += copy_price[expert, rank]
            if copies > max(allowance, 0) or promise - price * cost <= best:
                continue
            if used >= evaluations:
                return slot, chosen, best, best_copies, used
            used += 1
            if not relieved:
                relieved, relief[:] = True, 0.0
                _add_relief(changes, enter + EASED, held, expert, rank_load, powers, costs, relief)
            _fill_changes(
                changes, others, relief, n, rank, old, expert, held, rank_load, powers, costs, out
            )
            gain = gain_above(best + price * cost, norms, out)
            if gain - price * cost > best:
                best, best_copies, slot, chosen = gain - price * cost, copies, slots.slot[n], expert
    return slot, chosen, best, best_copies, used


@kernel
def _promise_drops(
    layer: LayerState, objective: SearchObjective, slots: OpenSlots
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fill `slots.drop` and `slots.alone` with the gain that the gradient promises for a drop.

    Returns:
        changes: (2 N + 2, T) for each slot the two rows of `leave_changes`, which are the same for
            all candidates; then two rows of zeros for those of a candidate.
        others: (N, T) for each slot the change of the powered costs of the ranks of the other
            copies.
    """
    changes = np.zeros((2 * len(slots.slot) + 2, layer.weight.shape[0]))
    others = np.zeros((len(slots.slot), layer.weight.shape[0]))
    slope, share, rank_slope, held = layer.slope, layer.share, layer.rank_slope, layer.held
    rank_load, powers, costs = layer.rank_load, layer.powers, objective.costs
    for n in range(len(slots.slot)):
        old, rank, drop = index(layer.row[slots.slot[n]]), slots.rank[n], 0.0
        if old >= 0:
            stays = 2 * n + STAYS
            leave_changes(
                layer.tokens, layer.work, layer.copies[old], objective.work, old, changes, 2 * n
            )
            drop = slope[old, rank] * share[old, rank]
            for on in range(rank_slope.shape[0]):
                if on != rank and held[old, on] > 0:
                    by = float(held[old, on])
                    drop -= by * sum_of_products(changes, stays, rank_slope, on)
                    add_power_change(
                        changes, stays, by, 0, 0.0, rank_load, powers, on, costs, others[n]
                    )
        slots.drop[n] = slots.alone[n] = drop
    return changes, others


@inlined
def _add_relief(
    changes: NDArray[np.float64],
    at: int,
    held: NDArray[np.int32],
    expert: int,
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    costs: SmoothCosts,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) the change of the powered costs of the ranks that hold an expert.

    Row `at` of `changes` is the change of each copy's work. The other arrays are those of
    `LayerState`.
    """
    for on in range(held.shape[1]):
        if held[expert, on] > 0:
            by = float(held[expert, on])
            add_power_change(changes, at, by, 0, 0.0, rank_load, powers, on, costs, out)


@inlined
def _fill_changes(
    changes: NDArray[np.float64],
    others: NDArray[np.float64],
    relief: NDArray[np.float64],
    n: int,
    rank: int,
    old: int,
    expert: int,
    held: NDArray[np.int32],
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    costs: SmoothCosts,
    out: NDArray[np.float64],
) -> None:
    """Write to `out` (T,) the change of all powered costs if `expert` replaces `old` in slot n.

    `changes` and `others` are those of `_promise_drops`, `relief` (T,) is the change of the ranks
    of the expert's copies.
    """
    enter = changes.shape[0] - 2
    if expert >= 0 and old >= 0 and _share_a_rank(held, old, expert):
        out[:] = 0.0
        add_work_changes(
            changes, 2 * n, enter, rank, old, expert, held, rank_load, powers, costs, out
        )
    else:  # No rank but this one changes by both, so the changes of the others add up.
        by_old, by_new = 1.0 if old >= 0 else 0.0, 1.0 if expert >= 0 else 0.0
        leave = 2 * n + LEAVES
        for t in range(out.shape[0]):
            out[t] = others[n, t] + relief[t]
        add_power_change(
            changes, leave, by_old, enter + ENTERS, by_new, rank_load, powers, rank, costs, out
        )


@inlined
def _share_a_rank(held: NDArray[np.int32], one: int, two: int) -> bool:
    """Return True if a rank has copies of both experts: its cost then changes by both together."""
    found = 0
    for rank in range(held.shape[1]):
        found += int(held[one, rank] > 0) & int(held[two, rank] > 0)
    return found > 0


@inlined
def _promise_relief(
    one_more: NDArray[np.float64],
    slope: NDArray[np.float64],
    rank_slope: NDArray[np.float64],
    held: NDArray[np.int32],
    copies: int,
    expert: int,
) -> float:
    """Return the gain that the gradient promises for the relief of an expert's other copies.

    The arrays are those of `LayerState`, as for `add_power_change`.
    """
    eased = 0.0
    for rank in range(rank_slope.shape[0]):
        if held[expert, rank] > 0:
            left = sum_of_products(one_more, expert, rank_slope, rank)
            eased += held[expert, rank] * (slope[expert, rank] / copies - left)
    return eased


@kernel
def _promise_cost(
    step_slope: NDArray[np.float64], enters: NDArray[np.float64], out: NDArray[np.float64]
) -> None:
    """Write to `out` (R,) what the gradient says that a new copy costs each rank.

    step_slope: (T, R) of `LayerState`. enters: (T,) the work of the copy.
    """
    steps = step_slope.shape[0]
    whole = steps // 4 * 4
    out[:] = 0.0
    for t in range(0, whole, 4):  # Four steps at a time: the sums stay in registers.
        a, b, c, d = enters[t], enters[t + 1], enters[t + 2], enters[t + 3]
        for rank in range(step_slope.shape[1]):
            out[rank] = (
                (out[rank] + a * step_slope[t, rank] + b * step_slope[t + 1, rank])
                + c * step_slope[t + 2, rank]
                + d * step_slope[t + 3, rank]
            )
    for t in range(whole, steps):
        for rank in range(step_slope.shape[1]):
            out[rank] += enters[t] * step_slope[t, rank]
