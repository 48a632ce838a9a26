"""The state of one layer under search.

Minimised is the sum over steps of w_t * |C_r(load_rt)|_p, the p-norm over ranks of their times: a
smooth form of the time of the slowest rank. All copies of an expert do the same work, so the load
of a rank is the sum of the work of the copies it holds.

Units: loads are in mean rank loads, times in layer times. A layer time is the time of one layer if
load were spread perfectly over the ranks, so prices and gains mean the same for every model and
fleet.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel


class CopyWork(NamedTuple):
    """The work of one copy by its tokens, without the edges of tiles."""

    proportional: bool
    """True if work is tokens: the other fields are then unused."""
    read: float
    """The least work of a copy with tokens: reading the weights, or one tile."""
    start: float
    """Work that every copy with tokens adds."""
    half_tile: float
    """The tokens that rounding up to whole tiles adds on average."""
    token: float
    """One token. With fewer, a copy runs in that share of the steps."""
    single: bool
    """True if in each step one copy computes all tokens of an expert (`fewest` dispatch). Further
    copies then share its work over the steps and add none."""


class Terms(NamedTuple):
    """The objective of all layers."""

    rates: NDArray[np.float64]
    """(R,) time of a load of 1 on each rank."""
    doublings: int
    """p is 2 to this power."""
    work: CopyWork
    nearest: bool
    """True if a rank uses its own copies, else those of its node (`nearest` dispatch); False if
    all copies of an expert have the same tokens."""
    nodes: NDArray[np.int64]
    """(R,) node of each rank."""


class Inputs(NamedTuple):
    """The part of a layer that no move changes."""

    tokens: NDArray[np.float64]
    """(E, T) tokens of each expert."""
    weight: NDArray[np.float64]
    """(T,) weight of each step, summing to 1."""
    base: NDArray[np.float64]
    """(R, T) load of each rank without routed experts: the work of shared experts."""
    floor: NDArray[np.float64]
    """(T,) power of a time that every step takes at least; 0 where there is none."""
    prices: NDArray[np.float32]
    """(E, R) price of a copy: 0 where the current placement has it, else 1 or the cross-node
    factor."""
    origin: NDArray[np.float64]
    """(E, R) share of each expert's tokens that start on a rank."""
    least: NDArray[np.int64]
    """(E,) fault domains in which an expert must keep a replica: 1 or 2."""
    domains: NDArray[np.int64]
    """(R,) fault domain of each rank."""


class Layer(NamedTuple):
    """One layer. Kernels change the arrays in place."""

    given: Inputs
    row: NDArray[np.int32]
    """(S,) expert of each slot, -1 for empty."""
    held: NDArray[np.bool_]
    """(E, R) True where a rank holds the expert."""
    copies: NDArray[np.int64]
    """(E,) ranks that hold each expert."""
    share: NDArray[np.float64]
    """(E, R) share of an expert's tokens that lands on a rank; kept under nearest dispatch only."""
    part: NDArray[np.float64]
    """(3, E, R) what a copy on a rank does of `by_step`: a share of the tokens where work is
    proportional, else all, since `by_step` is then of one copy."""
    work: NDArray[np.float64]
    """(3, E, T) work of one copy of an expert with one copy less, as now, and with one more."""
    by_step: NDArray[np.float64]
    """(3, T, E) the same, for loops over experts; where work is proportional (1, T, E) tokens."""
    load: NDArray[np.float64]
    """(R, T) load of each rank."""
    power: NDArray[np.float64]
    """(R, T) time of each rank to the power p."""
    total: NDArray[np.float64]
    """(T,) sum of `power` over ranks, and the floor."""
    norm: NDArray[np.float64]
    """(T,) `total` ** (1 / p): the time of the step."""
    slope: NDArray[np.float64]
    """(R, T) gradient of the objective in the loads."""
    relief: NDArray[np.float64]
    """(3, E, R) `work` times `slope`: to first order, what a rank saves without that copy."""
    scale: NDArray[np.float64]
    """(T,) load of the mean rank."""
    bend: NDArray[np.float64]
    """(R,) second derivative of the objective in the load of a rank over `scale`, the same in all
    steps."""
    mean: NDArray[np.float64]
    """(3, E) weighted mean of `work` over `scale`."""
    spread: NDArray[np.float64]
    """(3, E) its standard deviation."""
    change: NDArray[np.float64]
    """(R, T) change of each rank's load by the move that is being tried."""
    touched: NDArray[np.bool_]
    """(R,) True for the ranks of that move."""


