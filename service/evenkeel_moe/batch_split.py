"""Splits the tokens of one layer of one batch over the replicas of their experts.

`split_tokens` divides the tokens of an expert freely, so that the fullest rank has as few tokens as
possible (LPLB). `choose_replicas` keeps them together on one replica, so that no rank has many
active experts, which are those with tokens. When decode is limited by reading weights, the time of
a rank follows their number: a second replica would be read as well (METRO).

Both find a flow from experts to ranks under a peak that starts at a lower bound. Experts are
admitted one by one. If an expert finds no rank below the peak, a breadth-first search looks for a
chain of experts that can each pass load on to another of their ranks and so make room. If there is
no chain either, every rank the search visited is full of load that cannot leave these ranks. That
load and the rest of the expert, shared evenly over them, is a lower bound too, and the peak rises
to it (a Newton step on the cut). So the peak never passes the optimum, and it is reached.

Equal inputs give equal results on any machine, so ranks that hold the same counts agree. `dispatch`
runs these kernels for an engine and `planning.problem.token_split` for the planner, so the planner
scores exactly the split that the engine will use. Neither may import the other, which is why the
kernels are here.

Source: deepseek-ai/LPLB for the first objective, METRO (arXiv 2512.09277) for the second; Harvey,
    Ladner, Lovasz and Tamir, "Semi-matchings for bipartite graphs and load balancing", for the
    augmenting paths.
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
def list_layers(
    phy2log: NDArray[np.int32], num_experts: int, num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return what `split_tokens` needs of every layer of (L, S) slots.

    Returns:
        (L, E) and (L, S) the lists of `slots_by_expert`, and (L, E) the experts of each layer in
        the order in which they are admitted: those on the fewest ranks, which have the least
        choice, come first.
    """
    layers, slots = phy2log.shape
    first = np.empty((layers, num_experts), np.int64)
    following = np.empty((layers, slots), np.int64)
    order = np.empty((layers, num_experts), np.int64)
    ranks_of = np.empty(num_experts, np.int64)
    for layer in range(layers):
        first[layer], following[layer] = slots_by_expert(phy2log[layer], num_experts, num_ranks)
        # A counting sort by the number of ranks.
        start = np.zeros(num_ranks + 2, np.int64)
        for expert in range(num_experts):
            ranks_of[expert] = 0
            slot = first[layer, expert]
            while slot >= 0:
                ranks_of[expert] += 1
                slot = following[layer, slot]
            start[ranks_of[expert] + 1] += 1
        start = start.cumsum()
        for expert in range(num_experts):
            order[layer, start[ranks_of[expert]]] = expert
            start[ranks_of[expert]] += 1
    return first, following, order


@kernel
def split_tokens(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    order: NDArray[np.int64],
    whole: bool,
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
) -> float:
    """Split the tokens of one layer of one batch with the least load on the fullest rank.

    Args:
        load: (E,) [tokens] - finite, not negative; whole numbers if `whole`. Tokens of an expert
            without a replica are ignored.
        phy2log: (S,) logical expert of each slot, negative if empty.
        first, following, order: the layer in `list_layers` of it.
        whole: True keeps tokens whole; the peak is then the least possible for whole tokens.
        flow: (S,) receives the tokens of each slot. Of several copies on one rank the first one
            gets all.
        used: (R,) [tokens] that each rank has already; receives its load after the split.

    Returns:
        The load of the fullest rank: the least possible for this placement.
    """
    ranks = used.shape[0]
    rank_of = _ranks_of_slots(phy2log.shape[0], ranks)
    flow[:] = 0.0
    shared = order[_place_fixed(load, first, following, order, rank_of, flow, used) :]
    total = used.sum()
    for expert in shared:
        total += load[expert]
    # Whole tokens have no rounding errors, so half a token separates full from not full.
    slack = 0.5 if whole else 1e-13 * total
    peak = max(total / ranks, used.max())
    peak = np.ceil(peak) if whole else peak
    scratch = np.empty((3, ranks), np.int64)
    through, source, queue = scratch[0], scratch[1], scratch[2]
    for expert in shared:
        left = _fill(load[expert], first[expert], following, rank_of, peak, whole, flow, used)
        while left > slack:
            rank, reached = _find_room(
                expert, phy2log, first, following, rank_of, flow, used, peak, slack, through,
                source, queue,
            )  # fmt: skip
            if rank >= 0:
                left -= _push(rank, left, peak, rank_of, through, source, flow, used)
            else:
                # Twice the slack makes room for what is left in any case.
                rise = max(left / reached, 2.0 * slack)
                peak += np.ceil(rise) if whole else rise
        flow[first[expert]] += left
        used[rank_of[first[expert]]] += left
    return float(used.max())


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
    """Choose one replica for every active expert of one layer of one batch.

    The heaviest expert comes first, and goes to the rank with the fewest tokens among its ranks
    below the peak. So tokens break ties only: their largest sum is low but not the least possible,
    which would be hard to find.

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
    rank_of = _ranks_of_slots(phy2log.shape[0], ranks)
    active[:] = 0
    tokens[:] = 0.0
    chosen[:] = -1
    shared = _place_active(load, first, following, rank_of, active, tokens, chosen)
    peak = max(active.max(), -(-(active.sum() + shared.shape[0]) // ranks))
    # (S,) 1 where a slot serves an expert that may move.
    serves = np.zeros(phy2log.shape[0], np.int64)
    scratch = np.empty((3, ranks), np.int64)
    through, source, queue = scratch[0], scratch[1], scratch[2]
    for expert in shared:
        slot = _lightest(first[expert], following, rank_of, peak, active, tokens)
        rank = -1
        if slot < 0:
            rank, _ = _find_room(
                expert, phy2log, first, following, rank_of, serves, active, peak, 0, through,
                source, queue,
            )  # fmt: skip
            if rank < 0:
                peak += 1
                slot = _lightest(first[expert], following, rank_of, peak, active, tokens)
        if slot >= 0:
            # A chain of one.
            rank = rank_of[slot]
            through[rank], source[rank] = slot, -1
        _push(rank, 1, peak, rank_of, through, source, serves, active)
        _note_chain(rank, load, phy2log, rank_of, through, source, tokens, chosen)
    return int(peak)


@kernel
def _ranks_of_slots(slots: int, ranks: int) -> NDArray[np.int64]:
    """Return the (S,) rank of each slot: looked up often, and a division takes longer."""
    per_rank = slots // ranks
    rank_of = np.empty(slots, np.int64)
    for rank in range(ranks):
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            rank_of[slot] = rank
    return rank_of


@kernel
def _place_fixed(
    load: NDArray[np.float64],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    order: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
) -> int:
    """Place the experts on one rank, which come first in the order; return the number of these.

    Experts without a replica, which come even before, count too.
    """
    fixed = 0
    for expert in order:
        slot = first[expert]
        if slot >= 0:
            if following[slot] >= 0:
                break
            tokens = load[expert]
            flow[slot] = tokens
            used[rank_of[slot]] += tokens
        fixed += 1
    return fixed


@kernel
def _place_active(
    load: NDArray[np.float64],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Place the active experts that are on one rank; return the others, the heaviest first."""
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
        active[rank_of[slot]] += 1
        tokens[rank_of[slot]] += load[expert]
    return shared[np.argsort(weight[:found], kind="mergesort")]


