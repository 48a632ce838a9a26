"""Local search of one layer: the best move, again and again.

Candidates are looked at where most can be gained. Swapping anything between two ranks never does better than
making them equal in every step; that bound costs one pass over the steps and puts pairs of ranks in order.
Inside a pair, and for changes, the gradient's promise decides which candidates are judged.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel.planning.keel_moves import (
    apply_change,
    apply_exchange,
    change_gain,
    drop,
    exchange_gain,
    shift,
)
from evenkeel.planning.keel_state import SMOOTH, Curves, Layer, Split, power, refresh
from evenkeel.planning.kernels import inlined, kernel

__all__ = ["descend"]


@kernel
def _pair_bounds(
    layer: Layer, curves: Curves, split: Split
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(R, R) the most an exchange between two ranks can gain, above the diagonal; (R, R) its reach.

    Between equal ranks, what is moved too far is as bad as what is not moved: an exchange that the gradient
    promises g gains at most the reach minus g.
    """
    ranks, steps = layer.ranks.shape
    bounds, reach = np.full((ranks, ranks), -np.inf), np.full((ranks, ranks), np.inf)
    if curves.tile != 0.0 or split.nearest:
        for i in range(ranks):
            bounds[i, i + 1 :] = np.inf
        return bounds, reach
    p = 2.0**curves.doublings
    # Of (a x)^p + (b (s - x))^p the least over x is s^p (a^q + b^q)^(1 - p), q = -p / (p - 1).
    rates = curves.rates ** (-p / (p - 1.0))
    weight, norm, total = layer.weight, layer.norm, layer.total
    loads, powers, steep, out = layer.ranks, layer.powers, layer.steep, layer.scratch
    for i in range(ranks):
        for j in range(i + 1, ranks):
            least, width = (rates[i] + rates[j]) ** (1.0 - p), 0.0
            for t in range(steps):
                both = power(loads[i, t] + loads[j, t], curves.doublings)
                out[t] = both * least - powers[i, t] - powers[j, t]
                width += (steep[t, i] - steep[t, j]) * (loads[i, t] - loads[j, t])
            bounds[i, j] = drop(weight, norm, total, curves.doublings, out)
            if rates[i] == rates[j]:
                reach[i, j] = width
    return bounds, reach


