"""Decides how many copies each expert gets and each rank holds, and packs copies into ranks.

1. `replicate_experts`: a redundant slot goes to the expert with the most load per copy.
2. `interleaved_capacity`: over all layers, ranks differ by at most one copy.
3. `pack_copies`: copies are packed heaviest first, into the cheapest rank. Unlike in EPLB, they
   need not divide over the ranks and ranks may differ in speed. No rank gets a second copy of an
   expert if passing another copy on can avoid it.

Source: deepseek-ai/EPLB eplb.py@d52c72d, replication step; CRAFT section 4.2.2, capacity-aware
greedy placement, and Algorithm 3.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY
from evenkeel_moe.model.topology import Topology


def replicate_experts(
    weight: NDArray[np.float32], num_slots: int, max_copies: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Give every expert one slot, and each further slot to the expert with the most load per copy.

    Args:
        weight: (X, n) float32 [tokens] - load of n experts in each of X rows (layers, or layers x
            nodes).
        num_slots: slots to fill in every row.
        max_copies: most copies of one expert; None for no bound.

    Returns:
        logical: (X, num_slots) int32 - slots 0..n-1 hold expert 0..n-1, then follow the redundant
            copies in the order they were given; EMPTY once every expert has `max_copies`.
        logcnt: (X, n) int32 - copies of each expert.

    Raises:
        InfeasiblePlan: fewer slots than experts.

    Order: the lower expert id wins a tie; at zero load the expert with the fewest copies.
    """
    if num_slots < weight.shape[1]:
        raise InfeasiblePlan(
            f"{num_slots} slots cannot hold one copy each of {weight.shape[1]} experts",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    bound = num_slots if max_copies is None else max_copies
    return _replicate(np.ascontiguousarray(weight, np.float32), num_slots, bound)


@kernel
def _replicate(
    weight: NDArray[np.float32], num_slots: int, max_copies: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    rows, experts = weight.shape
    logical = np.full((rows, num_slots), np.int32(EMPTY), np.int32)
    logcnt = np.ones((rows, experts), np.int32)
    # A complete binary tree over the experts. Each node names the expert below it that comes first,
    # and the leaves are the second half.
    leaves = 1
    while leaves < experts:
        leaves *= 2
    tree = np.arange(2 * leaves) - leaves
    copies = np.empty(leaves, np.int32)
    # Load per copy; -1 marks an expert that may get no further copy.
    per_copy = np.full(leaves, np.float32(-1.0), np.float32)
    for row in range(rows):
        copies[:] = 1
        for expert in range(experts):
            logical[row, expert] = expert
            per_copy[expert] = weight[row, expert] if max_copies > 1 else np.float32(-1.0)
        for node in range(leaves - 1, 0, -1):
            tree[node] = _first(tree[2 * node], tree[2 * node + 1], per_copy, copies)
        for slot in range(experts, num_slots):
            best = tree[1]
            if per_copy[best] < 0:
                break
            logical[row, slot] = best
            copies[best] += 1
            if copies[best] >= max_copies:
                per_copy[best] = np.float32(-1.0)
            else:
                per_copy[best] = weight[row, best] / np.float32(copies[best])
            node = (leaves + best) // 2
            while node > 0:
                tree[node] = _first(tree[2 * node], tree[2 * node + 1], per_copy, copies)
                node //= 2
        logcnt[row] = copies[:experts]
    return logical, logcnt


@kernel
def _first(low: int, high: int, per_copy: NDArray[np.float32], copies: NDArray[np.int32]) -> int:
    """Return the one of two experts that gets a copy before the other; `low` has the lower id.

    Where no load is left to divide, it is the one with fewer copies, or one expert would get every
    slot.
    """
    if per_copy[low] != per_copy[high]:
        return low if per_copy[low] > per_copy[high] else high
    if per_copy[low] == 0:
        return low if copies[low] <= copies[high] else high
    return low


def interleaved_capacity(copies: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """Spread every layer's copies over the ranks.

    Copies that do not divide over the ranks are odd. The first objective gives an odd copy to a
    rank that holds the fewest over all layers so far. The second spreads the odd copies of a layer
    evenly over nodes and ranks.

    Args:
        copies: (L,) copies each layer holds, at least 0, first copies included.
        topology: names the node of each rank.

    Returns:
        (L, R) int64; inside a layer ranks differ by at most one, and so do their sums over layers.

    Order: of n tied ranks in node order, k are taken at positions i * n // k. The paper's Figure 7
    shows this (ranks 0 and 2 of 4 for the first layer); its pseudo-code would take both ends (0 and
    3).
    """
    ranks = topology.num_ranks
    node_order = np.argsort(np.array(topology.node_of_rank), kind="stable")
    base = copies // ranks
    capacity = np.repeat(base[:, None], ranks, axis=1).astype(np.int64)
    held = np.full(ranks, int(base.sum()), np.int64)
    for layer, odd in enumerate(copies - base * ranks):
        if odd == 0:
            continue
        cutoff = np.sort(held)[odd - 1]
        below = np.nonzero(held < cutoff)[0]
        tied = node_order[held[node_order] == cutoff]
        wanted = odd - len(below)
        chosen = np.concatenate([below, tied[np.arange(wanted) * len(tied) // wanted]])
        capacity[layer, chosen] += 1
        held[chosen] += 1
    return capacity


def pack_copies(
    load: NDArray[np.float64],
    logcnt: NDArray[np.int32],
    capacity: NDArray[np.int64],
    slots_per_rank: int,
    rates: NDArray[np.float64] | None = None,
) -> NDArray[np.int32]:
    """Choose the slots of every layer's copies.

    Args:
        load: (L, E) [tokens].
        logcnt: (L, E) copies of each expert, at least one.
        capacity: (L, R) copies a rank may hold in a layer, at most `slots_per_rank`; over all
            ranks at least as many as the layer has copies.
        slots_per_rank: local slots of a layer.
        rates: (R,) cost per token of each rank; None for equal ranks.

    Returns:
        (L, S) int32, EMPTY in unused slots. A copy for which no rank is left is not placed, but
        every expert has one.

    Raises:
        InfeasiblePlan: an expert found no rank.

    Order: the heavier copy first, the lower expert id on a tie; the lower rank on a tie.
    """
    layers, experts = load.shape
    ranks = capacity.shape[1]
    speed = np.ones(ranks) if rates is None else np.ascontiguousarray(rates, np.float64)
    rows = np.empty((layers, ranks * slots_per_rank), np.int32)
    for layer in range(layers):
        rows[layer] = _pack_layer(
            load[layer] / np.maximum(logcnt[layer], 1),
            logcnt[layer].astype(np.int64),
            capacity[layer].astype(np.int64),
            speed,
            slots_per_rank,
        )
        missing = np.bincount(rows[layer] + 1, minlength=experts + 1)[1:] == 0
        if missing.any():
            raise InfeasiblePlan(
                f"layer {layer}: {int(missing.sum())} experts found no rank",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
    return rows


@kernel
def _pack_layer(
    per_copy: NDArray[np.float64],
    copies: NDArray[np.int64],
    capacity: NDArray[np.int64],
    rates: NDArray[np.float64],
    slots_per_rank: int,
) -> NDArray[np.int32]:
    """Return the (S,) slots of one layer; `per_copy` is the (E,) load per copy of each expert."""
    experts, ranks = per_copy.shape[0], capacity.shape[0]
    row = np.full(ranks * slots_per_rank, np.int32(-1), np.int32)
    first = np.arange(ranks) * slots_per_rank
    used = np.zeros(ranks, np.int64)
    total = np.zeros(ranks)
    held = np.zeros((experts, ranks), np.bool_)
    for expert in np.argsort(-per_copy, kind="mergesort"):
        for _ in range(copies[expert]):
            best = -1
            least = np.inf
            for rank in range(ranks):
                cost = (total[rank] + per_copy[expert]) * rates[rank]
                if used[rank] < capacity[rank] and not held[expert, rank] and cost < least:
                    least = cost
                    best = rank
            if best < 0:
                _make_room(expert, held, capacity, first, row, used, total, per_copy)
                continue
            row[first[best] + used[best]] = expert
            used[best] += 1
            held[expert, best] = True
            total[best] += per_copy[expert]
    return row


@kernel
def _make_room(
    expert: int,
    held: NDArray[np.bool_],
    capacity: NDArray[np.int64],
    first: NDArray[np.int64],
    row: NDArray[np.int32],
    used: NDArray[np.int64],
    total: NDArray[np.float64],
    weight: NDArray[np.float64],
) -> None:
    """Place an expert that every rank with room holds already.

    Another rank takes it, and passes one of its own copies on to a rank with room. If no rank can,
    the copy is not placed.
    """
    ranks = capacity.shape[0]
    for roomy in range(ranks):
        if used[roomy] >= capacity[roomy]:
            continue
        for rank in range(ranks):
            if rank == roomy or held[expert, rank] or capacity[rank] == 0:
                continue
            for local in range(used[rank]):
                other = row[first[rank] + local]
                if not held[other, roomy]:
                    row[first[rank] + local] = expert
                    row[first[roomy] + used[roomy]] = other
                    used[roomy] += 1
                    held[other, rank], held[other, roomy], held[expert, rank] = False, True, True
                    total[rank] += weight[expert] - weight[other]
                    total[roomy] += weight[other]
                    return
