"""Changes of one layer: which slot should take a further copy of which expert.

A change gains at most what the gradient promises; where p is high that promise is too good, and what eases one rank
is worked out, too.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import change_gain, drop, shift
from evenkeel_moe.planning.policies.keel.state import SMOOTH, Curves, Layer, Split

__all__ = ["best_change"]


@kernel
def best_change(
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
    hasty = curves.doublings > SMOOTH and not split.nearest
    slot, chosen, best, best_copies, used = -1, -1, least, 0, 0
    borne, dear = _borne(layer)
    slots, drops = _open_slots(layer, room, spare, borne)
    if len(slots) == 0:
        return slot, chosen, best, best_copies, used
    # A promise is never below the gain, so where none reaches the bar nothing needs to be worked out.
    saved = _saved(layer, slots, price)
    easiest = (drops + saved).max()
    alone = drops
    if hasty:
        if not _any_promise(layer, borne, dear, easiest, price, best):
            return slot, chosen, best, best_copies, used
        alone = _drops_alone(layer, curves, slots, drops)
        easiest = (alone + saved).max()
    first, following = _chains(row, experts)
    for expert in range(experts):
        part = 1.0 / (copies_of[expert] + 1.0)
        eased = borne[expert] * part / copies_of[expert]
        easier = easiest - price * dear[expert]
        if eased + easier <= best:
            continue
        if hasty:
            out[:] = 0.0
            at = first[expert]
            while at >= 0:
                rank = at // per_rank
                by = -part * share[expert, rank]
                shift(load, expert, by, 0, 0.0, loads, powers, rank, curves, out)
                at = following[at]
                while at >= 0 and at // per_rank == rank:
                    at = following[at]
            eased = drop(weight, norm, total, curves.doublings, out)
            if eased + easier <= best:
                continue
        for place in range(len(slots)):
            if eased + alone[place] + saved[place] <= best:
                continue
            rank, old = slots[place] // per_rank, row[slots[place]]
            if held[expert, rank] > 0:
                continue
            # What enters costs its new rank what the gradient says or, at the least, nothing.
            promise = eased + min(drops[place] - slope[expert, rank] * part, alone[place])
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
def _chains(row: NDArray[np.int32], experts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(E,) first slot of every expert and (S,) the next slot with the same; -1 at the end."""
    first, following = np.full(experts, -1), np.full(row.shape[0], -1)
    for slot in range(row.shape[0] - 1, -1, -1):
        if row[slot] >= 0:
            following[slot] = first[row[slot]]
            first[row[slot]] = slot
    return first, following


@kernel
def _borne(layer: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(E,) sum of an expert's slopes over its copies; (E,) what a further copy costs at the least.

    Nothing while a rank that had the expert is without it.
    """
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    row, slope, had, nearest = layer.row, layer.slope, layer.had, layer.nearest
    borne, left = np.zeros(experts), layer.homes.copy()
    slot = 0
    for rank in range(ranks):
        for _ in range(per_rank):
            expert = row[slot]
            if expert >= 0:
                borne[expert] += slope[expert, rank]
                left[expert] -= int(had[expert, rank])
            slot += 1
    return borne, np.where(left > 0, 0.0, nearest)


@kernel
def _saved(layer: Layer, slots: NDArray[np.int64], price: float) -> NDArray[np.float64]:
    """Price of the copy that each of some slots (N,) holds, which emptying it saves."""
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    saved = np.zeros(len(slots))
    for place in range(len(slots)):
        old = layer.row[slots[place]]
        if old >= 0:
            saved[place] = price * layer.far[old, slots[place] // per_rank]
    return saved


@kernel
def _any_promise(
    layer: Layer,
    borne: NDArray[np.float64],
    dear: NDArray[np.float64],
    easiest: float,
    price: float,
    best: float,
) -> bool:
    """Whether the gradient promises more than `best` for any expert's next copy."""
    copies = layer.copies
    for expert in range(borne.shape[0]):
        promise = borne[expert] / (copies[expert] + 1.0) / copies[expert]
        if promise + easiest - price * dear[expert] > best:
            return True
    return False


@kernel
def _open_slots(
    layer: Layer, room: NDArray[np.int64], spare: int, borne: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Slots another expert may enter, and what the gradient promises for emptying each."""
    num_slots = layer.row.shape[0]
    per_rank = num_slots // layer.ranks.shape[0]
    row, copies, share, slope = layer.row, layer.copies, layer.share, layer.slope
    slots, drops = np.empty(num_slots, np.int64), np.zeros(num_slots)
    count = 0
    for slot in range(num_slots):
        old, rank = row[slot], slot // per_rank
        if old < 0:
            if spare > 0 and room[rank] > 0:
                slots[count] = slot
                count += 1
        elif copies[old] > 1:
            others = borne[old] / copies[old] - slope[old, rank] * share[old, rank]
            drops[count] = slope[old, rank] * share[old, rank] - others * (
                1.0 / (copies[old] - 1.0)
            )
            slots[count] = slot
            count += 1
    return slots[:count], drops[:count]


@kernel
def _drops_alone(
    layer: Layer, curves: Curves, slots: NDArray[np.int64], drops: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What emptying each of some slots (N,) gains at the most: what its rank is eased by, less what the gradient says that
    the other copies' ranks are loaded with. Their gradient only grows when this rank is eased."""
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    row, share, slope = layer.row, layer.share, layer.slope
    load, loads, powers, out = layer.load, layer.ranks, layer.powers, layer.scratch
    alone = np.zeros(len(slots))
    for place in range(len(slots)):
        rank, old = slots[place] // per_rank, row[slots[place]]
        if old >= 0:
            by = share[old, rank]
            out[:] = 0.0
            shift(load, old, -by, 0, 0.0, loads, powers, rank, curves, out)
            eased = drop(layer.weight, layer.norm, layer.total, curves.doublings, out)
            alone[place] = drops[place] - slope[old, rank] * by + eased
    return alone