@kernel
def _exchanges(
    layer: Layer,
    curves: Curves,
    split: Split,
    room: NDArray[np.int64],
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """The best exchange of every pair of ranks, as far as it gains half of what the best of all does.

    Only where p is high: many ranks then wait for one move each. Otherwise the best alone.

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
    bounds, reach = _pair_bounds(layer, curves, split)
    net, most = _leave_promises(layer, room, price, bounds)
    gains, found = np.empty(ranks * ranks), np.empty((ranks * ranks, 3), np.int64)
    count, used, bar = 0, 0, least
    fraction = 0.5 if curves.doublings > SMOOTH else 1.0
    first = int(np.argmax(bounds))
    for turn in range(-1, ranks * ranks):
        pair = first if turn < 0 else turn
        i, j = pair // ranks, pair % ranks
        if bounds[i, j] <= bar or turn == first or used >= evaluations:
            continue
        best = bar
        for a in range(i * per_rank, (i + 1) * per_rank):
            if net[a, j] + most[j, i] <= best:
                continue
            for b in range(j * per_rank, (j + 1) * per_rank):
                if net[a, j] + net[b, i] <= best:
                    continue
                # The expert of `one` is there; that of `two` may not be.
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
                promise = net[a, j] + net[b, i] + price * cost
                if (copies > allowance and copies > 0) or reach[i, j] - promise - price * cost <= best:
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
    layer: Layer, room: NDArray[np.int64], price: float, bounds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(S, R) what the gradient says that it gains, copies paid, to bring a slot's expert to another rank.

    And (R, R) the most of it over the slots of a rank. Lowers `bounds` (R, R) to the best that two slots of a pair promise together.
    """
    slots, ranks = layer.row.shape[0], layer.ranks.shape[0]
    per_rank = slots // ranks
    row, held, slope, share, far = layer.row, layer.held, layer.slope, layer.share, layer.far
    net = np.full((slots, ranks), -np.inf)
    most = np.full((ranks, ranks), -np.inf)
    for slot in range(slots):
        own, expert = slot // per_rank, row[slot]
        for other in range(ranks):
            if expert < 0:
                net[slot, other] = 0.0 if room[own] > 0 else -np.inf
            elif held[expert, other] == 0:
                less = slope[expert, own] - slope[expert, other]
                net[slot, other] = less * share[expert, own] - price * (far[expert, other] - far[expert, own])
            most[own, other] = max(most[own, other], net[slot, other])
    for i in range(ranks):
        for j in range(i + 1, ranks):
            bounds[i, j] = min(bounds[i, j], most[i, j] + most[j, i])
    return net, most


@kernel
def _best_change(
    layer: Layer,
    curves: Curves,
    split: Split,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[int, int, float, int, int]:
    """The change with the largest net gain above `least`: (slot or -1, expert, gain, copies, evaluations)."""
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    row, held, had, far, slope = layer.row, layer.held, layer.had, layer.far, layer.slope
    load, share, copies_of = layer.load, layer.share, layer.copies
    loads, powers, out = layer.ranks, layer.powers, layer.scratch
    weight, norm, total = layer.weight, layer.norm, layer.total
    borne = (held * slope).sum(axis=1)
    hasty = curves.doublings > SMOOTH and not split.nearest
    slots, drops, alone = _open_slots(layer, curves, hasty, room, spare, borne)
    slot, chosen, best, best_copies, used = -1, -1, least, 0, 0
    if len(slots) == 0:
        return slot, chosen, best, best_copies, used
    easiest = _easiest(layer, slots, alone, price)
    for expert in range(experts):
        part = 1.0 / (copies_of[expert] + 1.0)
        eased = borne[expert] * part / copies_of[expert]
        if eased + easiest - price * _nearest_copy(held, far, expert) <= best:
            continue
        if hasty:
            out[:] = 0.0
            for holder in range(ranks):
                if held[expert, holder] > 0:
                    shift(
                        load,
                        expert,
                        -part * share[expert, holder],
                        0,
                        0.0,
                        loads,
                        powers,
                        holder,
                        curves,
                        out,
                    )
            eased = drop(weight, norm, total, curves.doublings, out)
        for place in range(len(slots)):
            rank, old = slots[place] // per_rank, row[slots[place]]
            # What enters costs its new rank what the gradient says or, at the least, nothing.
            promise = eased + min(drops[place] - slope[expert, rank] * part, alone[place])
            if promise <= best or held[expert, rank] > 0:
                continue
            copies, cost = int(not had[expert, rank]), far[expert, rank]
            if old >= 0:
                copies -= int(not had[old, rank])
                cost -= far[old, rank]
            if (copies > allowance and copies > 0) or promise - price * cost <= best:
                continue
            if used >= evaluations:
                return slot, chosen, best, best_copies, used
            used += 1
            if split.nearest:
                gain = change_gain(layer, curves, split, slots[place], expert)
            else:
                out[:] = 0.0
                more = 1.0 / (copies_of[old] - 1.0) if old >= 0 else 0.0
                one = max(old, 0)
                for on in range(ranks):
                    by_old = 0.0
                    if old >= 0:
                        by_old = -share[old, on] if on == rank else more * share[old, on]
                    by_new = part if on == rank else -part * share[expert, on]
                    if by_old != 0.0 or by_new != 0.0:
                        shift(load, one, by_old, expert, by_new, loads, powers, on, curves, out)
                gain = drop(weight, norm, total, curves.doublings, out)
            gain -= price * cost
            if gain > best:
                slot, chosen, best, best_copies = slots[place], expert, gain, copies
    return slot, chosen, best, best_copies, used


@kernel
def _easiest(layer: Layer, slots: NDArray[np.int64], alone: NDArray[np.float64], price: float) -> float:
    """The most that emptying a slot gains, the copy it saves counted."""
    most = -np.inf
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    for place in range(len(slots)):
        old = layer.row[slots[place]]
        saved = price * layer.far[old, slots[place] // per_rank] if old >= 0 else 0.0
        most = max(most, alone[place] + saved)
    return most


@inlined
def _nearest_copy(held: NDArray[np.int64], far: NDArray[np.float64], expert: int) -> float:
    """Price of the cheapest further copy of an expert."""
    least = np.inf
    for rank in range(held.shape[1]):
        if held[expert, rank] == 0:
            least = min(least, far[expert, rank])
    return least


@kernel
def _open_slots(
    layer: Layer,
    curves: Curves,
    hasty: bool,
    room: NDArray[np.int64],
    spare: int,
    borne: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Slots another expert may enter; what it gains, by promise and alone, to empty each."""
    num_slots = layer.row.shape[0]
    per_rank = num_slots // layer.ranks.shape[0]
    load, held, share, loads = layer.load, layer.held, layer.share, layer.ranks
    powers, out = layer.powers, layer.scratch
    slots = np.empty(num_slots, np.int64)
    drops, alone = np.zeros(num_slots), np.zeros(num_slots)
    count = 0
    for slot in range(num_slots):
        old, rank = layer.row[slot], slot // per_rank
        if old < 0:
            if spare > 0 and room[rank] > 0:
                slots[count] = slot
                count += 1
        elif layer.copies[old] > 1:
            more = 1.0 / (layer.copies[old] - 1.0)
            others = borne[old] / layer.copies[old] - layer.slope[old, rank] * layer.share[old, rank]
            drops[count] = layer.slope[old, rank] * layer.share[old, rank] - others * more
            alone[count] = drops[count]
            if hasty:
                out[:] = 0.0
                for on in range(held.shape[1]):
                    if held[old, on] > 0:
                        by = -share[old, on] if on == rank else more * share[old, on]
                        shift(load, old, by, 0, 0.0, loads, powers, on, curves, out)
                alone[count] = drop(layer.weight, layer.norm, layer.total, curves.doublings, out)
            slots[count] = slot
            count += 1
    return slots[:count], drops[:count], alone[:count]


@kernel
def descend(
    layer: Layer,
    curves: Curves,
    split: Split,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[int, int, int]:
    """Make the best move, and exchanges nearly as good between other ranks, until none gains more than `least`.

    Args:
        layer: mutated.
        curves: of the ranks.
        split: dispatcher and nodes.
        room: (R,) further slots each rank may fill in this layer. Mutated.
        spare: further copies the layer may hold.
        price: objective units per copy.
        allowance: further copies between ranks that may be needed.
        least: smallest gain worth a move.
        evaluations: candidates that may be evaluated.

    Returns:
        copies needed more than before, further copies held, evaluations used.
    """
    ranks = layer.ranks.shape[0]
    per_rank = layer.row.shape[0] // ranks
    copies, added, used = 0, 0, 0
    touched = np.empty(ranks, np.bool_)
    while used < evaluations:
        refresh(layer, curves)
        gains, found, spent = _exchanges(
            layer, curves, split, room, price, allowance - copies, least, evaluations - used
        )
        used += spent
        best = gains[0] if len(gains) else least
        slot, expert, _, more, spent = _best_change(
            layer, curves, split, room, spare - added, price, allowance - copies, best, evaluations - used
        )
        used += spent
        touched[:] = False
        if slot >= 0:
            copies += more
            if layer.row[slot] < 0:
                room[slot // per_rank] -= 1
                added += 1
            else:
                touched |= layer.held[layer.row[slot]] > 0
            apply_change(layer, split, slot, expert)
            touched |= layer.held[expert] > 0
        elif len(gains) == 0:
            break
        if slot >= 0 and curves.doublings == SMOOTH:
            continue
        # Exchanges between other ranks gain about what they would have gained alone.
        for here, there, more in found:
            i, j = here // per_rank, there // per_rank
            if touched[i] or touched[j] or (more > allowance - copies and more > 0):
                continue
            touched[i] = touched[j] = True
            copies += more
            if layer.row[there] < 0:
                room[i] += 1
                room[j] -= 1
            apply_exchange(layer, split, here, there)
            if split.nearest or curves.doublings == SMOOTH:
                break
    return copies, added, used
