"""The single moves of one layer: their gain, and carrying them out.

There are two kinds. A swap exchanges the experts of two slots on different ranks, one of which may
be empty. A replacement puts another expert into a slot whose own expert has a second copy, or into
an empty slot. No move puts a second copy of an expert on a rank or takes an expert's last copy
away.

A gain is by how much a move lowers the objective, before the price of copies.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, inlined, kernel
from evenkeel_moe.planning.policies.keel.state import (
    WRITTEN_OUT,
    WRITTEN_OUT_SHARP,
    LayerState,
    SearchObjective,
    SmoothCosts,
    expert_shares,
    power,
    root,
    smooth_cost,
    update_work,
)
from evenkeel_moe.planning.policies.keel.work import SmoothWork, fill_work

ROUNDING = 1e-12
"""More than the rounding errors of a gain, in layer times."""
LEAVES, STAYS, ENTERS, EASED = 0, 1, 0, 1
"""Rows of the changes of `leave_changes` and `enter_changes`, which `LayerState.after` holds one
after the other."""


class Norms(NamedTuple):
    """The norms of a layer's steps: arrays of `LayerState`, and `doublings` of `SmoothCosts`."""

    weight: NDArray[np.float64]
    norm: NDArray[np.float64]
    power_sum: NDArray[np.float64]
    inverse_sum: NDArray[np.float64]
    bounds: NDArray[np.float64]
    doublings: int


@inlined
def norms_of(layer: LayerState, doublings: int) -> Norms:
    """Return the norms of a layer; a whole layer would make inlined kernels slow."""
    return Norms(
        layer.weight, layer.norm, layer.power_sum, layer.inverse_sum, layer.bounds, doublings
    )


@inlined
def add_power_change(
    work: NDArray[np.float64],
    first: int,
    by_first: float,
    second: int,
    by_second: float,
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    rank: int,
    costs: SmoothCosts,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) the change of one rank's powered cost.

    Its load grows by `by_first` of row `first` and `by_second` of row `second` of `work`: shares of
    two experts' work, or changes of the work of copies. The arrays are those of `LayerState`,
    passed one by one because inlined kernels would count references to a tuple.
    """
    if costs.tile == 0.0 and costs.doublings == WRITTEN_OUT:
        rate = costs.rates[rank]
        for t in range(out.shape[0]):
            cost = (
                rank_load[rank, t] + by_first * work[first, t] + by_second * work[second, t]
            ) * rate
            cost *= cost
            cost *= cost
            out[t] += cost * cost - powers[rank, t]
    elif costs.tile == 0.0 and costs.doublings == WRITTEN_OUT_SHARP:
        rate = costs.rates[rank]
        for t in range(out.shape[0]):
            cost = (
                rank_load[rank, t] + by_first * work[first, t] + by_second * work[second, t]
            ) * rate
            cost *= cost
            cost *= cost
            cost *= cost
            cost *= cost
            out[t] += cost * cost - powers[rank, t]
    else:
        for t in range(out.shape[0]):
            amount = rank_load[rank, t] + by_first * work[first, t] + by_second * work[second, t]
            cost = smooth_cost(max(amount, 0.0), rank, costs)
            out[t] += power(cost, costs.doublings) - powers[rank, t]


@inlined
def gain_of_power_change(norms: Norms, out: NDArray[np.float64]) -> float:
    """Return the gain if the power sum changes by `out` (T,), which is overwritten."""
    weight, norm, power_sum, _, _, doublings = norms
    steps = out.shape[0]
    if doublings == WRITTEN_OUT:
        for t in range(steps):
            after = np.sqrt(np.sqrt(np.sqrt(max(power_sum[t] + out[t], 0.0))))
            out[t] = weight[t] * (norm[t] - after)
    elif doublings == WRITTEN_OUT_SHARP:
        for t in range(steps):
            after = np.sqrt(np.sqrt(np.sqrt(max(power_sum[t] + out[t], 0.0))))
            out[t] = weight[t] * (norm[t] - np.sqrt(np.sqrt(after)))
    else:
        for t in range(steps):
            out[t] = weight[t] * (norm[t] - root(max(power_sum[t] + out[t], 0.0), doublings))
    return sum_of(out)


@inlined
def fall_terms(doublings: int) -> tuple[float, float, float, float]:
    """Return what `fall_at_most` needs: three coefficients of Taylor's polynomial, and a slope."""
    one = 0.5**doublings
    two = one * (1.0 - one) / 2.0
    three = two * (2.0 - one) / 3.0 * 2.0 ** (3.0 - one)
    return one, two, three, 2.0 ** (1.0 - one)


