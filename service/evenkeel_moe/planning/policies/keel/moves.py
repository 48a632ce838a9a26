"""The single moves of one layer: their gain, and carrying them out.

There are two kinds. A swap exchanges the experts of two slots on different ranks, one of which may
be empty. A replacement puts another expert into a slot whose own expert has a second copy, or into
an empty slot. No move puts a second copy of an expert on a rank or takes an expert's last copy
away.

A gain is by how much a move lowers the objective, before the price of copies.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, inlined, kernel
from evenkeel_moe.planning.policies.keel.gains import (
    add_power_change,
    gain_of_power_change,
    norms_of,
)
from evenkeel_moe.planning.policies.keel.state import (
    LayerState,
    SearchObjective,
    SmoothCosts,
    expert_shares,
    update_work,
)
from evenkeel_moe.planning.policies.keel.work import SmoothWork, fill_work

LEAVES, STAYS, ENTERS, EASED = 0, 1, 0, 1
"""Rows of the changes of `leave_changes` and `enter_changes`, which `LayerState.after` holds one
after the other."""


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
    if old < 0:
        leaves[:] = 0.0
        stays[:] = 0.0
    elif copies < 2:
        stays[:] = 0.0
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
