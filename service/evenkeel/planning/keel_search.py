"""Local search of one layer: the best move by exact gain, again and again, screened by the gradient."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.planning.keel_moves import (
    apply_change,
    apply_exchange,
    change_gain,
    copies_of_change,
    exchange_gain,
)
from evenkeel.planning.keel_state import Curves, Layer, Split, refresh
from evenkeel.planning.kernels import kernel

__all__ = ["descend"]

_NONE, _EXCHANGE, _CHANGE = 0, 1, 2


@kernel
def _may_exchange(layer: Layer, room: NDArray[np.int64], here: int, there: int) -> bool:
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    i, j = here // per_rank, there // per_rank
    e, f = layer.row[here], layer.row[there]
    if i == j or e < 0 or e == f or layer.held[e, j] > 0:
        return False
    if f < 0:
        return bool(room[j] > 0)
    return bool(layer.held[f, i] == 0)


@kernel
def _exchange_promise(layer: Layer, here: int, there: int) -> float:
    """What the gradient says an exchange gains; never less than it does where curves are convex."""
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    i, j = here // per_rank, there // per_rank
    e, f = layer.row[here], layer.row[there]
    promise = (layer.slope[e, i] - layer.slope[e, j]) * layer.share[e, i]
    if f >= 0:
        promise += (layer.slope[f, j] - layer.slope[f, i]) * layer.share[f, j]
    return float(promise)


@kernel
def _change_promise(layer: Layer, borne: NDArray[np.float64], slot: int, expert: int) -> float:
    """Likewise for a change, as if tokens split evenly. borne: (E,) sum of slopes over holders."""
    rank = slot // (layer.row.shape[0] // layer.ranks.shape[0])
    old = layer.row[slot]
    copies = layer.copies[expert]
    promise = borne[expert] * (1.0 / copies - 1.0 / (copies + 1)) - layer.slope[expert, rank] / (copies + 1)
    if old >= 0:
        copies = layer.copies[old]
        others = borne[old] - layer.slope[old, rank]
        promise += layer.slope[old, rank] / copies - others * (1.0 / (copies - 1) - 1.0 / copies)
    return float(promise)


@kernel
def _exchange_price(layer: Layer, here: int, there: int) -> tuple[int, float]:
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    e, f = layer.row[here], layer.row[there]
    copies, price = copies_of_change(layer, here // per_rank, e, f)
    more, dearer = copies_of_change(layer, there // per_rank, f, e)
    return copies + more, price + dearer


@kernel
def _may_change(layer: Layer, room: NDArray[np.int64], spare: int, slot: int, expert: int) -> bool:
    rank = slot // (layer.row.shape[0] // layer.ranks.shape[0])
    old = layer.row[slot]
    if old == expert or layer.held[expert, rank] > 0:
        return False
    if old < 0:
        return bool(room[rank] > 0 and spare > 0)
    return bool(layer.copies[old] > 1)


@kernel
def _promises(
    layer: Layer,
    borne: NDArray[np.float64],
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
) -> NDArray[np.float64]:
    """(S,) the best net gain the gradient promises for any move that starts at a slot."""
    slots = layer.row.shape[0]
    per_rank = slots // layer.ranks.shape[0]
    best = np.full(slots, -np.inf)
    for here in range(slots):
        for there in range(slots):
            if _may_exchange(layer, room, here, there) and (here < there or layer.row[there] < 0):
                copies, cost = _exchange_price(layer, here, there)
                if copies <= allowance or copies <= 0:
                    promise = _exchange_promise(layer, here, there) - price * cost
                    best[here] = max(best[here], promise)
        old = layer.row[here]
        if (old >= 0 and layer.copies[old] > 1) or (old < 0 and spare > 0):
            for expert in range(layer.load.shape[0]):
                if _may_change(layer, room, spare, here, expert):
                    copies, cost = copies_of_change(layer, here // per_rank, old, expert)
                    if copies <= allowance or copies <= 0:
                        promise = _change_promise(layer, borne, here, expert) - price * cost
                        best[here] = max(best[here], promise)
    return best


@kernel
def _best_move(
    layer: Layer,
    curves: Curves,
    split: Split,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
    least: float,
    sharp: bool,
    evaluations: int,
) -> tuple[int, int, int, float, int, int]:
    """The move with the largest net gain above `least`: (kind, slot, other, gain, copies, evaluations)."""
    experts = layer.load.shape[0]
    slots = layer.row.shape[0]
    per_rank = slots // layer.ranks.shape[0]
    borne = np.zeros(experts)
    for expert in range(experts):
        for rank in range(layer.ranks.shape[0]):
            borne[expert] += layer.held[expert, rank] * layer.slope[expert, rank]
    promises = _promises(layer, borne, room, spare, price, allowance)
    kind, slot, other, best, best_copies, used = _NONE, -1, -1, least, 0, 0
    for here in np.argsort(-promises, kind="mergesort"):
        if promises[here] <= best:
            break
        old = layer.row[here]
        for there in range(slots):
            if not (_may_exchange(layer, room, here, there) and (here < there or layer.row[there] < 0)):
                continue
            copies, cost = _exchange_price(layer, here, there)
            if copies > allowance and copies > 0:
                continue
            if _exchange_promise(layer, here, there) - price * cost <= best:
                continue
            if used >= evaluations:
                return kind, slot, other, best, best_copies, used
            used += 1
            gain = exchange_gain(layer, curves, split, here, there, sharp) - price * cost
            if gain > best:
                kind, slot, other, best, best_copies = _EXCHANGE, here, there, gain, copies
        if (old >= 0 and layer.copies[old] > 1) or (old < 0 and spare > 0):
            for expert in range(experts):
                if not _may_change(layer, room, spare, here, expert):
                    continue
                copies, cost = copies_of_change(layer, here // per_rank, old, expert)
                if copies > allowance and copies > 0:
                    continue
                if _change_promise(layer, borne, here, expert) - price * cost <= best:
                    continue
                if used >= evaluations:
                    return kind, slot, other, best, best_copies, used
                used += 1
                gain = change_gain(layer, curves, split, here, expert, sharp) - price * cost
                if gain > best:
                    kind, slot, other, best, best_copies = _CHANGE, here, expert, gain, copies
    return kind, slot, other, best, best_copies, used


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
    sharp: bool,
    evaluations: int,
) -> tuple[int, int, int]:
    """Make the best move until none gains more than `least`.

    Args:
        layer: mutated.
        curves: of the ranks.
        split: dispatcher and nodes.
        room: (R,) further slots each rank may fill in this layer. Mutated.
        spare: further copies the layer may hold.
        price: objective units per copy.
        allowance: further copies between ranks that may be needed.
        least: smallest gain worth a move.
        sharp: whether to search under the sharper norm.
        evaluations: candidates that may be evaluated.

    Returns:
        copies needed more than before, further copies held, evaluations used.
    """
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    copies = 0
    added = 0
    used = 0
    while used < evaluations:
        refresh(layer, curves, sharp)
        kind, slot, other, _, more, spent = _best_move(
            layer,
            curves,
            split,
            room,
            spare - added,
            price,
            allowance - copies,
            least,
            sharp,
            evaluations - used,
        )
        used += spent
        if kind == _NONE:
            break
        copies += more
        if kind == _EXCHANGE:
            if layer.row[other] < 0:
                room[slot // per_rank] += 1
                room[other // per_rank] -= 1
            apply_exchange(layer, split, slot, other)
        else:
            if layer.row[slot] < 0:
                room[slot // per_rank] -= 1
                added += 1
            apply_change(layer, split, slot, other)
    return copies, added, used