@inlined
def fall_at_most(taken: float, one: float, two: float, three: float, chord: float) -> float:
    """Return a bound on the share by which the norm falls if `taken` of the power sum goes.

    With u the share that is taken away, it is 1 - (1 - u) ** (1/p). Taylor's polynomials bound it:
    of the second order if u < 0, and of the third up to u = 1/2; beyond, the chord to u = 1.
    """
    fall = taken * (one + taken * (two + three * max(taken, 0.0)))
    fall = fall if taken > 0.0 else min(fall, 0.0)
    return fall if taken <= 0.5 else 1.0 - chord * (1.0 - taken)


@inlined
def gain_is_at_most(least: float, norms: Norms, out: NDArray[np.float64]) -> bool:
    """Return True if `gain_of_power_change` of the same arguments is certainly at most `least`.

    It takes no roots, and so a fraction of their time.
    """
    weight, norm, _, inverse_sum, bounds, doublings = norms
    one, two, three, chord = fall_terms(doublings)
    for t in range(out.shape[0]):
        fall = fall_at_most(-out[t] * inverse_sum[t], one, two, three, chord)
        bounds[t] = weight[t] * norm[t] * fall
    return sum_of(bounds) <= least - ROUNDING


@inlined
def gain_above(least: float, norms: Norms, out: NDArray[np.float64]) -> float:
    """Return `gain_of_power_change`, or -inf where it certainly is at most `least`.

    `out` (T,) is overwritten.
    """
    gain = -np.inf
    if not gain_is_at_most(least, norms, out):
        gain = gain_of_power_change(norms, out)
    return gain


@inlined
def sum_of(values: NDArray[np.float64]) -> float:
    """Return the sum, in four strands, so that no addition waits for the one before it."""
    a = b = c = d = 0.0
    steps = values.shape[0]
    whole = steps // 4 * 4
    for t in range(0, whole, 4):
        a += values[t]
        b += values[t + 1]
        c += values[t + 2]
        d += values[t + 3]
    for t in range(whole, steps):
        a += values[t]
    return (a + b) + (c + d)


@inlined
def sum_of_products(
    rows: NDArray[np.float64], i: int, others: NDArray[np.float64], j: int
) -> float:
    """Return the sum of the products of row i of (N, T) `rows` and row j of (M, T) `others`.

    In four strands, as `sum_of`.
    """
    a = b = c = d = 0.0
    steps = rows.shape[1]
    whole = steps // 4 * 4
    for t in range(0, whole, 4):
        a += rows[i, t] * others[j, t]
        b += rows[i, t + 1] * others[j, t + 1]
        c += rows[i, t + 2] * others[j, t + 2]
        d += rows[i, t + 3] * others[j, t + 3]
    for t in range(whole, steps):
        a += rows[i, t] * others[j, t]
    return (a + b) + (c + d)


@kernel
def _share_changes(
    layer: LayerState,
    objective: SearchObjective,
    expert: int,
    leave: int,
    enter: int,
    out: NDArray[np.float64],
) -> None:
    """Write to `out` (R,) the change of an expert's shares if a copy leaves and one enters a rank.

    -1 stands for no rank.
    """
    held = layer.held[expert]
    count = layer.copies[expert]
    if leave >= 0:
        held[leave] -= 1
        count -= 1
    if enter >= 0:
        held[enter] += 1
        count += 1
    nearest, nodes = objective.nearest, objective.node_of_rank
    expert_shares(held, count, layer.origin[expert], nearest, nodes, out)
    if leave >= 0:
        held[leave] += 1
    if enter >= 0:
        held[enter] -= 1
    out -= layer.share[expert]


