"""Numba kernels of the planner: loops over arrays, without checks.

Callers validate. Every kernel has a slow numpy twin in the tests. Kernels run on one thread,
without fastmath, so the same input gives the same bytes on any machine. They release the GIL.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.batch_split import choose_replicas, list_layers, split_tokens
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.cost import CostModel, ReplicaWork

_T = TypeVar("_T")
TILE_SLACK = 1e-9
"""Fraction of a tile by which a load may exceed a tile boundary at no cost: hides rounding errors
of even splits."""


class TimeTerms(NamedTuple):
    """The time of ranks in a `CostModel`, in the form of the kernels."""

    fixed: float
    tile: float
    """0 stands for a time that is the work."""
    tile_seconds: NDArray[np.float64]
    """(R, K)"""
    slope: NDArray[np.float64]
    """(R,)"""


def time_terms(cost: CostModel, num_ranks: int) -> TimeTerms:
    """Return the time of ranks in the form of the kernels."""
    curves, fixed = cost.curves, float(cost.fixed)
    if curves is None:
        return TimeTerms(fixed, 0.0, np.zeros((num_ranks, 1)), np.ones(num_ranks))
    return TimeTerms(
        fixed,
        float(curves.tile_tokens),
        np.array(curves.tile_seconds, np.float64, order="C"),
        np.array(curves.slope_s_per_token, np.float64, order="C"),
    )


@kernel
def rank_time(work: float, rank: int, terms: TimeTerms) -> float:
    """Return T_r of `CostModel`; 0 without work."""
    if work <= 0.0:
        return 0.0
    if terms.tile == 0.0:
        return work + terms.fixed
    tiles = terms.tile_seconds.shape[1]
    stair = int(np.ceil(work / terms.tile - TILE_SLACK))
    if stair < 1:
        stair = 1
    if stair <= tiles:
        return float(terms.tile_seconds[rank, stair - 1] + terms.fixed)
    beyond = terms.slope[rank] * (work - tiles * terms.tile)
    return float(terms.tile_seconds[rank, tiles - 1] + beyond + terms.fixed)


@kernel
def rank_times_kernel(work: NDArray[np.float64], terms: TimeTerms) -> NDArray[np.float64]:
    """(N, R) work -> (N, R) times."""
    out = np.empty(work.shape)
    for i in range(work.shape[0]):
        for rank in range(work.shape[1]):
            out[i, rank] = rank_time(work[i, rank], rank, terms)
    return out


class WorkTerms(NamedTuple):
    """A `ReplicaWork` in the form of the kernels."""

    read: float
    start: float
    tile: float
    proportional: bool


def work_terms(replica: ReplicaWork) -> WorkTerms:
    """Return a `ReplicaWork` in the form of the kernels."""
    return WorkTerms(
        float(replica.read_tokens),
        float(replica.start_tokens),
        float(replica.tile_tokens),
        replica.proportional,
    )


@kernel
def work_of_tokens(tokens: float, terms: WorkTerms) -> float:
    """Return w(n) of `ReplicaWork`."""
    if terms.proportional or tokens <= 0.0:
        return max(tokens, 0.0)
    whole = max(tokens, 1.0)
    if terms.tile > 0.0:
        whole = terms.tile * np.ceil(whole / terms.tile - TILE_SLACK)
    return float((terms.start + max(terms.read, whole)) * min(tokens, 1.0))


@kernel
def replica_work_kernel(tokens: NDArray[np.float64], terms: WorkTerms) -> NDArray[np.float64]:
    """(N,) tokens of replicas -> (N,) their work."""
    out = np.empty(tokens.shape[0])
    for i in range(tokens.shape[0]):
        out[i] = work_of_tokens(tokens[i], terms)
    return out


@kernel
def rank_load_kernel(
    load: NDArray[np.float64] | NDArray[np.uint32],
    phy2log: NDArray[np.int32],
    shares: NDArray[np.float64],
    num_ranks: int,
    most: float,
) -> NDArray[np.float64]:
    """(T, L, E) load, (L, S) experts and shares -> (T, L, R) rank load.

    most: the most tokens of a slot that count.
    """
    steps, layers, _ = load.shape
    per_rank = phy2log.shape[1] // num_ranks
    out = np.zeros((steps, layers, num_ranks))
    for t in range(steps):
        for layer in range(layers):
            tokens, experts, share = load[t, layer], phy2log[layer], shares[layer]
            # Unsigned: numba would check whether a signed index counts from the end.
            slot = np.uint64(0)
            for rank in range(num_ranks):
                total = 0.0
                for _ in range(per_rank):
                    expert = experts[slot]
                    if expert >= 0:
                        total += min(tokens[np.uint64(expert)] * share[slot], most)
                    slot += np.uint64(1)
                out[t, layer, rank] = total
    return out


@kernel
def batch_split_kernel(
    load: NDArray[np.float64], phy2log: NDArray[np.int32], num_ranks: int, fewest: bool
) -> NDArray[np.float64]:
    """Split (T, L, E) load over (L, S) slots, each batch by itself -> (T, L, S) tokens per slot.

    fewest: True chooses one replica for each expert, False minimises the largest rank load.
    """
    steps, layers, experts = load.shape
    out = np.zeros((steps, layers, phy2log.shape[1]))
    used, active = np.empty(num_ranks), np.empty(num_ranks, np.int64)
    chosen = np.empty(experts, np.int64)
    firsts, followings, orders = list_layers(phy2log, experts, num_ranks)
    for layer in range(layers):
        row, first, following = phy2log[layer], firsts[layer], followings[layer]
        for t in range(steps):
            tokens, flow = load[t, layer], out[t, layer]
            if fewest:
                choose_replicas(tokens, row, first, following, active, used, chosen)
                for expert in range(experts):
                    if chosen[expert] >= 0:
                        flow[chosen[expert]] = tokens[expert]
            else:
                used[:] = 0.0
                split_tokens(tokens, row, first, following, orders[layer], False, flow, used)
    return out


@kernel
def step_times_kernel(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    shares: NDArray[np.float64],
    shared: NDArray[np.float64],
    terms: WorkTerms,
    time: TimeTerms,
) -> NDArray[np.float64]:
    """Return the (T, L) time of the slowest rank of every step and layer.

    shared: (L, R) work of shared experts on a rank for each routed token of the layer.
    """
    steps, layers, experts = load.shape
    num_ranks = shared.shape[1]
    per_rank = phy2log.shape[1] // num_ranks
    has_shared, proportional = shared.any(), terms.proportional
    out = np.zeros((steps, layers))
    for t in range(steps):
        for layer in range(layers):
            routed, expert_of, share = load[t, layer], phy2log[layer], shares[layer]
            tokens = 0.0
            if has_shared:
                for expert in range(experts):
                    tokens += routed[expert]
            # Unsigned: numba would check whether a signed index counts from the end.
            slot = np.uint64(0)
            worst = 0.0
            for rank in range(num_ranks):
                work = tokens * shared[layer, rank]
                for _ in range(per_rank):
                    expert = expert_of[slot]
                    if expert >= 0:
                        part = routed[np.uint64(expert)] * share[slot]
                        work += part if proportional else work_of_tokens(part, terms)
                    slot += np.uint64(1)
                worst = max(worst, rank_time(work, rank, time))
            out[t, layer] = worst
    return out


@kernel
def nearest_shares_kernel(
    phy2log: NDArray[np.int32],
    node_of_rank: NDArray[np.int64],
    origin: NDArray[np.float64],
    num_experts: int,
) -> NDArray[np.float64]:
    """Return the (L, S) share of its expert's tokens that each slot gets under NEAREST.

    A rank uses its own replicas, else those on its node, else all. Ranks that use the same replicas
    are counted, not visited: a layer takes O(S log S + E).

    origin: (R, L, E) share of each expert's tokens that starts on a rank; (R, 1, 1) if it is always
    the same.
    """
    layers, slots = phy2log.shape
    nodes, ranks = node_of_rank.max() + 1, node_of_rank.shape[0]
    per_rank = slots // ranks
    # What starts on each node.
    on_node = np.zeros((nodes, origin.shape[1], origin.shape[2]))
    for rank in range(ranks):
        on_node[node_of_rank[rank]] += origin[rank]
    shares = np.zeros((layers, slots))
    copies_on, copies_of = np.zeros(nodes, np.int64), np.zeros(ranks, np.int64)
    # What starts on ranks of a node that do not hold the expert.
    passing = np.zeros(nodes)
    for layer in range(layers):
        begin = layer % origin.shape[1]
        holders = np.argsort(phy2log[layer], kind="mergesort")
        first = np.searchsorted(phy2log[layer][holders], np.arange(num_experts + 1))
        for expert in range(num_experts):
            at = expert % origin.shape[2]
            held = holders[first[expert] : first[expert + 1]]
            far = 1.0
            for slot in held:
                rank, node = slot // per_rank, node_of_rank[slot // per_rank]
                if copies_on[node] == 0:
                    passing[node] = on_node[node, begin, at]
                    far -= passing[node]
                if copies_of[rank] == 0:
                    passing[node] -= origin[rank, begin, at]
                copies_on[node] += 1
                copies_of[rank] += 1
            for slot in held:
                rank, node = slot // per_rank, node_of_rank[slot // per_rank]
                # Rounding may take what is passed on below 0.
                shares[layer, slot] = (
                    origin[rank, begin, at] / copies_of[rank]
                    + max(passing[node], 0.0) / copies_on[node]
                    + max(far, 0.0) / len(held)
                )
            for slot in held:
                rank = slot // per_rank
                copies_of[rank] = copies_on[node_of_rank[rank]] = 0
    return shares


def map_layers(work: Callable[[int], _T], layers: Sequence[int], threads: int) -> list[_T]:
    """Return `work` of each layer, in their order; kernels run in several threads at once."""
    if threads < 2 or len(layers) < 2:
        return list(map(work, layers))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, layers))