@kernel
def _fill(
    wanted: float,
    first: int,
    following: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    peak: float,
    whole: bool,
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
) -> float:
    """Split the tokens of an expert over its ranks in proportion to their room; return the rest."""
    room = 0.0
    slot = first
    while slot >= 0:
        room += max(peak - used[rank_of[slot]], 0.0)
        slot = following[slot]
    part = min(wanted / room, 1.0) if room > 0.0 else 0.0
    left = wanted
    slot = first
    while slot >= 0:
        rank = rank_of[slot]
        amount = max(peak - used[rank], 0.0) * part
        amount = min(np.ceil(amount) if whole else amount, left)
        flow[slot] += amount
        used[rank] += amount
        left -= amount
        slot = following[slot]
    return float(left)


@kernel
def _lightest(
    slot: int,
    following: NDArray[np.int64],
    rank_of: NDArray[np.int64],
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
        rank = rank_of[slot]
        if active[rank] < peak and (best < 0 or tokens[rank] < fewest):
            best, fewest = slot, tokens[rank]
        slot = following[slot]
    return best


@kernel
def _find_room(
    expert: int,
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    flow: NDArray[np.float64] | NDArray[np.int64],
    used: NDArray[np.float64] | NDArray[np.int64],
    peak: float,
    slack: float,
    through: NDArray[np.int64],
    source: NDArray[np.int64],
    queue: NDArray[np.int64],
) -> tuple[int, int]:
    """Search breadth first, from the ranks that hold an expert, for a rank below the peak.

    `through[r]` is the slot of r that would take load, -1 if r was not reached. `source[r]` is the
    slot of the same expert on another rank that would pass this load on; -1: it is the new load.

    Returns:
        The rank with room, or -1, and the number of ranks reached.
    """
    per_rank = phy2log.shape[0] // used.shape[0]
    through[:] = -1
    head = tail = full = 0
    taker, passed_on = expert, -1
    held = last = 0
    while True:
        slot = first[taker]
        while slot >= 0:
            rank = rank_of[slot]
            if through[rank] < 0:
                through[rank], source[rank] = slot, passed_on
                queue[tail] = rank
                tail += 1
                if used[rank] < peak - slack:
                    return rank, tail
            slot = following[slot]
        # The next expert that a rank which was reached could pass on. All ranks of the expert that
        # would enter this rank were reached with it.
        passed_on = -1
        while passed_on < 0:
            if held == last:
                if head == tail:
                    return -1, tail
                full = queue[head]
                head += 1
                held, last = full * per_rank, (full + 1) * per_rank
            if flow[held] > slack and phy2log[held] != phy2log[through[full]]:
                passed_on, taker = held, phy2log[held]
            held += 1


@kernel
def _push(
    rank: int,
    wanted: float,
    peak: float,
    rank_of: NDArray[np.int64],
    through: NDArray[np.int64],
    source: NDArray[np.int64],
    flow: NDArray[np.float64] | NDArray[np.int64],
    used: NDArray[np.float64] | NDArray[np.int64],
) -> float:
    """Push as much as fits along the chain that ends in `rank`; return the amount."""
    amount = min(wanted, peak - used[rank])
    last = rank
    while source[last] >= 0:
        amount = min(amount, flow[source[last]])
        last = rank_of[source[last]]
    used[rank] += amount
    while source[rank] >= 0:
        flow[through[rank]] += amount
        flow[source[rank]] -= amount
        rank = rank_of[source[rank]]
    flow[through[rank]] += amount
    return float(amount)


@kernel
def _note_chain(
    rank: int,
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    rank_of: NDArray[np.int64],
    through: NDArray[np.int64],
    source: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> None:
    """Write to `tokens` and `chosen` that every expert of a chain was pushed one rank on."""
    while True:
        slot = through[rank]
        moved = phy2log[slot]
        chosen[moved] = slot
        tokens[rank] += load[moved]
        if source[rank] < 0:
            return
        rank = rank_of[source[rank]]
        tokens[rank] -= load[moved]
