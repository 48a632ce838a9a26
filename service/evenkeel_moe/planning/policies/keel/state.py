"""What keel knows of one layer while it searches: loads, rank costs per step, and how steep they are.

The search minimises a smooth stand-in for the time of a layer: the p-norm over ranks of their cost, step by
step, averaged over the window. It lies between the largest cost and R ** (1/p) times it. Unlike the maximum
it sees every rank near the top, so gains of single moves add up, and it fits less of the window's noise.

The gradient is kept as a table: `slope[e, r]` is by how much the objective would grow if one more share of
expert e's tokens went to rank r. The objective is convex in the rank loads where the cost curves are, so a
move gains at most what the gradient promises. That bound costs O(1) and leaves few candidates to evaluate.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel

__all__ = [
    "SHARP",
    "SMOOTH",
    "Curves",
    "Layer",
    "Split",
    "build_layer",
    "expert_shares",
    "load_ranks",
    "power",
    "refresh",
    "root",
    "smooth_cost",
]


SMOOTH = 3
"""p is 2 ** 3 = 8 where loads are noisy: it fits little of the noise of single steps."""
SHARP = 5
"""p is 2 ** 5 = 32 where they are not: it is nearer the maximum, which many ranks share."""


class Curves(NamedTuple):
    """Cost of a rank load in the search: straight lines, or stairs smoothed to ramps."""

    rates: NDArray[np.float64]
    """(R,) cost per unit of load; with stairs, beyond the last of them."""
    tile: float
    """Width of a stair in load units; 0 for straight lines."""
    stairs: NDArray[np.float64]
    """(R, K) cost of 1..K tiles; unused when `tile` is 0."""
    doublings: int = SMOOTH
    """p is 2 to this power: `SMOOTH` or `SHARP`."""


class Split(NamedTuple):
    """How tokens divide over replicas."""

    nearest: bool
    """False: evenly."""
    node_of_rank: NDArray[np.int64]
    """(R,)"""


class Layer(NamedTuple):
    """One layer under search. Arrays are mutated in place."""

    load: NDArray[np.float64]
    """(E, T) tokens over the mean rank load of the window."""
    weight: NDArray[np.float64]
    """(T,) weight of each step, summing to 1."""
    source: NDArray[np.float64]
    """(E, R) share of each expert's tokens that start on a rank."""
    row: NDArray[np.int32]
    """(S,) expert of each slot, -1 for empty."""
    held: NDArray[np.int64]
    """(E, R) copies of an expert on a rank."""
    copies: NDArray[np.int64]
    """(E,) copies of an expert."""
    share: NDArray[np.float64]
    """(E, R) share of an expert's tokens that lands on a rank."""
    had: NDArray[np.bool_]
    """(E, R) whether the rank holds the expert at present: such a copy costs nothing."""
    far: NDArray[np.float64]
    """(E, R) price of the copy in units of the move price: 0 where `had`, 1 from the same node, else dearer."""
    homes: NDArray[np.int64]
    """(E,) ranks that hold an expert at present."""
    nearest: NDArray[np.float64]
    """(E,) price of the cheapest copy on a rank that does not; 0 where all do."""
    farthest: NDArray[np.float64]
    """(1,) price of the dearest copy of all."""
    ranks: NDArray[np.float64]
    """(R, T) rank load."""
    powers: NDArray[np.float64]
    """(R, T) rank cost ** p."""
    total: NDArray[np.float64]
    """(T,) sum of `powers` over ranks."""
    norm: NDArray[np.float64]
    """(T,) total ** (1/p): the step's time."""
    steep: NDArray[np.float64]
    """(T, R) gradient of the objective in the rank loads."""
    slope: NDArray[np.float64]
    """(E, R) gradient of the objective in the share of an expert on a rank."""
    scratch: NDArray[np.float64]
    """(T,)"""
    moved: NDArray[np.float64]
    """(2, R) scratch: changes of two experts' shares."""


@kernel
def smooth_cost(load: float, rank: int, curves: Curves) -> float:
    """Cost of a rank load: straight, or ramps that meet each stair half a tile early."""
    if curves.tile == 0.0:
        return float(load * curves.rates[rank])
    if load <= 0.0:
        return 0.0
    tiles = curves.stairs.shape[1]
    at = load / curves.tile + 0.5
    if at >= tiles:
        return float(
            curves.stairs[rank, tiles - 1] + (at - tiles) * curves.tile * curves.rates[rank]
        )
    if at < 1.0:
        return float(curves.stairs[rank, 0] * (2.0 * at - 1.0))
    low = int(at)
    part = at - low
    return float((1.0 - part) * curves.stairs[rank, low - 1] + part * curves.stairs[rank, low])


@kernel
def _smooth_slope(load: float, rank: int, curves: Curves) -> float:
    if curves.tile == 0.0:
        return float(curves.rates[rank])
    tiles = curves.stairs.shape[1]
    at = load / curves.tile + 0.5
    if at >= tiles:
        return float(curves.rates[rank])
    if at < 1.0:
        return float(2.0 * curves.stairs[rank, 0] / curves.tile)
    low = int(at)
    return float((curves.stairs[rank, low] - curves.stairs[rank, low - 1]) / curves.tile)


@inlined
def power(value: float, doublings: int) -> float:
    """value ** p."""
    for _ in range(doublings):
        value *= value
    return value


@inlined
def root(value: float, doublings: int) -> float:
    """The inverse of `power`."""
    for _ in range(doublings):
        value = np.sqrt(value)
    return value


