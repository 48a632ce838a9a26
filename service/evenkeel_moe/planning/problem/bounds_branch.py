"""A bound by branching: experts are put on ranks one after the other, and what no choice can undo is counted.

Best first, so the least bound of all open choices is a bound under every placement at any time, and the optimum once a
placement is complete. It lifts the bound of layers with few experts and ranks; with many, all budgets end near the root.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel

__all__ = ["BRANCH_EXPERTS", "BRANCH_RANKS", "branch_bound"]

BRANCH_EXPERTS, BRANCH_RANKS = 12, 4
"""Largest layers for which branching lifts the bound within the memory it is given."""
_ROOM = 300_000
"""Rank loads that all open choices of one layer may hold together."""
_MOST_NODES = 30_000


def branch_bound(load: NDArray[np.float64], num_ranks: int, slots_per_rank: int) -> float:
    """Time of one layer that no placement beats under an even split, with ranks alike and no expert twice on a rank.

    Args:
        load: (T, E) [tokens], E at most `BRANCH_EXPERTS`.
        num_ranks: R, at most `BRANCH_RANKS`.
        slots_per_rank: places of a rank; R of them hold E or more.

    Returns:
        Sum over steps [tokens]; the optimum if the search came to its end.
    """
    heaviest_first = np.argsort(-load.sum(axis=0), kind="stable")
    tokens = np.ascontiguousarray(load[:, heaviest_first].T, np.float64)
    nodes = min(_MOST_NODES, _ROOM // (num_ranks * tokens.shape[1]))
    return _branch(tokens, num_ranks, slots_per_rank, max(nodes, 1))


@kernel
def _level(
    load: NDArray[np.float64],
    rest: NDArray[np.float64],
    hottest: NDArray[np.float64],
    ranks: NDArray[np.float64],
    held: NDArray[np.int64],
    depth: int,
    per_rank: int,
) -> float:
    """What a choice for the first `depth` experts costs at the least.

    In every step: the fullest rank as it is; the mean of all ranks; what is left, spread over ranks with a place;
    the hottest expert left, on as many ranks as there may be copies.
    """
    num_ranks, steps = ranks.shape
    experts = load.shape[0]
    places, open_ranks, is_open = 0, 0, 0
    for rank in range(num_ranks):
        free = per_rank
        for expert in range(depth):
            free -= (held[rank] >> expert) & 1
        places += free
        open_ranks += int(free > 0)
        is_open |= int(free > 0) << rank
    left = experts - depth
    if places < left:
        return np.inf
    copies = min(open_ranks, places - left + 1)
    total = 0.0
    for t in range(steps):
        worst, everything, spread = 0.0, rest[depth, t], rest[depth, t]
        for rank in range(num_ranks):
            everything += ranks[rank, t]
            worst = max(worst, ranks[rank, t])
            if (is_open >> rank) & 1:
                spread += ranks[rank, t]
        worst = max(worst, everything / num_ranks)
        if left > 0:
            worst = max(worst, max(spread / open_ranks, hottest[depth, t] / copies))
        total += worst
    return total


@kernel
def _branch(load: NDArray[np.float64], num_ranks: int, per_rank: int, room: int) -> float:
    experts, steps = load.shape
    rest, hottest = np.zeros((experts + 1, steps)), np.zeros((experts + 1, steps))
    for expert in range(experts - 1, -1, -1):
        rest[expert] = rest[expert + 1] + load[expert]
        hottest[expert] = np.maximum(hottest[expert + 1], load[expert])
    ranks, held = np.zeros((room, num_ranks, steps)), np.zeros((room, num_ranks), np.int64)
    depth, bound = np.zeros(room, np.int64), np.zeros(room)
    # A heap of open choices: least bound first, the deepest of equals.
    heap, size, used = np.zeros(room, np.int64), 1, 1
    bound[0] = _level(load, rest, hottest, ranks[0], held[0], 0, per_rank)
    while size > 0:
        node = heap[0]
        expert = depth[node]
        if expert == experts or used + (1 << num_ranks) > room:
            return float(bound[node])
        size -= 1
        _sink(heap, heap[size], size, bound, depth)
        for chosen in range(1, 1 << num_ranks):
            if not _is_choice(held[node], chosen, expert, per_rank):
                continue
            copies = 0
            for rank in range(num_ranks):
                copies += (chosen >> rank) & 1
            for rank in range(num_ranks):
                mine = (chosen >> rank) & 1
                held[used, rank] = held[node, rank] | (mine << expert)
                for t in range(steps):
                    ranks[used, rank, t] = ranks[node, rank, t] + mine * load[expert, t] / copies
            depth[used] = expert + 1
            level = _level(load, rest, hottest, ranks[used], held[used], expert + 1, per_rank)
            if level < np.inf:
                bound[used] = max(level, bound[node])
                _rise(heap, used, size, bound, depth)
                size += 1
                used += 1
    return np.inf


@kernel
def _is_choice(held: NDArray[np.int64], chosen: int, expert: int, per_rank: int) -> bool:
    """Whether the ranks in `chosen` all have a place; of ranks that hold the same, the first ones must be taken."""
    for rank in range(held.shape[0]):
        if (chosen >> rank) & 1:
            free = per_rank
            for other in range(expert):
                free -= (held[rank] >> other) & 1
            if free < 1:
                return False
            for before in range(rank):
                if held[before] == held[rank] and not (chosen >> before) & 1:
                    return False
    return True


@kernel
def _before(a: int, b: int, bound: NDArray[np.float64], depth: NDArray[np.int64]) -> bool:
    return bool(bound[a] < bound[b] or (bound[a] == bound[b] and depth[a] > depth[b]))


@kernel
def _rise(
    heap: NDArray[np.int64],
    node: int,
    at: int,
    bound: NDArray[np.float64],
    depth: NDArray[np.int64],
) -> None:
    while at > 0 and _before(node, heap[(at - 1) // 2], bound, depth):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = node


@kernel
def _sink(
    heap: NDArray[np.int64],
    node: int,
    size: int,
    bound: NDArray[np.float64],
    depth: NDArray[np.int64],
) -> None:
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(heap[child + 1], heap[child], bound, depth):
            child += 1
        if not _before(heap[child], node, bound, depth):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = node
