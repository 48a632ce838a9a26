"""The state of one layer under search: loads, rank costs in each step, and the gradient.

The search minimises a smooth replacement for the time of a layer: the p-norm over ranks of their
cost, step by step, averaged over the window. It lies between the largest cost and R ** (1/p) times
that. Unlike the maximum it depends on every rank near the top, so the gains of single moves add up,
and it fits less of the window's noise.

The gradient is kept as a table: `slope[e, r]` is by how much the objective would grow if one more
share of expert e's tokens went to rank r. Where the cost curves are convex, so is the objective in
the rank loads, and a move gains at most what the gradient promises. That bound costs O(1) per move
and leaves few candidates to evaluate.

Units: loads are in mean rank loads, costs and the objective in layer times (see `search`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.planning.policies.keel.work import SmoothWork, fill_work

WRITTEN_OUT, WRITTEN_OUT_SHARP = 3, 5
"""Doublings of p = 8 and 32, for which the innermost loops have no inner loop of their own."""


class SmoothCosts(NamedTuple):
    """The cost of a rank by its load, as the search sees it.

    It is a value of its own because inlined kernels run faster when they take fewer arrays.
    """

    rates: NDArray[np.float64]
    """(R,) cost per unit of load; with stairs, beyond the last of them."""
    tile: float
    """Width of a stair of the cost curve in load units; 0 for straight lines."""
    stairs: NDArray[np.float64]
    """(R, K) cost of 1..K tiles; unused when `tile` is 0."""
    doublings: int
    """p of the norm is 2 to this power."""


class SearchObjective(NamedTuple):
    """The objective of one search, in search units; the same for all its layers."""

    costs: SmoothCosts
    """The cost of each rank by its load, as smooth functions."""
    quick: bool
    """True where p is the higher one, because many ranks then have the largest cost together, and
    in large layers: moves are made together, and bounds are tighter but approximate."""
    swap_share: float
    """Gain, over that of the best swap, from which a swap is made with it; 1 where not `quick`."""
    nearest: bool
    """True for nearest dispatch, False for an even split. Where work is not proportional to tokens,
    the search is under an even split: only there all copies of an expert have the same work."""
    node_of_rank: NDArray[np.int64]
    """(R,) node of each rank."""
    work: SmoothWork
    """The work of a copy by its tokens."""
    drops: bool
    """True if a copy may be dropped without another in its place."""


class LayerState(NamedTuple):
    """One layer under search. Kernels change the arrays in place."""

    tokens: NDArray[np.float64]
    """(E, T) tokens of each expert."""
    work: NDArray[np.float64]
    """(E, T) work of all copies of each expert; `tokens` itself where work is proportional."""
    one_more: NDArray[np.float64]
    """(E, T) work that each copy of an expert would have with one copy more; `tokens` itself, and
    unused, where work is proportional."""
    base: NDArray[np.float64]
    """(R, T) load of each rank without routed experts: the work of shared experts."""
    floor_power: NDArray[np.float64]
    """(T,) power sum of a time that every rank takes at least; 0 where there is none."""
    weight: NDArray[np.float64]
    """(T,) weight of each step, summing to 1."""
    origin: NDArray[np.float64]
    """(E, R) share of each expert's tokens that start on a rank."""
    row: NDArray[np.int32]
    """(S,) expert of each slot, -1 for empty."""
    held: NDArray[np.int32]
    """(E, R) copies of an expert on a rank."""
    copies: NDArray[np.int64]
    """(E,) copies of an expert."""
    share: NDArray[np.float64]
    """(E, R) share of an expert's tokens that lands on a rank."""
    had: NDArray[np.bool_]
    """(E, R) True if the current placement has the expert on the rank: that copy is free."""
    copy_price: NDArray[np.float32]
    """(E, R) price of the copy over the price of a move: 0 where `had`, 1 if a rank of the same
    node has the expert, else the cross-node factor."""
    homes: NDArray[np.int64]
    """(E,) ranks that hold an expert in the current placement."""
    cheapest: NDArray[np.float64]
    """(E,) lowest `copy_price` over the ranks that have no copy at present; 0 if all have one."""
    dearest: NDArray[np.float64]
    """(1,) highest `copy_price` of all."""
    rank_load: NDArray[np.float64]
    """(R, T) load of each rank."""
    powers: NDArray[np.float64]
    """(R, T) rank cost ** p."""
    power_sum: NDArray[np.float64]
    """(T,) sum of `powers` over ranks."""
    norm: NDArray[np.float64]
    """(T,) power_sum ** (1/p): the time of the step."""
    inverse_sum: NDArray[np.float64]
    """(T,) 1 / power_sum; 0 in a step without load."""
    rank_slope: NDArray[np.float64]
    """(R, T) gradient of the objective in the rank loads."""
    step_slope: NDArray[np.float64]
    """(T, R) the same, for loops over ranks."""
    slope: NDArray[np.float64]
    """(E, R) gradient of the objective in the share of an expert on a rank."""
    scratch: NDArray[np.float64]
    """(T,) working memory."""
    bounds: NDArray[np.float64]
    """(T,) working memory: bounds on the gain of each step."""
    moved: NDArray[np.float64]
    """(2, R) working memory: changes of the shares of two experts."""
    after: NDArray[np.float64]
    """(4, T) working memory: changes of the work of one copy, or of the gradient of two ranks."""


