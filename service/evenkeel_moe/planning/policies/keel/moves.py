"""The moves of one layer: swap, replace, add and drop.

A pass of `descend` gives every move a promise, an estimate of its gain from the gradient and the
curvature of the objective. It computes the exact gain of those that promise most, and makes the
best of these that touch different ranks. A descent ends when none of those gains.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, inlined, kernel
from evenkeel_moe.planning.policies.keel.layer import (
    Layer,
    Terms,
    nearest_shares,
    raised,
    renew,
    renew_slopes,
    root,
    set_norm,
    set_power,
    set_reliefs,
    set_slope,
    set_work,
    work_of_copy,
)
from evenkeel_moe.planning.policies.keel.survival import count_domains

SWAP, PUT = 0, 1
"""Kinds of a move. (SWAP, a, b) exchanges what slots a and b of different ranks hold; one of them
may be empty. (PUT, a, e) puts expert e, or -1 for none, in slot a: it replaces, adds or drops."""
_ADDS = 4
"""Experts whose further copy on a rank is tried in each of its slots."""
_CURVATURE = 0.25
"""Factor on the second derivative in a promise. One half would be the second order, and would hide
moves that gain where loads swing from step to step."""


class Rules(NamedTuple):
    """The rules of one descent; prices and gains in layer times."""

    price: float
    """A copy inside a node costs so much."""
    slot_price: float
    """A filled slot costs so much; 0 unless layers share slots."""
    drops: bool
    """True if a copy may be dropped without another in its place."""
    listed: int
    """A pass lists so many moves by their promise."""
    trials: int
    """A pass computes so many exact gains, and more until one of them is enough."""
    share: float
    """A move is made in the same pass if it gains this share of the best one."""
    least: float
    """A move must gain more."""


class SearchRoom(NamedTuple):
    """The slots and copies that are left. Layers that share a pool or a limit share the arrays."""

    slots: NDArray[np.int64]
    """(R,) slots that each rank may still fill."""
    total: NDArray[np.int64]
    """(1,) slots that all ranks together may still fill."""
    copies: NDArray[np.int64]
    """(1,) copies between ranks that may still be made."""


class Found(NamedTuple):
    """The moves that promise most, as a heap with the least at 0."""

    promise: NDArray[np.float64]
    """(N,)"""
    move: NDArray[np.int64]
    """(N, 3) kind, a, b as above; a kind of -1 for none."""
    gain: NDArray[np.float64]
    """(N,) exact gain; -inf where it was not computed."""


@kernel
def descend(layer: Layer, terms: Terms, rules: Rules, room: SearchRoom, most: int) -> int:
    """Make moves until none gains, or `most` exact gains were computed; return their number.

    Gradients of ranks that a move did not touch are not followed: they are computed anew before a
    descent ends.
    """
    found = Found(
        np.empty(rules.listed), np.empty((rules.listed, 3), np.int64), np.empty(rules.listed)
    )
    renew(layer, terms)
    used, is_exact = 0, True
    while used < most:
        find_moves(layer, rules, found)
        used += try_moves(layer, terms, rules, room, found, most - used)
        if make_moves(layer, terms, rules, room, found) > 0:
            is_exact = False
        elif is_exact:
            break
        else:
            renew_slopes(layer, terms)
            is_exact = True
    return used


@kernel
def find_moves(layer: Layer, rules: Rules, found: Found) -> None:
    """Fill `found` with the moves that promise most."""
    found.promise[:] = rules.least
    found.move[:] = -1
    skipped = spare_slots(layer)
    find_swaps(layer, rules, found, skipped)
    find_puts(layer, rules, found, skipped)


@kernel
def spare_slots(layer: Layer) -> NDArray[np.bool_]:
    """Return (S,) True for the empty slots of a rank but its first one: they need no look."""
    per_rank = layer.row.shape[0] // layer.held.shape[1]
    spare = np.zeros(layer.row.shape[0], np.bool_)
    for begin in range(0, layer.row.shape[0], per_rank):
        empty = 0
        for slot in range(begin, begin + per_rank):
            if layer.row[slot] < 0:
                spare[slot] = empty > 0
                empty += 1
    return spare


@kernel
def find_swaps(layer: Layer, rules: Rules, found: Found, skipped: NDArray[np.bool_]) -> None:
    """Look at every exchange of two slots of different ranks."""
    slots, ranks = layer.row.shape[0], layer.held.shape[1]
    per_rank = slots // ranks
    now = layer.relief[1]
    net = np.zeros((slots, ranks))  # what it saves to take what a slot holds to a rank
    mean, square = np.zeros(slots), np.zeros(slots)
    for slot in range(slots):
        expert, rank = layer.row[slot], slot // per_rank
        if expert < 0:
            continue
        mean[slot], square[slot] = layer.mean[1, expert], layer.spread[1, expert] ** 2
        for other in range(ranks):
            net[slot, other] = now[expert, rank] - now[expert, other]
            net[slot, other] -= rules.price * (
                layer.given.prices[expert, other] - layer.given.prices[expert, rank]
            )
            if layer.held[expert, other]:
                net[slot, other] = -np.inf
    for i in range(ranks):
        for j in range(i + 1, ranks):
            bend = _CURVATURE * (layer.bend[i] + layer.bend[j])
            for a in range(i * per_rank, (i + 1) * per_rank):
                if skipped[a] or net[a, j] == -np.inf:
                    continue
                for b in range(j * per_rank, (j + 1) * per_rank):
                    promise = net[a, j] + net[b, i]
                    if promise > found.promise[0] and not skipped[b]:
                        promise -= bend * ((mean[a] - mean[b]) ** 2 + square[a] + square[b])
                        push(found, promise, SWAP, a, b)


@kernel
def find_puts(layer: Layer, rules: Rules, found: Found, skipped: NDArray[np.bool_]) -> None:
    """Look at every other expert, or none, in every slot whose expert has another copy."""
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    less, more = layer.relief[0], layer.relief[2]
    # What all ranks together save if the copies of an expert had no work, with one copy less,
    # as now, and with one more on the same ranks; and the sum of their second derivatives.
    saved, bend = np.zeros((3, experts)), np.zeros(experts)
    for expert in range(experts):
        for rank in range(ranks):
            if layer.held[expert, rank]:
                bend[expert] += _CURVATURE * layer.bend[rank]
                for k in range(3):
                    saved[k, expert] += layer.relief[k, expert, rank]
    best, which = np.empty(_ADDS), np.empty(_ADDS, np.int64)
    for rank in range(ranks):
        best[:], which[:] = -np.inf, -1
        for expert in range(experts):
            if layer.held[expert, rank]:
                continue
            gain = saved[1, expert] - saved[2, expert] - more[expert, rank]
            gain -= bend[expert] * _square(layer, expert, 1, expert, 2)
            gain -= rules.price * layer.given.prices[expert, rank]
            at = _ADDS
            while at > 0 and best[at - 1] < gain:
                at -= 1
            if at < _ADDS:
                best[at + 1 :], which[at + 1 :] = best[at:-1].copy(), which[at:-1].copy()
                best[at], which[at] = gain, expert
        own = _CURVATURE * layer.bend[rank]
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            old = index(layer.row[slot])
            if skipped[slot] or (old >= 0 and layer.copies[old] <= layer.given.least[old]):
                continue
            gain = -rules.slot_price
            if old >= 0:
                gain = saved[1, old] - saved[0, old] + less[old, rank]
                gain -= (bend[old] - own) * _square(layer, old, 0, old, 1)
                gain += rules.price * layer.given.prices[old, rank]
                if rules.drops:
                    push(found, gain + rules.slot_price, PUT, slot, -1)
            for n in range(_ADDS):
                if which[n] >= 0:
                    curved = own * _square(layer, old, 1, which[n], 2)
                    push(found, gain + best[n] - curved, PUT, slot, which[n])


@inlined
def _square(layer: Layer, a: int, k: int, b: int, n: int) -> float:
    """Return the mean square of the difference of two works; one may be of no expert, -1."""
    mean, spread = -layer.mean[n, b], layer.spread[n, b]
    if a >= 0:
        mean += layer.mean[k, a]
        spread = spread - layer.spread[k, a] if a == b else np.hypot(spread, layer.spread[k, a])
    square: float = mean * mean + spread * spread
    return square


@inlined
def push(found: Found, promise: float, kind: int, a: int, b: int) -> None:
    """Take a move in the place of the one that promises least, if it promises more."""
    if promise > found.promise[0]:
        size, at = found.promise.shape[0], 0
        while True:
            child = 2 * at + 1
            if child + 1 < size and found.promise[child + 1] < found.promise[child]:
                child += 1
            if child >= size or found.promise[child] >= promise:
                break
            found.promise[at] = found.promise[child]
            found.move[at] = found.move[child]
            at = child
        found.promise[at] = promise
        found.move[at, 0], found.move[at, 1], found.move[at, 2] = kind, a, b


@kernel
def try_moves(
    layer: Layer, terms: Terms, rules: Rules, room: SearchRoom, found: Found, most: int
) -> int:
    """Compute the exact gains of the moves found, the best promise first; return their number.

    A promise below a share of the best gain is not looked at: its move would not be made.
    """
    found.gain[:] = -np.inf
    used, best = 0, rules.least
    for at in np.argsort(-found.promise):
        if found.move[at, 0] < 0 or found.promise[at] <= best * rules.share or used == most:
            break
        if used >= rules.trials and best > rules.least:
            break
        if fits(layer, room, found.move[at]):
            found.gain[at] = exact_gain(layer, terms, rules, found.move[at])
            best = max(best, found.gain[at])
            used += 1
    return used


@kernel
def make_moves(layer: Layer, terms: Terms, rules: Rules, room: SearchRoom, found: Found) -> int:
    """Make the moves that gain most and touch different ranks; return their number."""
    made, busy = 0, np.zeros(layer.held.shape[1], np.bool_)
    order = np.argsort(-found.gain)
    least = max(rules.least, rules.share * found.gain[order[0]])
    for at in order:
        if found.gain[at] <= least:
            break
        if not fits(layer, room, found.move[at]):
            continue
        # The gain falls with the moves before it: the slowest steps are no longer so slow.
        gain = exact_gain(layer, terms, rules, found.move[at])
        if made > 0 and (gain <= least or (layer.touched & busy).any()):
            continue
        book(layer, room, found.move[at])
        apply(layer, terms, found.move[at])
        busy |= layer.touched
        made += 1
    return made


@inlined
def changes_of(
    layer: Layer, move: NDArray[np.int64]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the expert in slot a and the one in its place: each with the ranks it leaves and gets.

    -1 stands for no expert and no rank.
    """
    per_rank = layer.row.shape[0] // layer.held.shape[1]
    rank, other, comes = move[1] // per_rank, index(-1), index(move[2])
    if move[0] == SWAP:
        other, comes = move[2] // per_rank, index(layer.row[move[2]])
    return (index(layer.row[move[1]]), rank, other), (comes, other, rank)


