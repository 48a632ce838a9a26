"""Decides how many copies each rank holds of each layer, and packs them into the ranks.

Over all layers, ranks differ by at most one copy. Copies are packed heaviest first, into the
cheapest rank. Unlike in EPLB, they need not divide over the ranks and ranks may differ in speed. No
rank gets a second copy of an expert if passing another copy on can avoid it.

Source: CRAFT section 4.2.2, capacity-aware greedy placement, and Algorithm 3.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.topology import Topology


def interleaved_capacity(copies: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """Spread every layer's copies over the ranks.

    Copies that do not divide over the ranks are odd. The first objective gives an odd copy to a
    rank that holds the fewest over all layers so far. The second spreads the odd copies of a layer
    evenly over nodes and ranks.

    Args:
        copies: (L,) copies each layer holds, first copies included.
        topology: names the node of each rank.

    Returns:
        (L, R) int64; inside a layer ranks differ by at most one, and so do their sums over layers.

    Order: of n tied ranks in node order, k are taken at positions i * n // k. The paper's Figure 7
    shows this (ranks 0 and 2 of 4 for the first layer); its pseudo-code would take both ends (0 and
    3).
    """
    if (copies < 0).any():
        raise InvalidInput(f"a layer holds {int(copies.min())} copies, must not be negative")
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
        capacity: (L, R) copies a rank may hold in a layer, at most `slots_per_rank`.
        slots_per_rank: local slots of a layer.
        rates: (R,) cost per token of each rank; None for equal ranks.

    Returns:
        (L, S) int32, EMPTY in unused slots. A copy for which no rank is left is not placed, but
        every expert has one.

    Raises:
        ShapeMismatch: arrays of different layers or experts.
        InfeasiblePlan: fewer places than copies, or an expert found no rank.

    Order: the heavier copy first, the lower expert id on a tie; the lower rank on a tie.
    """
    layers, experts = load.shape
    ranks = capacity.shape[1]
    if logcnt.shape != (layers, experts) or len(capacity) != layers:
        raise ShapeMismatch(
            f"load is {load.shape}, logcnt {logcnt.shape}, capacity {capacity.shape}"
        )
    short = np.nonzero(logcnt.sum(axis=1) > capacity.sum(axis=1))[0]
    if len(short):
        layer = int(short[0])
        raise InfeasiblePlan(
            f"layer {layer}: {int(logcnt[layer].sum())} copies exceed"
            f" {int(capacity[layer].sum())} places",
            Reason.POOL_EXCEEDED,
        )
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
