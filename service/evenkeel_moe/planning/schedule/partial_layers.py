"""Steps for a layer too large for one wave: rows on the way, each a sound placement of its own.

Slots change one by one as long as the expert they drop has another replica. What then remains are cycles of
experts with a single replica: a cycle that fits goes at once, a longer one is opened by parking one of its
experts in a redundant slot. A rank whose pool is full gives up a redundant copy first.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import EMPTY

__all__ = ["partial_row", "room_needed", "vacated_rows"]


def room_needed(
    old: NDArray[np.int32], new: NDArray[np.int32], num_ranks: int
) -> NDArray[np.int64]:
    """What each rank needs for one layer to go from `old` to `new`, both (S,).

    Returns:
        (2, R) int64 - experts it receives into staging, copies inside the rank included; and slots it fills
        that were empty, each of which takes a pool buffer.
    """
    received = (new != old) & (new != EMPTY)
    opened = received & (old == EMPTY)
    return np.asarray(np.stack([received, opened]).reshape(2, num_ranks, -1).sum(axis=2), np.int64)


def partial_row(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The next row on the way from `old` to `new`; `old` itself if there is no step that fits.

    Args:
        old: (S,) experts of one layer's slots now.
        new: (S,) what they shall hold in the end.
        left: (2, R) room of each rank in this wave, as in `room_needed`. Mutated: less what this step needs.

    Returns:
        (S,) int32. Every expert of `old` has a replica in it, and no rank holds an expert twice that did
        not in `old` and shall not in `new`.

    Order: slots that only become empty first (they free a buffer and need none), then by slot.
    """
    row = _single_changes(old, new, left)
    if (row != old).any():
        return row
    for unit in _units(old, new, left.shape[1]):
        tried = row.copy()
        tried[unit] = new[unit]
        needed = room_needed(row, tried, left.shape[1])
        # Two units may each count on the replica that the other drops.
        if (needed <= left).all() and np.isin(old[old >= 0], tried).all():
            left -= needed
            row = tried
    if (row != old).any():
        return row
    return _parked(old, new, left)


def _single_changes(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Change slots to their new expert wherever the old one has another replica; mutates `left`."""
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
    """Replicas of each expert in `old`; the last entry counts empty slots, so that EMPTY indexes it."""
    experts = int(max(old.max(), new.max())) + 1
    filled = np.bincount(old[old >= 0], minlength=experts)
    return [*filled.tolist(), int((old == EMPTY).sum())]


def _unwanted_twins(row: list[int], goal: list[int], slot: int, per_rank: int) -> list[int]:
    """Slots on the same rank that hold the slot's new expert now but not in the end."""
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
    """Sets of slots that may change together: no expert loses its last replica, no rank doubles one."""
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
            # Whatever the unit leaves without a replica must come back through it.
            queue.extend(wanted_at[row[s]] for s in unit if row[s] != EMPTY and copies[row[s]] < 1)
        if done.isdisjoint(unit):
            units.append(unit)
        done.update(unit)
    return units


def _parked(
    old: NDArray[np.int32], new: NDArray[np.int32], left: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Open one cycle: copy an expert into a redundant slot, and change the slot it leaves; mutates `left`."""
    per_rank = len(old) // left.shape[1]
    row, goal, copies = old.tolist(), new.tolist(), _copies(old, new)
    redundant = [slot for slot in range(len(row)) if row[slot] == EMPTY or copies[row[slot]] > 1]
    for slot in np.nonzero(old != new)[0].tolist():
        if _unwanted_twins(row, goal, slot, per_rank):
            continue
        for park in redundant:
            rank = park // per_rank
            there = slice(rank * per_rank, (rank + 1) * per_rank)
            # The rank must not come to hold the expert twice, now or when its own turn comes.
            if park == slot or row[slot] in row[there] or row[slot] in goal[there]:
                continue
            tried = old.copy()
            tried[park], tried[slot] = old[slot], new[slot]
            needed = room_needed(old, tried, left.shape[1])
            if (needed <= left).all():
                left -= needed
                return tried
    return old


def vacated_rows(
    rows: NDArray[np.int32],
    target: NDArray[np.int32],
    free: NDArray[np.int64],
    max_layers: int | None,
) -> dict[int, NDArray[np.int32]]:
    """Empty one redundant slot on every rank that must fill an empty one and has no pool buffer free.

    Args:
        rows: (L, S) experts of all slots now.
        target: (L, S) what they shall hold in the end.
        free: (R,) free pool buffers of each rank.
        max_layers: bound on the layers changed.

    Returns:
        Layer -> (S,) new row, empty if there is nothing to give up. Nothing is received.

    Order: a copy that is to go anyway before one that must come back, then by layer and slot.
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
            if max_layers is None or layer in changed or len(changed) < max_layers:
                changed[layer] = row.copy()
                changed[layer][rank * per_rank + local] = EMPTY
                break
    return changed