@inlined
def price_of(layer: Layer, move: NDArray[np.int64]) -> tuple[float, int]:
    """Return the price of a move's copies, in copies inside a node, and their number.

    Copies that it makes needless count as negative.
    """
    price, copies = 0.0, 0
    for expert, source, target in changes_of(layer, move):
        for rank, sign in ((source, -1), (target, 1)):
            if expert >= 0 and rank >= 0:
                price += sign * layer.given.prices[expert, rank]
                copies += sign * (layer.given.prices[expert, rank] > 0)
    return price, copies


@inlined
def fits(layer: Layer, room: SearchRoom, move: NDArray[np.int64]) -> bool:
    """Return True if there is room for a move."""
    (leaves, rank, other), (comes, _, _) = changes_of(layer, move)
    # A start may need more copies than allowed: moves that need none are still made then.
    fits = price_of(layer, move)[1] <= max(room.copies[0], 0)
    if comes >= 0 and leaves < 0:
        fits &= room.slots[rank] > 0
        if move[0] == PUT:
            fits &= room.total[0] > 0
    if leaves >= 0 and comes < 0 and other >= 0:
        fits &= room.slots[other] > 0
    for expert, source, target in changes_of(layer, move):
        if expert >= 0 and source >= 0 and layer.given.least[expert] > 1:
            held, domains = layer.held[expert], layer.given.domains
            fits &= count_domains(held, domains, source, target) == 2
    return fits and (leaves >= 0 or comes >= 0)