@kernel
def smooth_cost(load: float, rank: int, costs: SmoothCosts) -> float:
    """Return the cost of a rank load: a straight line, or ramps instead of stairs.

    A ramp reaches each stair half a tile early, so that the gradient is nowhere zero.
    """
    if costs.tile == 0.0:
        return float(load * costs.rates[rank])
    if load <= 0.0:
        return 0.0
    stairs = costs.stairs
    tiles = stairs.shape[1]
    at = load / costs.tile + 0.5
    if at >= tiles:
        return float(stairs[rank, tiles - 1] + (at - tiles) * costs.tile * costs.rates[rank])
    if at < 1.0:
        return float(stairs[rank, 0] * (2.0 * at - 1.0))
    low = int(at)
    part = at - low
    return float((1.0 - part) * stairs[rank, low - 1] + part * stairs[rank, low])


@kernel
def _cost_slope(load: float, rank: int, costs: SmoothCosts) -> float:
    """Return the derivative of `smooth_cost` in the load."""
    if costs.tile == 0.0:
        return float(costs.rates[rank])
    stairs = costs.stairs
    tiles = stairs.shape[1]
    at = load / costs.tile + 0.5
    if at >= tiles:
        return float(costs.rates[rank])
    if at < 1.0:
        return float(2.0 * stairs[rank, 0] / costs.tile)
    low = int(at)
    return float((stairs[rank, low] - stairs[rank, low - 1]) / costs.tile)


@inlined
def power(value: float, doublings: int) -> float:
    """Return value ** p."""
    for _ in range(doublings):
        value *= value
    return value


@inlined
def root(value: float, doublings: int) -> float:
    """Return value ** (1/p)."""
    for _ in range(doublings):
        value = np.sqrt(value)
    return value


@kernel
def expert_shares(
    held: NDArray[np.int32],
    count: int,
    origin: NDArray[np.float64],
    nearest: bool,
    node_of_rank: NDArray[np.int64],
    out: NDArray[np.float64],
) -> None:
    """Write to `out` (R,) the share of one expert's tokens that lands on each rank.

    Args:
        held: (R,) copies of the expert on each rank.
        count: their sum.
        origin: (R,) share of its tokens that start on each rank.
        nearest: True for nearest dispatch, False for an even split.
        node_of_rank: (R,) node of each rank.
        out: (R,) written.
    """
    ranks = held.shape[0]
    if not nearest or count < 2:
        for rank in range(ranks):
            out[rank] = held[rank] / count if count > 0 else 0.0
        return
    out[:] = 0.0
    for start in range(ranks):
        part = origin[start]
        if part == 0.0:
            continue
        if held[start] > 0:
            out[start] += part
            continue
        near = 0
        for rank in range(ranks):
            if node_of_rank[rank] == node_of_rank[start]:
                near += held[rank]
        for rank in range(ranks):
            if near == 0:
                out[rank] += part * held[rank] / count
            elif node_of_rank[rank] == node_of_rank[start]:
                out[rank] += part * held[rank] / near


