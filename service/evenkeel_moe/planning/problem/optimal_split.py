"""Splits the load of every batch exactly, so that the fullest rank carries as little as possible.

This is how the planner scores optimal dispatch: (L, S) placements against (T, L, E) windows, with
the split written per slot. `dispatch.split_kernels` solves the same program for an engine, on
structures prepared once per placement and also in whole tokens. Both find the same peak, but among
the splits that reach it they choose different ones. Neither can replace the other without changing
results.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel


@kernel
def optimal_split_kernel(
    load: NDArray[np.float64], phy2log: NDArray[np.int32], num_ranks: int
) -> NDArray[np.float64]:
    """Split (T, L, E) load with the least peak of each batch -> (T, L, S) tokens per slot."""
    steps, layers, _ = load.shape
    out = np.zeros((steps, layers, phy2log.shape[1]))
    used = np.zeros(num_ranks)
    for t in range(steps):
        for layer in range(layers):
            _split_layer(load[t, layer], phy2log[layer], num_ranks, out[t, layer], used)
    return out


@kernel
def _split_layer(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    num_ranks: int,
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
) -> None:
    """Write a split of an (E,) load with the least peak into `flow` (S,) and `used` (R,).

    Experts are admitted one by one under a peak that starts at a lower bound. If an expert finds no
    rank with room, every rank the search visited is full of load that can go nowhere else. The load
    left over, shared among those ranks, is then a lower bound too, and the peak rises to it. The
    peak never passes the optimum, and at the end it is reached.
    """
    first, following = _slots_by_expert(phy2log, load.shape[0])
    per_rank = phy2log.shape[0] // num_ranks
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
            left -= _push(rank, left, peak, phy2log, flow, first, following, used, parent, through)
        flow[first[expert]] += left
        used[first[expert] // per_rank] += left


@kernel
def _slots_by_expert(
    phy2log: NDArray[np.int32], num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (E,) first slot of each expert and the (S,) next slot of the same; -1: none."""
    first = np.full(num_experts, -1, np.int64)
    following = np.full(phy2log.shape[0], -1, np.int64)
    for slot in range(phy2log.shape[0] - 1, -1, -1):
        if phy2log[slot] >= 0:
            following[slot] = first[phy2log[slot]]
            first[phy2log[slot]] = slot
    return first, following


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
    """Search breadth first, from the ranks that hold an expert, for a rank with room.

    Ranks are reached over others that could pass load on. `parent[r]` is the rank that would pass
    load on to r (-1: r takes it straight from the expert), `through[r]` the slot of r that takes
    it.

    Returns:
        The rank with room, or -1, and the number of ranks visited.
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
def _push(
    rank: int,
    wanted: float,
    peak: float,
    phy2log: NDArray[np.int32],
    flow: NDArray[np.float64],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    used: NDArray[np.float64],
    parent: NDArray[np.int64],
    through: NDArray[np.int64],
) -> float:
    """Push as much of `wanted` as fits along the path that ends in `rank`; returns the amount."""
    per_rank = phy2log.shape[0] // used.shape[0]
    amount = min(wanted, peak - used[rank])
    walk = rank
    while parent[walk] >= 0:
        gives = _slot_on_rank(phy2log[through[walk]], parent[walk], per_rank, first, following)
        amount = min(amount, flow[gives])
        walk = parent[walk]
    used[rank] += amount
    walk = rank
    while parent[walk] >= 0:
        flow[through[walk]] += amount
        gives = _slot_on_rank(phy2log[through[walk]], parent[walk], per_rank, first, following)
        flow[gives] -= amount
        walk = parent[walk]
    flow[through[walk]] += amount
    return float(amount)


@kernel
def _slot_on_rank(
    expert: int, rank: int, per_rank: int, first: NDArray[np.int64], following: NDArray[np.int64]
) -> int:
    """Return the first slot of `rank` that holds `expert`."""
    slot = first[expert]
    while slot // per_rank != rank:
        slot = following[slot]
    return int(slot)