@inlined
def filled_by(layer: Layer, move: NDArray[np.int64]) -> int:
    """Return the slots that a move fills on the rank of slot a; negative if it empties them."""
    (leaves, _, _), (comes, _, _) = changes_of(layer, move)
    return (1 if comes >= 0 else 0) - (1 if leaves >= 0 else 0)


@inlined
def book(layer: Layer, room: SearchRoom, move: NDArray[np.int64]) -> None:
    """Take the room that a move needs."""
    (_, rank, other), _ = changes_of(layer, move)
    room.slots[rank] -= filled_by(layer, move)
    if other >= 0:
        room.slots[other] += filled_by(layer, move)
    else:
        room.total[0] -= filled_by(layer, move)
    room.copies[0] -= price_of(layer, move)[1]


@kernel
def exact_gain(layer: Layer, terms: Terms, rules: Rules, move: NDArray[np.int64]) -> float:
    """Return the gain of a move, prices paid; writes `change` and `touched`."""
    if terms.nearest:
        set_nearest_change(layer, terms, move)
    else:
        set_change(layer, move)
    ranks = np.nonzero(layer.touched)[0]
    gain = -rules.price * price_of(layer, move)[0]
    if move[0] == PUT:
        gain -= rules.slot_price * filled_by(layer, move)
    for t in range(layer.load.shape[1]):
        total = layer.total[t]
        for rank in ranks:
            time = max(layer.load[rank, t] + layer.change[rank, t], 0.0) * terms.rates[rank]
            total += raised(time, terms.doublings) - layer.power[rank, t]
        gain += layer.given.weight[t] * (layer.norm[t] - root(total, terms.doublings))
    return gain


