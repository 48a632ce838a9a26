"""Libra's replication planning: the experts that each rank copies from others.

Algorithm 1 has two phases. First each rank takes the experts of other ranks that its own tokens
choose most. Then the fullest rank is relieved: its hottest remote expert goes to the rank with the
least load. It ends at the first refusal, often with room to spare. The refined form replaces the
second phase and uses all room.

`dispatch.libra_replicas` plans the experts of one batch with it, `planning.policies.libra` a
placement. Neither may import the other, which is why the kernels are here.

Source: Libra, section 3.2 and Algorithm 1.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel


@kernel
def plan_copies(
    demand: NDArray[np.float64],
    resident: NDArray[np.bool_],
    room: NDArray[np.int64],
    locality: float,
    refined: bool,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Choose the experts that each rank copies.

    Args:
        demand: (R, E) [tokens] that start on each rank and choose each expert.
        resident: (E, R) True if the rank holds the expert already; every expert is on one rank at
            least. Residents compute the tokens of ranks without a copy, in equal parts.
        room: (R,) copies that each rank may take.
        locality: share of the room that phase 1 may use.
        refined: True replaces phase 2 as printed by `_spread_remote`.

    Returns:
        (E, R) True where a rank holds an expert afterwards, and (R, N) int64 the experts copied in
        the order chosen, -1 after the last; N is the most room of a rank.

    Order: more tokens first, then the lower expert id; among target ranks less load first, then the
    lower rank.
    """
    ranks, experts = demand.shape
    hosts = resident.copy()
    extra = np.full((ranks, max(room.max(), 0)), -1, np.int64)
    taken = np.zeros(ranks, np.int64)
    passes = 0
    for rank in range(ranks):
        local = int(room[rank] * locality)
        passes += room[rank] - local
        for _ in range(local):
            best = -1
            for e in range(experts):
                if not hosts[e, rank] and (best < 0 or demand[rank, e] > demand[rank, best]):
                    best = e
            if best < 0 or demand[rank, best] <= 0.0:
                break
            _copy(best, rank, hosts, extra, taken)
    if refined:
        _spread_remote(demand, room, hosts, extra, taken)
    else:
        _relieve_fullest(demand, resident, room, passes, hosts, extra, taken)
    return hosts, extra


@kernel
def _copy(
    expert: int,
    rank: int,
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Give a rank a copy of an expert."""
    hosts[expert, rank] = True
    extra[rank, taken[rank]] = expert
    taken[rank] += 1


@kernel
def _relieve_fullest(
    demand: NDArray[np.float64],
    resident: NDArray[np.bool_],
    room: NDArray[np.int64],
    passes: int,
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Run lines 7 to 19 of Algorithm 1. They try one expert and one rank at a time.

    Where line 15 refuses that pair, nothing changes, so every later pass would refuse it too.
    """
    ranks, experts = demand.shape
    load = np.zeros(ranks)
    # (R, E) what each rank computes for others.
    remote = np.zeros((ranks, experts))
    for e in range(experts):
        away = 0.0
        for rank in range(ranks):
            if hosts[e, rank]:
                load[rank] += demand[rank, e]
            else:
                away += demand[rank, e]
        share = away / resident[e].sum()
        for rank in range(ranks):
            if resident[e, rank]:
                remote[rank, e] = share
                load[rank] += share
    target = load.sum() / ranks
    for _ in range(passes):
        source = int(np.argmax(load))
        if load[source] <= target:
            return
        e = int(np.argmax(remote[source]))
        if remote[source, e] <= 0.0:
            return
        goal = -1
        for rank in range(ranks):
            free = not hosts[e, rank] and taken[rank] < room[rank]
            if free and (goal < 0 or load[rank] < load[goal]):
                goal = rank
        if goal < 0 or load[goal] + demand[goal, e] > target:
            return
        _copy(e, goal, hosts, extra, taken)
        # The own tokens of the new host were split evenly over the residents.
        share = demand[goal, e] / resident[e].sum()
        load[goal] += demand[goal, e]
        for rank in range(ranks):
            if resident[e, rank]:
                remote[rank, e] -= share
                load[rank] -= share


@kernel
def _spread_remote(
    demand: NDArray[np.float64],
    room: NDArray[np.int64],
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Copy the experts with the most remote tokens per host to the ranks with the fewest copies."""
    ranks, experts = demand.shape
    away = np.zeros(experts)
    count = np.zeros(experts, np.int64)
    for e in range(experts):
        for rank in range(ranks):
            if hosts[e, rank]:
                count[e] += 1
            else:
                away[e] += demand[rank, e]
    while True:
        best = -1
        for e in range(experts):
            if away[e] > 0.0 and (best < 0 or away[e] * count[best] > away[best] * count[e]):
                best = e
        if best < 0:
            return
        goal = -1
        for rank in range(ranks):
            free = not hosts[best, rank] and taken[rank] < room[rank]
            if free and (goal < 0 or taken[rank] < taken[goal]):
                goal = rank
        if goal < 0:
            away[best] = 0.0
            continue
        _copy(best, goal, hosts, extra, taken)
        count[best] += 1
        away[best] -= demand[goal, best]