def build_layer(inputs: Inputs, row: NDArray[np.int32], terms: Terms) -> Layer:
    """Return the state of a layer with these slots, before its first `renew`."""
    tokens = inputs.tokens
    experts, steps = tokens.shape
    by_step = np.empty((1 if terms.work.proportional else 3, steps, experts))
    by_step[:] = tokens.T
    ranks, zeros = inputs.prices.shape[1], np.zeros
    return Layer(
        given=inputs,
        row=row.copy(),
        held=zeros((experts, ranks), np.bool_),
        copies=zeros(experts, np.int64),
        share=zeros((experts, ranks)),
        part=np.ones((3, experts, ranks)),
        work=zeros((3, experts, steps)),
        by_step=by_step,
        load=zeros((ranks, steps)),
        power=zeros((ranks, steps)),
        total=zeros(steps),
        norm=zeros(steps),
        slope=zeros((ranks, steps)),
        relief=zeros((3, experts, ranks)),
        scale=zeros(steps),
        bend=zeros(ranks),
        mean=zeros((3, experts)),
        spread=zeros((3, experts)),
        change=zeros((ranks, steps)),
        touched=zeros(ranks, np.bool_),
    )


@kernel
def renew(layer: Layer, terms: Terms) -> float:
    """Compute everything from the slots; return the objective."""
    experts, ranks = layer.held.shape
    per_rank = layer.row.shape[0] // ranks
    layer.held[:] = False
    for slot in range(layer.row.shape[0]):
        if layer.row[slot] >= 0:
            layer.held[layer.row[slot], slot // per_rank] = True
    layer.load[:] = layer.given.base
    layer.scale[:] = 1e-9
    for expert in range(experts):
        layer.copies[expert] = layer.held[expert].sum()
        for t in range(layer.scale.shape[0]):
            layer.scale[t] += work_of_copy(layer.given.tokens[expert, t], terms.work) / ranks
    for expert in range(experts):
        set_work(layer, terms, expert)
        for rank in range(ranks):
            if layer.held[expert, rank]:
                for t in range(layer.load.shape[1]):
                    if terms.nearest:
                        tokens = layer.share[expert, rank] * layer.given.tokens[expert, t]
                        layer.load[rank, t] += work_of_copy(tokens, terms.work)
                    else:
                        layer.load[rank, t] += layer.work[1, expert, t]
    return renew_slopes(layer, terms)


@kernel
def renew_slopes(layer: Layer, terms: Terms) -> float:
    """Compute the gradients from the loads; return the objective."""
    ranks = layer.held.shape[1]
    layer.total[:] = layer.given.floor
    layer.power[:] = 0.0
    for rank in range(ranks):
        set_power(layer, terms, rank)
    value = set_norm(layer, terms)
    for rank in range(ranks):
        set_slope(layer, terms, rank)
        set_reliefs(layer, rank, 0, layer.held.shape[0])
    return value


@inlined
def raised(time: float, doublings: int) -> float:
    """Return a time to the power p."""
    for _ in range(doublings):
        time *= time
    return time


@inlined
def root(total: float, doublings: int) -> float:
    """Return a sum of powers to the power 1 / p."""
    total = max(total, 0.0)
    for _ in range(doublings):
        total = np.sqrt(total)
    return total


@inlined
def work_of_copy(tokens: float, work: CopyWork) -> float:
    """Return the work of one copy with some tokens."""
    if work.proportional:
        return tokens
    busy = min(tokens, work.token) / work.token
    return busy * (work.start + max(work.read, max(tokens, work.token) + work.half_tile))


@inlined
def set_work(layer: Layer, terms: Terms, expert: int) -> None:
    """Compute the work of an expert's copies, and its moments, from their number."""
    for k in range(3):
        copies = max(layer.copies[expert] + k - 1, 1)
        if terms.work.proportional:
            layer.part[k, expert] = 1.0 / copies
        for t in range(layer.load.shape[1]):
            tokens = layer.given.tokens[expert, t]
            if terms.work.single:
                layer.work[k, expert, t] = work_of_copy(tokens, terms.work) / copies
            else:
                layer.work[k, expert, t] = work_of_copy(tokens / copies, terms.work)
            if not terms.work.proportional:
                layer.by_step[k, t, expert] = layer.work[k, expert, t]
        mean = square = 0.0
        for t in range(layer.load.shape[1]):
            work = layer.work[k, expert, t] / layer.scale[t]
            mean += layer.given.weight[t] * work
            square += layer.given.weight[t] * work * work
        layer.mean[k, expert] = mean
        layer.spread[k, expert] = np.sqrt(max(square - mean * mean, 0.0))
    if terms.nearest:
        held = layer.held[expert]
        layer.share[expert] = nearest_shares(held, layer.given.origin[expert], terms.nodes)
        if terms.work.proportional:
            for rank in range(held.shape[0]):
                if held[rank]:
                    layer.part[1, expert, rank] = layer.share[expert, rank]


@kernel
def nearest_shares(
    held: NDArray[np.bool_], origin: NDArray[np.float64], nodes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the (R,) shares of an expert's tokens on the ranks that hold it."""
    ranks = held.shape[0]
    shares = np.zeros(ranks)
    for source in range(ranks):
        if held[source]:
            shares[source] += origin[source]
            continue
        near = 0
        for rank in range(ranks):
            near += held[rank] and nodes[rank] == nodes[source]
        for rank in range(ranks):
            if held[rank] and (near == 0 or nodes[rank] == nodes[source]):
                shares[rank] += origin[source] / (near if near > 0 else held.sum())
    return shares


@inlined
def set_power(layer: Layer, terms: Terms, rank: int) -> None:
    """Compute `power` of a rank from its load, and keep `total` equal to their sum."""
    for t in range(layer.load.shape[1]):
        time = max(layer.load[rank, t], 0.0) * terms.rates[rank]
        power = raised(time, terms.doublings)
        layer.total[t] += power - layer.power[rank, t]
        layer.power[rank, t] = power


@inlined
def set_norm(layer: Layer, terms: Terms) -> float:
    """Compute `norm` from `total`; return the objective."""
    value = 0.0
    for t in range(layer.total.shape[0]):
        layer.norm[t] = root(layer.total[t], terms.doublings)
        value += layer.given.weight[t] * layer.norm[t]
    return value


@inlined
def set_slope(layer: Layer, terms: Terms, rank: int) -> None:
    """Compute `slope` and `bend` of a rank from its power and the sums over ranks."""
    layer.bend[rank] = 0.0
    for t in range(layer.load.shape[1]):
        load, total = layer.load[rank, t], layer.total[t]
        layer.slope[rank, t] = 0.0
        if load > 0.0 and total > 0.0:
            part = layer.power[rank, t] / total
            slope = layer.given.weight[t] * layer.norm[t] * part / load
            layer.slope[rank, t] = slope
            curve = (2.0**terms.doublings - 1.0) * (1.0 - part) * slope / load
            layer.bend[rank] += curve * layer.scale[t] ** 2


@kernel
def set_reliefs(layer: Layer, rank: int, first: int, last: int) -> None:
    """Compute `relief` of experts first..last-1 on a rank from the slope of the rank."""
    sums, slopes = np.zeros(last - first), layer.slope[rank]
    for k in range(3):
        if k < layer.by_step.shape[0]:
            sums[:] = 0.0
            for t in range(slopes.shape[0]):
                if slopes[t] > 0.0:
                    for n in range(last - first):
                        sums[n] += slopes[t] * layer.by_step[k, t, first + n]
        for n in range(last - first):
            layer.relief[k, first + n, rank] = sums[n] * layer.part[k, first + n, rank]
