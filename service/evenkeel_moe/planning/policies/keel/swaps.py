"""Finds the swaps of one layer that are worth making now.

Two bounds leave few swaps to evaluate; both cost O(1) per swap. The objective is convex in the rank
loads, so no swap gains more than the gradient promises. And between equally fast ranks, moving too
much load is as bad as moving too little, see `_reach`.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import (
    add_power_change,
    gain_of_power_change,
    swap_gain,
)
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective


@kernel
def best_swaps(
    layer: LayerState,
    objective: SearchObjective,
    room: NDArray[np.int64],
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """Find the best swap of every pair of ranks that gains nearly as much as the best of all.

    "Nearly" is `objective.swap_share`; where that is 1, only the best swap is found.

    Args:
        layer: refreshed.
        objective: of the search.
        room: (R,) further slots that each rank may fill in this layer.
        price: objective units per copy.
        allowance: further copies between ranks that may be made.
        least: smallest net gain, copies paid, that counts.
        evaluations: candidates that may be evaluated.

    Returns:
        gains: (N,) net gains, largest first, all above `least`.
        swaps: (N, 3) slot with an expert, slot of the other rank, copies needed.
        evaluations used.
    """
    ranks = layer.rank_load.shape[0]
    net, excess, most = _promises(layer, room, price)
    reach = _reach(layer, objective)
    # A swap moves two experts, so it gives up at most two copies that have a price.
    saved = 2.0 * price * layer.dearest[0]
    gains, swaps = np.empty(ranks * ranks), np.empty((ranks * ranks, 3), np.int64)
    count, used, bar = 0, 0, least
    # The pair that promises most comes first (turn -1), so that the bar for the others is high.
    first, second = _most_promising_pair(most, reach)
    for turn in range(-1, ranks):
        i = first if turn < 0 else turn
        for j in range(i + 1, ranks):
            if (i == first and (j == second) != (turn < 0)) or used >= evaluations:
                continue
            # Promise and reach together bound a gain by half the reach.
            if most[i, j] + most[j, i] <= bar or 0.5 * reach[i, j] + saved <= bar:
                continue
            gain, one, two, copies, spent = _best_swap_of_pair(
                layer, objective, i, j, net, excess, most[j, i], reach[i, j], price, allowance, bar
            )
            used += spent
            if gain > bar:
                gains[count] = gain
                swaps[count, 0], swaps[count, 1], swaps[count, 2] = one, two, copies
                count += 1
                bar = max(bar, objective.swap_share * gain)
    order = np.argsort(-gains[:count], kind="mergesort")
    order = order[: int((gains[:count] >= bar).sum())]
    return gains[order], swaps[order], used


@kernel
def _best_swap_of_pair(
    layer: LayerState,
    objective: SearchObjective,
    i: int,
    j: int,
    net: NDArray[np.float64],
    excess: NDArray[np.float64],
    most_back: float,
    reach: float,
    price: float,
    allowance: int,
    best: float,
) -> tuple[float, int, int, int, int]:
    """Find the best swap between the ranks i < j that gains more than `best`.

    No slot of rank j promises more than `most_back`. Returns (net gain or `best`, slot with an
    expert, slot of the other rank, copies, evaluations).
    """
    per_rank = layer.row.shape[0] // layer.rank_load.shape[0]
    row, had, copy_price = layer.row, layer.had, layer.copy_price
    load, share, copies_of = layer.load, layer.share, layer.copies
    rank_load, powers, out = layer.rank_load, layer.powers, layer.scratch
    weight, norm, power_sum = layer.weight, layer.norm, layer.power_sum
    found_one, found_two, found_copies, used = -1, -1, 0, 0
    for a in range(i * per_rank, (i + 1) * per_rank):
        here, left = net[j, a], reach - excess[j, a]
        if here + most_back <= best:
            continue
        for b in range(j * per_rank, (j + 1) * per_rank):
            if here + net[i, b] <= best or left - excess[i, b] <= best:
                continue
            # Slot `one` is filled; slot `two` may be empty.
            one, two, own, other = a, b, i, j
            if row[one] < 0:
                one, two, own, other = two, one, other, own
            e, f = row[one], row[two]
            if e < 0 or e == f:
                continue
            copies = int(not had[e, other]) - int(not had[e, own])
            cost = copy_price[e, other] - copy_price[e, own]
            if f >= 0:
                copies += int(not had[f, own]) - int(not had[f, other])
                cost += copy_price[f, own] - copy_price[f, other]
            if copies > allowance and copies > 0:
                continue
            used += 1
            if objective.nearest and (copies_of[e] > 1 or (f >= 0 and copies_of[f] > 1)):
                gain = swap_gain(layer, objective, one, two)
            else:  # Only the loads of these two ranks change.
                by_e = share[e, own]
                by_f = share[f, other] if f >= 0 else 0.0
                f = max(f, 0)
                out[:] = 0.0
                add_power_change(load, e, -by_e, f, by_f, rank_load, powers, own, objective, out)
                add_power_change(load, e, by_e, f, -by_f, rank_load, powers, other, objective, out)
                gain = gain_of_power_change(weight, norm, power_sum, objective.doublings, out)
            if gain - price * cost > best:
                best = gain - price * cost
                found_one, found_two, found_copies = one, two, copies
    return best, found_one, found_two, found_copies, used


@kernel
def _promises(
    layer: LayerState, room: NDArray[np.int64], price: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Compute what the gradient promises for bringing the expert of each slot to another rank.

    Returns:
        net: (R, S) promised gain minus the price of the copy, for the expert of slot s on rank r;
            -inf where the move is not possible.
        excess: (R, S) promised gain plus that price: this much of the reach the move uses up.
        most: (R, R) largest `net` over the slots of the first rank, for moves to the second.
    """
    slots, ranks = layer.row.shape[0], layer.rank_load.shape[0]
    per_rank = slots // ranks
    row, held, slope = layer.row, layer.held, layer.slope
    share, copy_price = layer.share, layer.copy_price
    net, excess = np.empty((ranks, slots)), np.zeros((ranks, slots))
    most = np.full((ranks, ranks), -np.inf)
    for slot in range(slots):
        own, expert = slot // per_rank, row[slot]
        if expert < 0:
            net[:, slot] = 0.0 if room[own] > 0 else -np.inf
        else:
            part, here, paid = share[expert, own], slope[expert, own], copy_price[expert, own]
            for other in range(ranks):
                gain = (here - slope[expert, other]) * part
                cost = price * (copy_price[expert, other] - paid)
                net[other, slot] = gain - cost if held[expert, other] == 0 else -np.inf
                excess[other, slot] = gain + cost
        for other in range(ranks):
            if net[other, slot] > most[own, other]:
                most[own, other] = net[other, slot]
    return net, excess, most