@kernel
def _gain_of_share_changes(layer: LayerState, costs: SmoothCosts, first: int, second: int) -> float:
    """Return the gain of the share changes of two experts in `layer.moved`; -1 for no expert."""
    out = layer.scratch
    out[:] = 0.0
    for rank in range(layer.rank_load.shape[0]):
        by_first, by_second = layer.moved[0, rank], layer.moved[1, rank]
        if by_first != 0.0 or by_second != 0.0:
            add_power_change(
                layer.work, max(first, 0), by_first, max(second, 0), by_second,
                layer.rank_load, layer.powers, rank, costs, out,
            )  # fmt: skip
    return gain_of_power_change(norms_of(layer, costs.doublings), out)


@kernel
def swap_gain(layer: LayerState, objective: SearchObjective, here: int, there: int) -> float:
    """Return the gain if slots `here` (filled) and `there`, on different ranks, swap experts."""
    per_rank = layer.row.shape[0] // layer.rank_load.shape[0]
    e, f = index(layer.row[here]), index(layer.row[there])
    i, j = here // per_rank, there // per_rank
    layer.moved[1] = 0.0
    _share_changes(layer, objective, e, i, j, layer.moved[0])
    if f >= 0:
        _share_changes(layer, objective, f, j, i, layer.moved[1])
    return _gain_of_share_changes(layer, objective.costs, e, f)


@kernel
def replacement_gain(
    layer: LayerState, objective: SearchObjective, slot: int, expert: int
) -> float:
    """Return the gain if `slot` takes another expert (-1: becomes empty)."""
    ranks = layer.rank_load.shape[0]
    rank = slot // (layer.row.shape[0] // ranks)
    old = index(layer.row[slot])
    if not objective.work.proportional:
        leaving, entering = layer.copies[max(old, 0)], layer.copies[max(expert, 0)]
        leave_changes(layer.tokens, layer.work, leaving, objective.work, old, layer.after, 0)
        enter_changes(layer.one_more, layer.work, entering, expert, layer.after, 2)
        layer.scratch[:] = 0.0
        add_work_changes(
            layer.after, 0, 2, rank, old, expert, layer.held, layer.rank_load, layer.powers,
            objective.costs, layer.scratch,
        )  # fmt: skip
        return gain_of_power_change(norms_of(layer, objective.costs.doublings), layer.scratch)
    layer.moved[:] = 0.0
    if old >= 0:
        _share_changes(layer, objective, old, rank, index(-1), layer.moved[0])
    if expert >= 0:
        _share_changes(layer, objective, expert, index(-1), rank, layer.moved[1])
    return _gain_of_share_changes(layer, objective.costs, old, expert)


@inlined
def leave_changes(
    tokens: NDArray[np.float64],
    work: NDArray[np.float64],
    copies: int,
    model: SmoothWork,
    old: int,
    changes: NDArray[np.float64],
    at: int,
) -> None:
    """Write to two rows of `changes` how the work of copies changes if one copy of `old` leaves.

    Row `at`: the copy that leaves (less); the next: each other copy (more). -1 stands for no
    expert: 0. `tokens` and `work` are those of `LayerState`.
    """
    leaves, stays = changes[at + LEAVES], changes[at + STAYS]
    stays[:] = 0.0
    if old < 0:
        leaves[:] = 0.0
    elif copies < 2:
        for t in range(leaves.shape[0]):
            leaves[t] = -work[old, t]
    else:
        fill_work(tokens[old], copies - 1, model, stays)
        for t in range(leaves.shape[0]):
            leaves[t] = -(work[old, t] / copies)
            stays[t] += leaves[t]


@inlined
def enter_changes(
    one_more: NDArray[np.float64],
    work: NDArray[np.float64],
    copies: int,
    expert: int,
    changes: NDArray[np.float64],
    at: int,
) -> None:
    """Write to two rows of `changes` how work changes if one more copy of `expert` enters.

    Row `at`: the copy that enters (more); the next: each other copy (less). -1 stands for no
    expert: 0. `one_more` and `work` are those of `LayerState`.
    """
    enters, eased = changes[at + ENTERS], changes[at + EASED]
    if expert < 0:
        enters[:] = 0.0
        eased[:] = 0.0
    else:
        part = 1.0 / copies
        for t in range(enters.shape[0]):
            enters[t] = one_more[expert, t]
            eased[t] = one_more[expert, t] - part * work[expert, t]


