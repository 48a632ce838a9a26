"""Divides a layer too large for one wave into partial steps, each a valid placement of its own.

A slot changes as long as the expert it drops has another replica. What remains are cycles of
experts with a single replica: a cycle that fits changes in one step, a longer one is opened by
parking one of its experts in a redundant slot. A rank whose pool is full gives up a redundant copy
first.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import EMPTY


def room_needed(
    old: NDArray[np.int32], new: NDArray[np.int32], num_ranks: int
) -> NDArray[np.int64]:
    """Return the room each rank needs to change one layer from `old` to `new`, both (S,).

    Returns:
        (2, R) int64 - the experts a rank receives into staging, copies inside the rank included;
        and the empty slots it fills, each of which takes a pool buffer.
    """
    received = (new != old) & (new != EMPTY)
    opened = received & (old == EMPTY)
    return np.asarray(np.stack([received, opened]).reshape(2, num_ranks, -1).sum(axis=2), np.int64)


def whole_row(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return `new` if it fits, else `old`; arguments and `left` as in `partial_row`."""
    needed = room_needed(old, new, left.shape[1])
    if not (needed <= left).all():
        return old
    left -= needed
    return new


def partial_row(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the next row on the way from `old` to `new`; `old` itself if no step fits.

    Args:
        old: (S,) present experts of the slots of one layer.
        new: (S,) experts they shall hold in the end.
        left: (2, R) room of each rank in this wave, as in `room_needed`.

    Returns:
        (S,) int32. Every expert of `old` has a replica in it, and no rank holds an expert twice
        unless it does so in `old` or in `new`.

    Mutates: `left`, from which it takes the room of this step.
    Order: slots that only become empty first (they free a buffer and need none), then by slot.
    """
    row = _single_changes(old, new, left)
    if (row != old).any():
        return row
    for unit in _units(old, new, left.shape[1]):
        tried = row.copy()
        tried[unit] = new[unit]
        # Two units may each rely on the replica that the other drops.
        if np.isin(old[old >= 0], tried).all():
            row = whole_row(row, tried, left)
    if (row != old).any():
        return row
    return _parked(old, new, left)


def _single_changes(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Change every slot whose present expert has another replica; mutates `left`."""
    per_rank = len(old) // left.shape[1]
    row, goal, copies = old.tolist(), new.tolist(), _copies(old, new)
    todo = sorted(np.nonzero(old != new)[0].tolist(), key=lambda slot: (goal[slot] != EMPTY, slot))
    before = len(todo) + 1
    while len(todo) < before:
        before = len(todo)
        blocked = []
        for slot in todo:
            rank = slot // per_rank
            needed = (int(goal[slot] != EMPTY), int(row[slot] == EMPTY))
            if (
                (row[slot] != EMPTY and copies[row[slot]] < 2)
                or left[0, rank] < needed[0]
                or left[1, rank] < needed[1]
                or _unwanted_twins(row, goal, slot, per_rank)
            ):
                blocked.append(slot)
                continue
            copies[row[slot]] -= 1
            copies[goal[slot]] += 1
            left[:, rank] -= needed
            row[slot] = goal[slot]
        todo = blocked
    return np.array(row, np.int32)


def _copies(old: NDArray[np.int32], new: NDArray[np.int32]) -> list[int]:
    """Count the replicas of each expert in `old`; the last entry, index EMPTY, the empty slots."""
    experts = int(max(old.max(), new.max())) + 1
    filled = np.bincount(old[old >= 0], minlength=experts)
    return [*filled.tolist(), int((old == EMPTY).sum())]


def _unwanted_twins(row: list[int], goal: list[int], slot: int, per_rank: int) -> list[int]:
    """Return the slots of the same rank that hold the slot's new expert now but not in the end."""
    expert = goal[slot]
    first = slot // per_rank * per_rank
    if expert == EMPTY or expert not in row[first : first + per_rank]:
        return []
    return [
        twin
        for twin in range(first, first + per_rank)
        if twin != slot and row[twin] == expert and goal[twin] != expert
    ]


def _units(old: NDArray[np.int32], new: NDArray[np.int32], num_ranks: int) -> list[list[int]]:
    """Return sets of slots that may change together.

    With such a change no expert loses its last replica and no rank comes to hold an expert twice.
    """
    per_rank = len(old) // num_ranks
    row, goal = old.tolist(), new.tolist()
    changing = np.nonzero(old != new)[0].tolist()
    wanted_at = {goal[slot]: slot for slot in reversed(changing)}
    units: list[list[int]] = []
    done: set[int] = set()
    for seed in changing:
        if seed in done:
            continue
        copies = _copies(old, new)
        unit: list[int] = []
        queue = [seed]
        while queue:
            slot = queue.pop()
            if slot in unit:
                continue
            unit.append(slot)
            copies[row[slot]] -= 1
            copies[goal[slot]] += 1
            queue.extend(_unwanted_twins(row, goal, slot, per_rank))
            # An expert that the unit leaves without a replica must get one from the unit.
            queue.extend(wanted_at[row[s]] for s in unit if row[s] != EMPTY and copies[row[s]] < 1)
        if done.isdisjoint(unit):
            units.append(unit)
        done.update(unit)
    return units


def _parked(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Open one cycle: copy an expert into a redundant slot and change the slot it leaves.

    Mutates: `left`.
    """
    per_rank = len(old) // left.shape[1]
    row, goal, copies = old.tolist(), new.tolist(), _copies(old, new)
    redundant = [slot for slot in range(len(row)) if row[slot] == EMPTY or copies[row[slot]] > 1]
    for slot in np.nonzero(old != new)[0].tolist():
        if _unwanted_twins(row, goal, slot, per_rank):
            continue
        for park in redundant:
            rank = park // per_rank
            there = slice(rank * per_rank, (rank + 1) * per_rank)
            # The rank must not hold the expert twice, neither now nor in the end.
            if park == slot or row[slot] in row[there] or row[slot] in goal[there]:
                continue
            tried = old.copy()
            tried[park], tried[slot] = old[slot], new[slot]
            if whole_row(old, tried, left) is tried:
                return tried
    return old


def vacated_rows(
    rows: NDArray[np.int32], target: NDArray[np.int32], free: NDArray[np.int64]
) -> dict[int, NDArray[np.int32]]:
    """Empty a redundant slot on every rank that must fill an empty one but has no free pool buffer.

    Args:
        rows: (L, S) present experts of all slots.
        target: (L, S) experts they shall hold in the end.
        free: (R,) free pool buffers of each rank.

    Returns:
        Layer -> (S,) new row; empty if there is nothing to give up. Nothing is received.

    Order: a copy that the target drops before one that it keeps, then by layer and slot.
    """
    changed: dict[int, NDArray[np.int32]] = {}
    per_rank = rows.shape[1] // len(free)
    for rank in np.nonzero(free < 1)[0].tolist():
        there = slice(rank * per_rank, (rank + 1) * per_rank)
        if not ((rows[:, there] == EMPTY) & (target[:, there] != EMPTY)).any():
            continue
        filled = np.argwhere(rows[:, there] != EMPTY)
        leaves = rows[:, there] != target[:, there]
        for layer, local in sorted(filled.tolist(), key=lambda at: not leaves[at[0], at[1]]):
            row = changed.get(layer, rows[layer])
            if (row == row[rank * per_rank + local]).sum() < 2:
                continue
            changed[layer] = row.copy()
            changed[layer][rank * per_rank + local] = EMPTY
            break
    return changed