@kernel
def _reach(layer: LayerState, objective: SearchObjective) -> NDArray[np.float64]:
    """Compute the (R, R) reach: a swap with the promise g gains at most the reach minus g.

    The reach is what the gradient promises if two ranks exchange all their load. Equally fast ranks
    are interchangeable, so a swap gains the same as the move of the remaining load. The promise of
    that move is the reach minus g. Only entries above the diagonal are used; inf between ranks of
    different speed, and where costs are not straight lines under an even split.
    """
    ranks, steps = layer.rank_load.shape
    reach = np.full((ranks, ranks), np.inf)
    if objective.tile != 0.0 or objective.nearest:
        return reach
    rank_load, rank_slope = layer.rank_load, layer.rank_slope
    for i in range(ranks):
        for j in range(i + 1, ranks):
            if objective.rates[i] == objective.rates[j]:
                width = 0.0
                for t in range(steps):
                    width += (rank_slope[t, i] - rank_slope[t, j]) * (
                        rank_load[i, t] - rank_load[j, t]
                    )
                reach[i, j] = width
    return reach


@kernel
def _most_promising_pair(most: NDArray[np.float64], reach: NDArray[np.float64]) -> tuple[int, int]:
    """Return the pair of ranks whose swaps promise most."""
    ranks = most.shape[0]
    best, first, second = -np.inf, 0, 0
    for i in range(ranks):
        for j in range(i + 1, ranks):
            bound = min(most[i, j] + most[j, i], 0.5 * reach[i, j])
            if bound > best:
                best, first, second = bound, i, j
    return first, second
