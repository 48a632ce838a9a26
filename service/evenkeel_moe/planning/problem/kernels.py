"""Numba bodies of the planner: loops over arrays, no checks, no types of the model.

Callers validate. Every kernel has a slow numpy twin in the tests. All run on one thread, without
fastmath, so the same input gives the same bytes on any machine. They release the GIL.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel

__all__ = [
    "TILE_SLACK",
    "balancedness_kernel",
    "inlined",
    "kernel",
    "optimal_split_kernel",
    "nearest_shares_kernel",
    "rank_load_kernel",
    "step_times_kernel",
    "token_cost",
]

TILE_SLACK = 1e-9
"""Tiles a load may overrun a stair by before it pays for the next: hides rounding of even splits."""


@kernel
def token_cost(
    tokens: float,
    rank: int,
    tile: float,
    tile_seconds: NDArray[np.float64],
    slope: NDArray[np.float64],
) -> float:
    """C_r(n) of `problem.CostCurves`; tile 0 means C_r(n) = n. See `metrics.cost_arrays`."""
    if tile == 0.0:
        return tokens
    if tokens <= 0.0:
        return 0.0
    tiles = tile_seconds.shape[1]
    stair = int(np.ceil(tokens / tile - TILE_SLACK))
    if stair < 1:
        stair = 1
    if stair <= tiles:
        return float(tile_seconds[rank, stair - 1])
    return float(tile_seconds[rank, tiles - 1] + slope[rank] * (tokens - tiles * tile))


@kernel
def rank_load_kernel(
    load: NDArray[np.float64] | NDArray[np.uint32],
    phy2log: NDArray[np.int32],
    shares: NDArray[np.float64],
    num_ranks: int,
) -> NDArray[np.float64]:
    """(T, L, E) load, (L, S) experts and shares -> (T, L, R) rank load."""
    steps, layers, _ = load.shape
    per_rank = phy2log.shape[1] // num_ranks
    out = np.zeros((steps, layers, num_ranks))
    for t in range(steps):
        for layer in range(layers):
            tokens, experts, share = load[t, layer], phy2log[layer], shares[layer]
            # Unsigned: of a signed index numba would ask whether it counts from the end.
            slot = np.uint64(0)
            for rank in range(num_ranks):
                total = 0.0
                for _ in range(per_rank):
                    expert = experts[slot]
                    if expert >= 0:
                        total += tokens[np.uint64(expert)] * share[slot]
                    slot += np.uint64(1)
                out[t, layer, rank] = total
    return out


@kernel
def step_times_kernel(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    shares: NDArray[np.float64],
    num_ranks: int,
    tile: float,
    tile_seconds: NDArray[np.float64],
    slope: NDArray[np.float64],
) -> NDArray[np.float64]:
    """(T, L) seconds: the slowest rank of every step and layer, without storing rank loads."""
    steps, layers, _ = load.shape
    per_rank = phy2log.shape[1] // num_ranks
    out = np.zeros((steps, layers))
    for t in range(steps):
        for layer in range(layers):
            slot = 0
            worst = 0.0
            for rank in range(num_ranks):
                total = 0.0
                for _ in range(per_rank):
                    expert = phy2log[layer, slot]
                    if expert >= 0:
                        total += load[t, layer, expert] * shares[layer, slot]
                    slot += 1
                cost = token_cost(total, rank, tile, tile_seconds, slope)
                if cost > worst:
                    worst = cost
            out[t, layer] = worst
    return out


@kernel
def balancedness_kernel(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, R) rank load -> (N,) mean / max, NaN where nothing was routed."""
    rows, ranks = rank_load.shape
    out = np.empty(rows)
    for row in range(rows):
        total = 0.0
        worst = 0.0
        for rank in range(ranks):
            total += rank_load[row, rank]
            if rank_load[row, rank] > worst:
                worst = rank_load[row, rank]
        # A mean never exceeds the maximum; only rounding could make it.
        out[row] = min(total / ranks / worst, 1.0) if worst > 0.0 else np.nan
    return out


@kernel
def nearest_shares_kernel(
    phy2log: NDArray[np.int32],
    node_of_rank: NDArray[np.int64],
    source: NDArray[np.float64],
    num_experts: int,
) -> NDArray[np.float64]:
    """(L, S) share of its expert's tokens each slot receives when sources pick the nearest replica.

    source: (R, L, E) tokens routed by each source rank; an expert no rank routed to counts as even.
    """
    layers, slots = phy2log.shape
    ranks = node_of_rank.shape[0]
    per_rank = slots // ranks
    shares = np.zeros((layers, slots))
    holders = np.empty((num_experts, slots), np.int64)
    count = np.empty(num_experts, np.int64)
    for layer in range(layers):
        count[:] = 0
        for slot in range(slots):
            expert = phy2log[layer, slot]
            if expert >= 0:
                holders[expert, count[expert]] = slot
                count[expert] += 1
        for expert in range(num_experts):
            copies = count[expert]
            total = 0.0
            for rank in range(ranks):
                total += source[rank, layer, expert]
            for rank in range(ranks):
                weight = source[rank, layer, expert] / total if total > 0.0 else 1.0 / ranks
                if weight == 0.0:
                    continue
                own = 0
                near = 0
                for i in range(copies):
                    holder = holders[expert, i] // per_rank
                    own += holder == rank
                    near += node_of_rank[holder] == node_of_rank[rank]
                for i in range(copies):
                    holder = holders[expert, i] // per_rank
                    if own > 0:
                        part = 1.0 / own if holder == rank else 0.0
                    elif near > 0:
                        part = 1.0 / near if node_of_rank[holder] == node_of_rank[rank] else 0.0
                    else:
                        part = 1.0 / copies
                    shares[layer, holders[expert, i]] += weight * part
    return shares