@kernel
def load_ranks(layer: LayerState, objective: SearchObjective) -> None:
    """Compute `held`, `copies`, `share` and `rank_load` from the slots."""
    experts, steps = layer.tokens.shape
    num_ranks = layer.rank_load.shape[0]
    per_rank = layer.row.shape[0] // num_ranks
    layer.held[:] = 0
    layer.copies[:] = 0
    for slot in range(layer.row.shape[0]):
        if layer.row[slot] >= 0:
            layer.held[layer.row[slot], slot // per_rank] += 1
            layer.copies[layer.row[slot]] += 1
    layer.rank_load[:] = layer.base
    nearest, nodes = objective.nearest, objective.node_of_rank
    first, following = slots_of_experts(layer.row, experts)
    layer.share[:] = 0.0
    for expert in range(experts):
        shares = layer.share[expert]
        held, count = layer.held[expert], layer.copies[expert]
        if nearest:
            expert_shares(held, count, layer.origin[expert], nearest, nodes, shares)
        update_work(layer, objective, expert)
        before, slot = -1, first[expert]
        while slot >= 0:
            rank = slot // per_rank
            if rank != before:
                if not nearest:
                    shares[rank] = held[rank] / count
                for t in range(steps):
                    layer.rank_load[rank, t] += shares[rank] * layer.work[expert, t]
            before, slot = rank, following[slot]


@kernel
def slots_of_experts(
    row: NDArray[np.int32], experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (E,) the first slot of every expert, (S,) the next slot of the same; -1 for none."""
    first, following = np.full(experts, -1), np.full(row.shape[0], -1)
    for slot in range(row.shape[0] - 1, -1, -1):
        if row[slot] >= 0:
            following[slot] = first[row[slot]]
            first[row[slot]] = slot
    return first, following


@kernel
def update_work(layer: LayerState, objective: SearchObjective, expert: int) -> None:
    """Update the work of one expert after its number of copies has changed."""
    copies = layer.copies[expert]
    if objective.work.proportional or copies == 0:
        return
    fill_work(layer.tokens[expert], copies, objective.work, layer.work[expert])
    layer.work[expert] *= copies
    fill_work(layer.tokens[expert], copies + 1, objective.work, layer.one_more[expert])


@kernel
def refresh(layer: LayerState, objective: SearchObjective) -> float:
    """Recompute costs and gradient from the rank loads; return the objective of the layer."""
    experts, steps = layer.work.shape
    num_ranks = layer.rank_load.shape[0]
    costs = objective.costs
    straight = costs.tile == 0.0
    work, weight, rank_load, powers = layer.work, layer.weight, layer.rank_load, layer.powers
    power_sum, norm = layer.power_sum, layer.norm
    rank_slope, step_slope, slope = layer.rank_slope, layer.step_slope, layer.slope
    power_sum[:] = layer.floor_power
    for rank in range(num_ranks):
        rate = costs.rates[rank]
        for t in range(steps):
            # Rounding of differences of shares can leave the load of an empty rank below zero.
            amount = max(rank_load[rank, t], 0.0)
            cost = amount * rate if straight else smooth_cost(amount, rank, costs)
            powers[rank, t] = power(cost, costs.doublings)
            power_sum[t] += powers[rank, t]
    total = 0.0
    for t in range(steps):
        norm[t] = root(power_sum[t], costs.doublings)
        layer.inverse_sum[t] = 1.0 / power_sum[t] if power_sum[t] > 0.0 else 0.0
        total += weight[t] * norm[t]
    rank_slope[:] = 0.0
    for rank in range(num_ranks):
        rate = costs.rates[rank]
        for t in range(steps):
            amount = max(rank_load[rank, t], 0.0)
            cost = amount * rate if straight else smooth_cost(amount, rank, costs)
            if cost > 0.0:
                by = rate if straight else _cost_slope(amount, rank, costs)
                rank_slope[rank, t] = (
                    weight[t] * (powers[rank, t] / power_sum[t]) * (norm[t] / cost) * by
                )
            step_slope[t, rank] = rank_slope[rank, t]
    slope[:] = 0.0
    whole = steps // 4 * 4
    for expert in range(experts):
        for t in range(0, whole, 4):  # Four steps at a time: the sums stay in registers.
            a, b = work[expert, t], work[expert, t + 1]
            c, d = work[expert, t + 2], work[expert, t + 3]
            if a + b + c + d > 0.0:
                for rank in range(num_ranks):
                    slope[expert, rank] = (
                        (
                            slope[expert, rank]
                            + a * step_slope[t, rank]
                            + b * step_slope[t + 1, rank]
                        )
                        + c * step_slope[t + 2, rank]
                        + d * step_slope[t + 3, rank]
                    )
        for t in range(whole, steps):
            part = work[expert, t]
            if part > 0.0:
                for rank in range(num_ranks):
                    slope[expert, rank] += part * step_slope[t, rank]
    return total
