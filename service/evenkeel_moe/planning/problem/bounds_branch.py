"""A lower bound on the time of a small layer, by branch and bound over placements.

Experts are assigned to ranks one after the other, and each partial assignment has a bound that no
completion can beat. The search is best first: the least bound of all open nodes is at any time a
bound on every placement, and it is the optimum once a placement is complete. This raises the bound
of layers with few experts and ranks; with many, the search ends near the root for any budget.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel

__all__ = ["BRANCH_EXPERTS", "BRANCH_RANKS", "branch_bound"]

BRANCH_EXPERTS, BRANCH_RANKS = 12, 4
"""Largest layers for which branching raises the bound within its memory."""
_ROOM = 300_000
"""Rank loads that all nodes of one layer may hold together."""
_MOST_NODES = 30_000


def branch_bound(load: NDArray[np.float64], num_ranks: int, slots_per_rank: int) -> float:
    """Return a time of one layer that no placement can beat.

    It holds under an even split on equal ranks, with no expert twice on a rank.

    Args:
        load: (T, E) [tokens], E at most `BRANCH_EXPERTS`.
        num_ranks: R, at most `BRANCH_RANKS`.
        slots_per_rank: slots of a rank; R ranks hold at least E.

    Returns:
        Sum over steps [tokens]; the optimum if the search was completed.
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
    """Return a lower bound on the time after the first `depth` experts were assigned.

    In every step it is the largest of: the fullest rank so far; the mean of all ranks; the
    remaining load spread over the ranks with a free slot; the hottest remaining expert on as many
    ranks as it can have copies.
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
    """Search with at most `room` nodes; `load` is (E, T)."""
    experts, steps = load.shape
    rest, hottest = np.zeros((experts + 1, steps)), np.zeros((experts + 1, steps))
    for expert in range(experts - 1, -1, -1):
        rest[expert] = rest[expert + 1] + load[expert]
        hottest[expert] = np.maximum(hottest[expert + 1], load[expert])
    ranks, held = np.zeros((room, num_ranks, steps)), np.zeros((room, num_ranks), np.int64)
    depth, bound = np.zeros(room, np.int64), np.zeros(room)
    # A heap of open nodes: least bound first, among equal ones the deepest.
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
    """Return True if all ranks in `chosen` have a free slot.

    Among ranks that hold the same experts, only the first ones may be chosen.
    """
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
    """Return True if node a comes before node b in the heap."""
    return bool(bound[a] < bound[b] or (bound[a] == bound[b] and depth[a] > depth[b]))


@kernel
def _rise(
    heap: NDArray[np.int64],
    node: int,
    at: int,
    bound: NDArray[np.float64],
    depth: NDArray[np.int64],
) -> None:
    """Put a node into the heap at `at` and move it up to its place."""
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
    """Put a node at the top of the heap and move it down to its place."""
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
