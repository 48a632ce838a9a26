"""Chooses one replica for every active expert of a batch, so that no rank has many active experts.

An expert is active if the batch routes tokens to it. When decode is limited by reading weights, the
time of a rank follows its number of active experts, so the peak that counts is the largest number
on one rank. All tokens of an expert go to one replica: a second one would be read as well.

This is an assignment of unit jobs (active experts) to machines (ranks), of which each job may use
only some. Experts are assigned one by one under a peak that starts at a lower bound, the heaviest
first, each to the rank with the fewest tokens among its ranks below the peak. If there is none, a
breadth-first search looks for a chain of experts that can each move on to another of their ranks
and so make room. If there is no chain either, every rank the search visited holds as many experts
as the peak allows, none of which can leave these ranks, so the peak must rise by one. So the peak
never passes the optimum, and it is reached. The tokens of a rank only break ties: their largest sum
is low but not the least possible, which would be hard to find.

`dispatch.fewest` runs this for an engine and `planning.problem.fewest_split` for the planner. Both
call the same kernels, so the planner scores exactly the replicas that the engine will use. Neither
may import the other, which is why the kernels are here.

Source: METRO (arXiv 2512.09277) for the objective; Harvey, Ladner, Lovasz and Tamir,
    "Semi-matchings for bipartite graphs and load balancing", for the augmenting paths.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel


@kernel
def slots_by_expert(
    phy2log: NDArray[np.int32], num_experts: int, num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots of each expert as linked lists, one slot for each rank that holds it.

    Args:
        phy2log: (S,) logical expert of each slot of one layer, negative if empty.
        num_experts: E.
        num_ranks: R.

    Returns:
        (E,) the first slot of each expert and (S,) the next slot of the same expert on a later
        rank; -1: none. Of several copies on one rank the list has the first.
    """
    per_rank = phy2log.shape[0] // num_ranks
    first = np.full(num_experts, -1, np.int64)
    following = np.full(phy2log.shape[0], -1, np.int64)
    for slot in range(phy2log.shape[0] - 1, -1, -1):
        expert = phy2log[slot]
        if expert < 0:
            continue
        head = first[expert]
        if head >= 0 and head // per_rank == slot // per_rank:
            head = following[head]
        following[slot] = head
        first[expert] = slot
    return first, following


@kernel
def choose_replicas(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> int:
    """Choose the replica of every active expert of one layer of one batch.

    Equal inputs give equal choices on any machine, so ranks that hold the same counts agree.

    Args:
        load: (E,) [tokens] - finite; an expert with more than 0 is active.
        phy2log: (S,) logical expert of each slot, negative if empty.
        first, following: `slots_by_expert` of it.
        active: (R,) receives the active experts of each rank.
        tokens: (R,) receives the tokens of each rank.
        chosen: (E,) receives the slot of each active expert; -1 for others, and for an expert
            without a replica.

    Returns:
        The largest number of active experts of a rank: the least possible for this placement.
    """
    ranks = active.shape[0]
    per_rank = phy2log.shape[0] // ranks
    shared = _place_fixed(load, first, following, per_rank, active, tokens, chosen)
    peak = max(active.max(), -(-(active.sum() + shared.shape[0]) // ranks))
    through = np.empty(ranks, np.int64)
    queue = np.empty(ranks, np.int64)
    for expert in shared:
        slot = _lightest(first[expert], following, per_rank, peak, active, tokens)
        if slot < 0:
            free = _reach_room(
                expert, phy2log, first, following, chosen, peak, active, through, queue
            )
            if free >= 0:
                _shift(expert, free, load, phy2log, per_rank, through, active, tokens, chosen)
                continue
            peak += 1
            slot = _lightest(first[expert], following, per_rank, peak, active, tokens)
        chosen[expert] = slot
        active[slot // per_rank] += 1
        tokens[slot // per_rank] += load[expert]
    return int(peak)


@kernel
def _place_fixed(
    load: NDArray[np.float64],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    per_rank: int,
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Place the active experts that are on one rank; return the others, the heaviest first."""
    active[:] = 0
    tokens[:] = 0.0
    chosen[:] = -1
    shared = np.empty(load.shape[0], np.int64)
    weight = np.empty(load.shape[0])
    found = 0
    for expert in range(load.shape[0]):
        slot = first[expert]
        # Not `<= 0`, which is false for NaN.
        if not load[expert] > 0 or slot < 0:
            continue
        if following[slot] >= 0:
            shared[found] = expert
            weight[found] = -float(load[expert])
            found += 1
            continue
        chosen[expert] = slot
        active[slot // per_rank] += 1
        tokens[slot // per_rank] += load[expert]
    return shared[np.argsort(weight[:found], kind="mergesort")]


@kernel
def _lightest(
    slot: int,
    following: NDArray[np.int64],
    per_rank: int,
    peak: int,
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
) -> int:
    """Return the slot, of a list that starts at `slot`, on the rank with the fewest tokens.

    Only ranks with fewer active experts than the peak count; -1 if there is none. Of equal ranks
    the first one is taken.
    """
    best = -1
    fewest = 0.0
    while slot >= 0:
        rank = slot // per_rank
        if active[rank] < peak and (best < 0 or tokens[rank] < fewest):
            best, fewest = slot, tokens[rank]
        slot = following[slot]
    return best


@kernel
def _reach_room(
    expert: int,
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    chosen: NDArray[np.int64],
    peak: int,
    active: NDArray[np.int64],
    through: NDArray[np.int64],
    queue: NDArray[np.int64],
) -> int:
    """Search breadth first, from the ranks that hold an expert, for a rank below the peak.

    `through[r]` is the slot of r that would take its expert over from another rank, or the new
    expert.

    Returns:
        The rank with room, or -1.
    """
    per_rank = phy2log.shape[0] // active.shape[0]
    through[:] = -1
    head = tail = 0
    taker = expert
    held = last = 0
    while True:
        slot = first[taker]
        while slot >= 0:
            rank = slot // per_rank
            if through[rank] < 0:
                through[rank] = slot
                if active[rank] < peak:
                    return int(rank)
                queue[tail] = rank
                tail += 1
            slot = following[slot]
        # The next expert that could leave a rank which was reached.
        taker = -1
        while taker < 0:
            if held == last:
                if head == tail:
                    return -1
                held = queue[head] * per_rank
                last = held + per_rank
                head += 1
            if phy2log[held] >= 0 and chosen[phy2log[held]] == held:
                taker = phy2log[held]
            held += 1


@kernel
def _shift(
    expert: int,
    free: int,
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    per_rank: int,
    through: NDArray[np.int64],
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> None:
    """Move every expert of the chain that ends in `free` one rank on, and place `expert`."""
    active[free] += 1
    rank = free
    while True:
        slot = through[rank]
        moved = phy2log[slot]
        before = chosen[moved]
        chosen[moved] = slot
        tokens[rank] += load[moved]
        if moved == expert:
            return
        rank = before // per_rank
        tokens[rank] -= load[moved]