@kernel
def expert_shares(
    held: NDArray[np.int64],
    count: int,
    source: NDArray[np.float64],
    split: Split,
    out: NDArray[np.float64],
) -> None:
    """Share of one expert's tokens that lands on each rank, (R,) into `out`, given who holds it (R,)."""
    ranks = held.shape[0]
    if not split.nearest or count < 2:
        for rank in range(ranks):
            out[rank] = held[rank] / count if count > 0 else 0.0
        return
    out[:] = 0.0
    for start in range(ranks):
        part = source[start]
        if part == 0.0:
            continue
        if held[start] > 0:
            out[start] += part
            continue
        near = 0
        for rank in range(ranks):
            if split.node_of_rank[rank] == split.node_of_rank[start]:
                near += held[rank]
        for rank in range(ranks):
            if near == 0:
                out[rank] += part * held[rank] / count
            elif split.node_of_rank[rank] == split.node_of_rank[start]:
                out[rank] += part * held[rank] / near


@kernel
def load_ranks(layer: Layer, split: Split) -> None:
    """Fill `held`, `count` and `ranks` from the slots."""
    experts, steps = layer.load.shape
    num_ranks = layer.ranks.shape[0]
    per_rank = layer.row.shape[0] // num_ranks
    layer.held[:] = 0
    layer.copies[:] = 0
    for slot in range(layer.row.shape[0]):
        if layer.row[slot] >= 0:
            layer.held[layer.row[slot], slot // per_rank] += 1
            layer.copies[layer.row[slot]] += 1
    layer.ranks[:] = 0.0
    for expert in range(experts):
        shares = layer.share[expert]
        expert_shares(layer.held[expert], layer.copies[expert], layer.source[expert], split, shares)
        for rank in range(num_ranks):
            if shares[rank] > 0.0:
                for t in range(steps):
                    layer.ranks[rank, t] += shares[rank] * layer.load[expert, t]


@kernel
def refresh(layer: Layer, curves: Curves) -> float:
    """Recompute costs and slopes from the rank loads; returns the objective, the weighted mean time."""
    experts, steps = layer.load.shape
    num_ranks = layer.ranks.shape[0]
    straight = curves.tile == 0.0
    load, weight, ranks, powers = layer.load, layer.weight, layer.ranks, layer.powers
    total, norm, steep, slope = layer.total, layer.norm, layer.steep, layer.slope
    total[:] = 0.0
    for rank in range(num_ranks):
        rate = curves.rates[rank]
        for t in range(steps):
            # Differences of shares may leave a rank a rounding below empty.
            tokens = max(ranks[rank, t], 0.0)
            cost = tokens * rate if straight else smooth_cost(tokens, rank, curves)
            powers[rank, t] = power(cost, curves.doublings)
            total[t] += powers[rank, t]
    objective = 0.0
    for t in range(steps):
        norm[t] = root(total[t], curves.doublings)
        objective += weight[t] * norm[t]
    steep[:] = 0.0
    for rank in range(num_ranks):
        rate = curves.rates[rank]
        for t in range(steps):
            tokens = max(ranks[rank, t], 0.0)
            cost = tokens * rate if straight else smooth_cost(tokens, rank, curves)
            if cost > 0.0:
                by = rate if straight else _smooth_slope(tokens, rank, curves)
                steep[t, rank] = weight[t] * (powers[rank, t] / total[t]) * (norm[t] / cost) * by
    slope[:] = 0.0
    for expert in range(experts):
        for t in range(steps):
            tokens = load[expert, t]
            if tokens > 0.0:
                for rank in range(num_ranks):
                    slope[expert, rank] += tokens * steep[t, rank]
    return objective


def build_layer(
    load: NDArray[np.float64],
    weight: NDArray[np.float64],
    source: NDArray[np.float64],
    row: NDArray[np.int32],
    current: NDArray[np.int32] | None,
    split: Split,
    cross_node_factor: float,
) -> Layer:
    """A layer ready for search.

    Args:
        load: (E, T) tokens over the mean rank load.
        weight: (T,) summing to 1.
        source: (E, R) shares of origin.
        row: (S,) the start; copied.
        current: (S,) where experts are at present; None for nowhere, so that no copy has a price.
        split: names the ranks' nodes and the dispatcher.
        cross_node_factor: price of a copy that no rank of the node could send.
    """
    experts, steps = load.shape
    ranks = len(split.node_of_rank)
    had = np.ones((experts, ranks), np.bool_)
    far = np.zeros((experts, ranks))
    if current is not None:
        had[:] = False
        holders = np.arange(len(current)) // (len(current) // ranks)
        filled = current >= 0
        had[current[filled], holders[filled]] = True
        nodes = split.node_of_rank
        on_node = np.zeros((experts, int(nodes.max()) + 1), np.bool_)
        for rank in range(ranks):
            on_node[:, nodes[rank]] |= had[:, rank]
        far = np.where(had, 0.0, np.where(on_node[:, nodes], 1.0, cross_node_factor))
    layer = Layer(
        load=np.ascontiguousarray(load),
        weight=weight,
        source=np.ascontiguousarray(source),
        row=row.astype(np.int32, copy=True),
        held=np.zeros((experts, ranks), np.int64),
        copies=np.zeros(experts, np.int64),
        share=np.zeros((experts, ranks)),
        had=had,
        far=far,
        homes=had.sum(axis=1),
        nearest=np.where(had.all(axis=1), 0.0, np.where(had, np.inf, far).min(axis=1)),
        farthest=far.max(keepdims=True).reshape(-1)[:1],
        ranks=np.zeros((ranks, steps)),
        powers=np.zeros((ranks, steps)),
        total=np.zeros(steps),
        norm=np.zeros(steps),
        steep=np.zeros((steps, ranks)),
        slope=np.zeros((experts, ranks)),
        scratch=np.zeros(steps),
        moved=np.zeros((2, ranks)),
    )
    load_ranks(layer, split)
    return layer
