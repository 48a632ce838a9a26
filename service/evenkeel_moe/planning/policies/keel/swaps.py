"""Exchanges of one layer: which swaps of two slots are worth making now.

The objective is convex in the rank loads, so no exchange gains more than the gradient promises, and between equal ranks what is
moved too far is as bad as what is not moved. Both bounds cost O(1) and leave few exchanges to evaluate.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import drop, exchange_gain, shift
from evenkeel_moe.planning.policies.keel.state import SMOOTH, Curves, Layer, Split

__all__ = ["best_exchanges"]

_NEARLY = 0.1
"""Where p is high many ranks wait for one move each: what gains this much of the best is made with it."""


@kernel
def _reach(layer: Layer, curves: Curves, split: Split) -> NDArray[np.float64]:
    """(R, R) above the diagonal: an exchange that the gradient promises g gains at most the reach minus g.

    Between equal ranks, what is moved too far is as bad as what is not moved. inf between others.
    """
    ranks, steps = layer.ranks.shape
    reach = np.full((ranks, ranks), np.inf)
    if curves.tile != 0.0 or split.nearest:
        return reach
    loads, steep = layer.ranks, layer.steep
    for i in range(ranks):
        for j in range(i + 1, ranks):
            if curves.rates[i] == curves.rates[j]:
                width = 0.0
                for t in range(steps):
                    width += (steep[t, i] - steep[t, j]) * (loads[i, t] - loads[j, t])
                reach[i, j] = width
    return reach


@kernel
def _first_pair(most: NDArray[np.float64], reach: NDArray[np.float64]) -> tuple[int, int]:
    """The pair of ranks that seems to gain most: there the bar for the others is found."""
    ranks = most.shape[0]
    best, first, second = -np.inf, 0, 0
    for i in range(ranks):
        for j in range(i + 1, ranks):
            bound = min(most[i, j] + most[j, i], 0.5 * reach[i, j])
            if bound > best:
                best, first, second = bound, i, j
    return first, second


@kernel
def best_exchanges(
    layer: Layer,
    curves: Curves,
    split: Split,
    room: NDArray[np.int64],
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """The best exchange of every pair of ranks, as far as it gains `_NEARLY` as much as the best of all.

    Only where p is high. Otherwise the best alone.

    Returns:
        gains: (N,) net, largest first, all above `least`.
        found: (N, 3) slot with an expert, slot of the other rank, copies.
        evaluations used.
    """
    ranks = layer.ranks.shape[0]
    per_rank = layer.row.shape[0] // ranks
    row, had, far = layer.row, layer.had, layer.far
    load, share, copies_of = layer.load, layer.share, layer.copies
    loads, powers, out = layer.ranks, layer.powers, layer.scratch
    weight, norm, total = layer.weight, layer.norm, layer.total
    net, excess, most = _leave_promises(layer, room, price)
    reach = _reach(layer, curves, split)
    # An exchange saves two copies at the most.
    saved = 2.0 * price * layer.farthest[0]
    gains, found = np.empty(ranks * ranks), np.empty((ranks * ranks, 3), np.int64)
    there, over = np.empty(per_rank), np.empty(per_rank)
    count, used, bar = 0, 0, least
    fraction = _NEARLY if curves.doublings > SMOOTH else 1.0
    first, second = _first_pair(most, reach)
    for turn in range(-1, ranks):
        i = first if turn < 0 else turn
        for j in range(i + 1, ranks):
            if (i == first and (j == second) != (turn < 0)) or used >= evaluations:
                continue
            # Promise and reach together bound a gain by half the reach.
            if most[i, j] + most[j, i] <= bar or 0.5 * reach[i, j] + saved <= bar:
                continue
            best = bar
            for b in range(per_rank):
                there[b] = net[j * per_rank + b, i]
                over[b] = excess[j * per_rank + b, i]
            for a in range(i * per_rank, (i + 1) * per_rank):
                here, left = net[a, j], reach[i, j] - excess[a, j]
                if here + most[j, i] <= best:
                    continue
                for place in range(per_rank):
                    if here + there[place] <= best or left - over[place] <= best:
                        continue
                    # The expert of `one` is there; that of `two` may not be.
                    b = j * per_rank + place
                    one, two, own, other = a, b, i, j
                    if row[one] < 0:
                        one, two, own, other = two, one, other, own
                    e, f = row[one], row[two]
                    if e < 0 or e == f:
                        continue
                    copies = int(not had[e, other]) - int(not had[e, own])
                    cost = far[e, other] - far[e, own]
                    if f >= 0:
                        copies += int(not had[f, own]) - int(not had[f, other])
                        cost += far[f, own] - far[f, other]
                    if copies > allowance and copies > 0:
                        continue
                    used += 1
                    if split.nearest and (copies_of[e] > 1 or (f >= 0 and copies_of[f] > 1)):
                        gain = exchange_gain(layer, curves, split, one, two)
                    else:
                        by_e = share[e, own]
                        by_f = share[f, other] if f >= 0 else 0.0
                        f = max(f, 0)
                        out[:] = 0.0
                        shift(load, e, -by_e, f, by_f, loads, powers, own, curves, out)
                        shift(load, e, by_e, f, -by_f, loads, powers, other, curves, out)
                        gain = drop(weight, norm, total, curves.doublings, out)
                    gain -= price * cost
                    if gain > best:
                        best = gain
                        gains[count] = gain
                        found[count, 0], found[count, 1], found[count, 2] = one, two, copies
            if best > bar:
                count += 1
                bar = max(bar, fraction * best)
    order = np.argsort(-gains[:count], kind="mergesort")
    order = order[: int((gains[:count] >= bar).sum())]
    return gains[order], found[order], used


@kernel
def _leave_promises(
    layer: Layer, room: NDArray[np.int64], price: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(S, R) what the gradient says that it gains, copies paid, to bring a slot's expert to another rank.

    (S, R) what that takes off the reach: the promise and, again, the copies. (R, R) the most of the first over the slots of a rank.
    """
    slots, ranks = layer.row.shape[0], layer.ranks.shape[0]
    per_rank = slots // ranks
    row, held, slope, share, far = layer.row, layer.held, layer.slope, layer.share, layer.far
    net, excess = np.empty((slots, ranks)), np.zeros((slots, ranks))
    most = np.full((ranks, ranks), -np.inf)
    for slot in range(slots):
        own, expert = slot // per_rank, row[slot]
        if expert < 0:
            net[slot] = 0.0 if room[own] > 0 else -np.inf
        else:
            part, here, paid = share[expert, own], slope[expert, own], far[expert, own]
            for other in range(ranks):
                gain = (here - slope[expert, other]) * part
                cost = price * (far[expert, other] - paid)
                net[slot, other] = gain - cost if held[expert, other] == 0 else -np.inf
                excess[slot, other] = gain + cost
        for other in range(ranks):
            if net[slot, other] > most[own, other]:
                most[own, other] = net[slot, other]
    return net, excess, most
