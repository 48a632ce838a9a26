"""Finds the swaps of one layer that are worth making now.

Two bounds that cost O(1) per swap leave few swaps. The objective is convex in the rank loads, so no
swap gains more than the gradient promises. And between equally fast ranks, moving too much load is
as bad as moving too little, see `_reach`. What is left is bounded step by step by the same two, and
then by the exact rank costs without the norm's roots, before its gain is computed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.planning.policies.keel.gains import add_power_change, gain_above, norms_of
from evenkeel_moe.planning.policies.keel.moves import swap_gain
from evenkeel_moe.planning.policies.keel.state import WRITTEN_OUT, LayerState, SearchObjective
from evenkeel_moe.planning.policies.keel.swap_bounds import (
    changes_gain_at_most,
    shift_gains_at_most,
)


class _Bounds(NamedTuple):
    """Bounds on the gains of swaps, and the pairs of ranks that may have one worth making."""

    net: NDArray[np.float64]
    """(S, R) of `_promises`, as the next two."""
    excess: NDArray[np.float64]
    most: NDArray[np.float64]
    reach: NDArray[np.float64]
    """(R, R) of `_reach`."""
    pairs: NDArray[np.int64]
    """(N, 2) the pairs, in the order of evaluation."""
    caps: NDArray[np.float64]
    """(N,) bound on the gain of each pair."""


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
    net, excess, most = _promises(layer, room, price)
    reach = _reach(layer, objective)
    # A swap moves two experts, so it gives up at most two copies that have a price.
    saved = 2.0 * price * layer.dearest[0]
    pairs, caps = _promising_pairs(most, reach, saved, least)
    bounds = _Bounds(net, excess, most, reach, pairs, caps)
    gains, swaps, bar, used = _best_swaps_of_pairs(
        layer, objective, bounds, price, allowance, least, evaluations
    )
    order = np.argsort(-gains, kind="mergesort")
    order = order[: int((gains >= bar).sum())]
    return gains[order], swaps[order], used


# All is in one kernel: each call with a layer costs as much as some evaluations.
# Swaps that gain less than the bar that is returned are to be dropped.
@kernel
def _best_swaps_of_pairs(
    layer: LayerState,
    objective: SearchObjective,
    bounds: _Bounds,
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], float, int]:
    """Find the best swap of every pair; return (gains, swaps, bar, evaluations)."""
    row, had, copy_price, copies_of = layer.row, layer.had, layer.copy_price, layer.copies
    work, share, rank_load, powers = layer.work, layer.share, layer.rank_load, layer.powers
    norms, out = norms_of(layer, objective.costs.doublings), layer.scratch
    net, excess, most, reach, pairs, caps = bounds
    costs, per_rank = objective.costs, row.shape[0] // rank_load.shape[0]
    gains, swaps = np.empty(len(pairs)), np.empty((len(pairs), 3), np.int64)
    tilt, width, changes = layer.after[0], layer.after[1], layer.after[2]
    count, used, bar, p_is_8 = 0, 0, least, costs.doublings == WRITTEN_OUT
    for n in range(len(pairs)):
        best, i, j = bar, pairs[n, 0], pairs[n, 1]
        if caps[n] <= bar or used >= evaluations:
            continue
        _fill_tilt(layer.rank_slope, rank_load, i, j, tilt, width)
        for a in range(i * per_rank, (i + 1) * per_rank):
            here, left = net[a, j], reach[i, j] - excess[a, j]
            if here + most[j, i] <= best:
                continue
            for b in range(j * per_rank, (j + 1) * per_rank):
                if here + net[b, i] <= best or left - excess[b, i] <= best:
                    continue
                one, two, own, other = a, b, i, j  # Slot `two` may be empty.
                if row[one] < 0:
                    one, two, own, other = two, one, other, own
                e, f = row[one], row[two]
                copies, cost = _price_of_swap(had, copy_price, max(e, 0), own, f, other)
                if e < 0 or e == f or copies > max(allowance, 0):
                    continue
                used += 1
                if objective.nearest and (copies_of[e] > 1 or (f >= 0 and copies_of[f] > 1)):
                    gain = swap_gain(layer, objective, one, two)
                else:  # Only the loads of these two ranks change.
                    by_e, by_f = share[e, own], share[f, other] if f >= 0 else 0.0
                    f, needed, way = max(f, 0), best + price * cost, 1.0 if own == i else -1.0
                    if reach[i, j] < np.inf and (shift_gains_at_most(
                        needed, tilt, width, work, e, way * by_e, f, way * by_f, out
                    ) or (p_is_8 and changes_gain_at_most(
                        needed, norms, work, e, by_e, f, by_f, rank_load, powers, own, other,
                        costs, out, changes,
                    ))):  # fmt: skip
                        continue
                    out[:] = 0.0
                    add_power_change(work, e, -by_e, f, by_f, rank_load, powers, own, costs, out)
                    add_power_change(work, e, by_e, f, -by_f, rank_load, powers, other, costs, out)
                    gain = gain_above(needed, norms, out)
                if gain - price * cost > best:
                    gains[count] = best = gain - price * cost
                    swaps[count, 0], swaps[count, 1], swaps[count, 2] = one, two, copies
        if best > bar:
            count, bar = count + 1, max(bar, objective.swap_share * best)
    return gains[:count], swaps[:count], bar, used


@inlined
def _fill_tilt(
    rank_slope: NDArray[np.float64],
    rank_load: NDArray[np.float64],
    i: int,
    j: int,
    tilt: NDArray[np.float64],
    width: NDArray[np.float64],
) -> None:
    """Write to `tilt` and `width` (T,) what `shift_gains_at_most` needs of ranks i and j."""
    for t in range(tilt.shape[0]):
        tilt[t] = rank_slope[i, t] - rank_slope[j, t]
        width[t] = tilt[t] * (rank_load[i, t] - rank_load[j, t])


@inlined
def _price_of_swap(
    had: NDArray[np.bool_],
    copy_price: NDArray[np.float32],
    e: int,
    own: int,
    f: int,
    other: int,
) -> tuple[int, float]:
    """Return (copies, price) needed to swap expert e of rank `own` and f (-1: none) of `other`."""
    copies = int(had[e, own]) - int(had[e, other])
    price = copy_price[e, other] - copy_price[e, own]
    if f >= 0:
        copies += int(had[f, other]) - int(had[f, own])
        price += copy_price[f, own] - copy_price[f, other]
    return copies, price


@kernel
def _promises(
    layer: LayerState, room: NDArray[np.int64], price: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Compute what the gradient promises for bringing the expert of each slot to another rank.

    Returns:
        net: (S, R) promised gain minus the price of the copy, for the expert of slot s on rank r;
            -inf where the move is not possible.
        excess: (S, R) promised gain plus that price: this much of the reach the move uses up.
        most: (R, R) largest `net` over the slots of the first rank, for moves to the second.
    """
    slots, ranks = layer.row.shape[0], layer.rank_load.shape[0]
    per_rank = slots // ranks
    row, held, slope = layer.row, layer.held, layer.slope
    share, copy_price = layer.share, layer.copy_price
    net, excess = np.empty((slots, ranks)), np.zeros((slots, ranks))
    most = np.full((ranks, ranks), -np.inf)
    for slot in range(slots):
        own, expert = slot // per_rank, row[slot]
        if expert < 0:
            net[slot] = 0.0 if room[own] > 0 else -np.inf
        else:
            part, here, paid = share[expert, own], slope[expert, own], copy_price[expert, own]
            for other in range(ranks):
                gain = (here - slope[expert, other]) * part
                cost = price * (copy_price[expert, other] - paid)
                net[slot, other] = gain - cost if held[expert, other] == 0 else -np.inf
                excess[slot, other] = gain + cost
        for other in range(ranks):
            if net[slot, other] > most[own, other]:
                most[own, other] = net[slot, other]
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
    if objective.costs.tile != 0.0 or objective.nearest:
        return reach
    rank_load, rank_slope = layer.rank_load, layer.rank_slope
    for i in range(ranks):
        for j in range(i + 1, ranks):
            if objective.costs.rates[i] == objective.costs.rates[j]:
                width = 0.0
                for t in range(steps):
                    width += (rank_slope[i, t] - rank_slope[j, t]) * (
                        rank_load[i, t] - rank_load[j, t]
                    )
                reach[i, j] = width
    return reach


@kernel
def _promising_pairs(
    most: NDArray[np.float64], reach: NDArray[np.float64], saved: float, least: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (N, 2) the pairs of ranks whose swaps may gain more than `least`, (N,) their bounds.

    The pair that promises most comes first, so that the bar for the others is high.
    """
    ranks = most.shape[0]
    size = ranks * (ranks - 1) // 2 + 1
    pairs, caps = np.empty((size, 2), np.int64), np.empty(size)
    best, first, count = -np.inf, 0, 1
    for i in range(ranks):
        for j in range(i + 1, ranks):
            promise, half = most[i, j] + most[j, i], 0.5 * reach[i, j]
            # Promise and reach together bound a gain by half the reach.
            cap = min(promise, half + saved)
            if min(promise, half) > best:
                best, first = min(promise, half), count if cap > least else 0
            if cap > least:
                pairs[count, 0], pairs[count, 1], caps[count] = i, j, cap
                count += 1
    if first == 0:
        return pairs[1:count], caps[1:count]
    pairs[0], caps[0] = pairs[first], caps[first]
    caps[first] = -np.inf
    return pairs[:count], caps[:count]