@kernel
def _reach_free_rank(
    expert: int,
    phy2log: NDArray[np.int32],
    flow: NDArray[np.float64],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    used: NDArray[np.float64],
    peak: float,
    slack: float,
    parent: NDArray[np.int64],
    through: NDArray[np.int64],
    queue: NDArray[np.int64],
) -> tuple[int, int]:
    """Breadth-first search from an expert's holders over ranks that could pass load on.

    Returns (rank with room or -1, number of ranks visited). `parent[r]` is the rank that would pass
    load on to r (-1: r takes it straight from the expert), `through[r]` the slot of r that takes it.
    """
    per_rank = phy2log.shape[0] // used.shape[0]
    parent[:] = -2
    tail = 0
    slot = first[expert]
    while slot >= 0:
        rank = slot // per_rank
        if parent[rank] == -2:
            parent[rank] = -1
            through[rank] = slot
            queue[tail] = rank
            tail += 1
        slot = following[slot]
    head = 0
    while head < tail:
        rank = queue[head]
        head += 1
        if used[rank] < peak - slack:
            return rank, tail
        for held in range(rank * per_rank, (rank + 1) * per_rank):
            if phy2log[held] < 0 or flow[held] <= slack:
                continue
            slot = first[phy2log[held]]
            while slot >= 0:
                other = slot // per_rank
                if parent[other] == -2:
                    parent[other] = rank
                    through[other] = slot
                    queue[tail] = other
                    tail += 1
                slot = following[slot]
    return -1, tail


@kernel
def _slot_on_rank(
    expert: int, rank: int, per_rank: int, first: NDArray[np.int64], following: NDArray[np.int64]
) -> int:
    """First slot of `rank` that holds `expert`."""
    slot = first[expert]
    while slot // per_rank != rank:
        slot = following[slot]
    return int(slot)


@kernel
def _split_one(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    num_ranks: int,
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
) -> None:
    """Fill `flow` (S,) and `used` (R,) with a split of (E,) load whose largest rank load is least.

    Experts are admitted one by one under a peak that starts at a lower bound. When an expert finds no
    rank with room, every rank the search visited is full of load that can go nowhere else, so the
    left-over shared among those ranks is a lower bound too: the peak rises to it. It never passes the
    optimum, and at the end it is reached.
    """
    slots = phy2log.shape[0]
    per_rank = slots // num_ranks
    first = np.full(load.shape[0], -1, np.int64)
    following = np.full(slots, -1, np.int64)
    for slot in range(slots - 1, -1, -1):
        if phy2log[slot] >= 0:
            following[slot] = first[phy2log[slot]]
            first[phy2log[slot]] = slot
    flow[:] = 0.0
    used[:] = 0.0
    for expert in range(load.shape[0]):
        slot = first[expert]
        if slot >= 0 and following[slot] < 0:
            flow[slot] = load[expert]
            used[slot // per_rank] += load[expert]
    peak = max(load.sum() / num_ranks, used.max())
    slack = 1e-12 * load.sum()
    parent = np.empty(num_ranks, np.int64)
    through = np.empty(num_ranks, np.int64)
    queue = np.empty(num_ranks, np.int64)
    for expert in range(load.shape[0]):
        if first[expert] < 0 or following[first[expert]] < 0:
            continue
        left = load[expert]
        while left > slack:
            rank, visited = _reach_free_rank(
                expert, phy2log, flow, first, following, used, peak, slack, parent, through, queue
            )
            if rank < 0:
                peak += left / visited + slack
                continue
            amount = min(left, peak - used[rank])
            walk = rank
            while parent[walk] >= 0:
                moved = phy2log[through[walk]]
                amount = min(
                    amount, flow[_slot_on_rank(moved, parent[walk], per_rank, first, following)]
                )
                walk = parent[walk]
            used[rank] += amount
            walk = rank
            while parent[walk] >= 0:
                moved = phy2log[through[walk]]
                flow[through[walk]] += amount
                flow[_slot_on_rank(moved, parent[walk], per_rank, first, following)] -= amount
                walk = parent[walk]
            flow[through[walk]] += amount
            left -= amount
        flow[first[expert]] += left
        used[first[expert] // per_rank] += left


@kernel
def optimal_split_kernel(
    load: NDArray[np.float64], phy2log: NDArray[np.int32], num_ranks: int
) -> NDArray[np.float64]:
    """(T, L, E) load -> (T, L, S) tokens per slot under the split with the least peak, batch by batch."""
    steps, layers, _ = load.shape
    out = np.zeros((steps, layers, phy2log.shape[1]))
    used = np.zeros(num_ranks)
    for t in range(steps):
        for layer in range(layers):
            _split_one(load[t, layer], phy2log[layer], num_ranks, out[t, layer], used)
    return out