@inlined
def add_work_changes(
    changes: NDArray[np.float64],
    leave: int,
    enter: int,
    rank: int,
    old: int,
    expert: int,
    held: NDArray[np.int32],
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    costs: SmoothCosts,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) the change of all powered costs if `expert` replaces `old` on a rank.

    `changes` (N, T) holds those of `leave_changes` from row `leave` on, and those of
    `enter_changes` from row `enter` on.
    """
    for on in range(rank_load.shape[0]):
        here = on == rank
        by_old = 0.0 if old < 0 else (1.0 if here else float(held[old, on]))
        by_new = 0.0 if expert < 0 else (1.0 if here else float(held[expert, on]))
        if by_old != 0.0 or by_new != 0.0:
            one, two = leave + (LEAVES if here else STAYS), enter + (ENTERS if here else EASED)
            add_power_change(changes, one, by_old, two, by_new, rank_load, powers, on, costs, out)


@kernel
def _update_shares(layer: LayerState, objective: SearchObjective, expert: int) -> None:
    """Update shares and work of one expert, and the rank loads, after its copies have changed."""
    old, before, proportional = layer.moved[0], layer.after[0], objective.work.proportional
    old[:] = layer.share[expert]
    if not proportional:
        before[:] = layer.work[expert]
        update_work(layer, objective, expert)
    held, count = layer.held[expert], layer.copies[expert]
    nearest, nodes = objective.nearest, objective.node_of_rank
    expert_shares(held, count, layer.origin[expert], nearest, nodes, layer.share[expert])
    work = layer.work[expert]
    for rank in range(old.shape[0]):
        share = layer.share[expert, rank]
        if proportional:
            if share != old[rank]:
                for t in range(layer.weight.shape[0]):
                    layer.rank_load[rank, t] += (share - old[rank]) * work[t]
        elif share != 0.0 or old[rank] != 0.0:
            for t in range(layer.weight.shape[0]):
                layer.rank_load[rank, t] += share * work[t] - old[rank] * before[t]


@kernel
def apply_swap(layer: LayerState, objective: SearchObjective, here: int, there: int) -> None:
    """Swap the experts of two slots; costs and gradient stay stale until `refresh`."""
    per_rank = layer.row.shape[0] // layer.rank_load.shape[0]
    i, j = here // per_rank, there // per_rank
    e, f = index(layer.row[here]), index(layer.row[there])
    layer.row[here], layer.row[there] = f, e
    layer.held[e, i] -= 1
    layer.held[e, j] += 1
    _update_shares(layer, objective, e)
    if f >= 0:
        layer.held[f, j] -= 1
        layer.held[f, i] += 1
        _update_shares(layer, objective, f)


@kernel
def apply_replacement(
    layer: LayerState, objective: SearchObjective, slot: int, expert: int
) -> None:
    """Put an expert (-1: none) into a slot; costs and gradient stay stale until `refresh`."""
    rank = slot // (layer.row.shape[0] // layer.rank_load.shape[0])
    old = index(layer.row[slot])
    layer.row[slot] = expert
    if old >= 0:
        layer.held[old, rank] -= 1
        layer.copies[old] -= 1
        _update_shares(layer, objective, old)
    if expert >= 0:
        layer.held[expert, rank] += 1
        layer.copies[expert] += 1
        _update_shares(layer, objective, expert)


@kernel
def copies_of_replacement(
    layer: LayerState, rank: int, leave: int, enter: int
) -> tuple[int, float]:
    """Return (copies, price) that a rank needs more if one expert leaves it and another enters.

    A copy that the rank has at present is free, so both may be negative. -1 stands for no expert.
    """
    copies = 0
    price = 0.0
    if leave >= 0 and not layer.had[leave, rank]:
        copies -= 1
        price -= layer.copy_price[leave, rank]
    if enter >= 0 and not layer.had[enter, rank]:
        copies += 1
        price += layer.copy_price[enter, rank]
    return copies, price