@kernel
def set_change(layer: Layer, move: NDArray[np.int64]) -> None:
    """Write the change of every load by a move to `change`, for the ranks in `touched`."""
    (leaves, rank, other), (comes, _, _) = changes_of(layer, move)
    less, now, more = layer.work[0], layer.work[1], layer.work[2]
    layer.touched[:] = False
    layer.touched[rank] = True
    layer.change[rank] = 0.0
    if leaves >= 0:
        layer.change[rank] -= now[leaves]
    if other >= 0:
        layer.touched[other] = True
        if comes >= 0:
            layer.change[rank] += now[comes]
        layer.change[other] = -layer.change[rank]
        return
    if comes >= 0:
        layer.change[rank] += more[comes]
    for other in range(layer.held.shape[1]):
        loses = leaves >= 0 and other != rank and layer.held[leaves, other]
        shares = comes >= 0 and layer.held[comes, other]
        if loses or shares:
            layer.touched[other] = True
            layer.change[other] = 0.0
            if loses:
                layer.change[other] += less[leaves] - now[leaves]
            if shares:
                layer.change[other] += more[comes] - now[comes]


@kernel
def set_nearest_change(layer: Layer, terms: Terms, move: NDArray[np.int64]) -> None:
    """Write what `set_change` writes, under nearest dispatch."""
    layer.touched[:] = False
    for expert, source, target in changes_of(layer, move):
        if expert < 0:
            continue
        held = layer.held[expert].copy()
        if source >= 0:
            held[source] = False
        if target >= 0:
            held[target] = True
        shares = nearest_shares(held, layer.given.origin[expert], terms.nodes)
        for r in range(held.shape[0]):
            before, after = layer.share[expert, r], shares[r]
            if before == after:
                continue
            if not layer.touched[r]:
                layer.touched[r] = True
                layer.change[r] = 0.0
            for t in range(layer.load.shape[1]):
                tokens = layer.given.tokens[expert, t]
                layer.change[r, t] += work_of_copy(after * tokens, terms.work)
                layer.change[r, t] -= work_of_copy(before * tokens, terms.work)


@kernel
def apply(layer: Layer, terms: Terms, move: NDArray[np.int64]) -> None:
    """Make the move whose change was written last, and follow the gradients of its ranks."""
    changes = changes_of(layer, move)
    layer.row[move[1]] = changes[1][0]
    if move[0] == SWAP:
        layer.row[move[2]] = changes[0][0]
    for expert, source, target in changes:
        if expert < 0:
            continue
        if source >= 0:
            layer.held[expert, source] = False
        if target >= 0:
            layer.held[expert, target] = True
        layer.copies[expert] += (1 if target >= 0 else 0) - (1 if source >= 0 else 0)
        set_work(layer, terms, expert)
    ranks = layer.held.shape[1]
    for rank in range(ranks):
        if layer.touched[rank]:
            layer.load[rank] += layer.change[rank]
            set_power(layer, terms, rank)
    set_norm(layer, terms)
    for rank in range(ranks):
        if layer.touched[rank]:
            set_slope(layer, terms, rank)
            set_reliefs(layer, rank, 0, layer.held.shape[0])
        elif move[0] == PUT or terms.nearest:
            for expert, _, _ in changes:
                if expert >= 0:
                    set_reliefs(layer, rank, expert, expert + 1)
