"""Builds the state of a layer from its tokens, its start and the current placement."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.copy_prices import copy_prices
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective, load_ranks


def _aligned_zeros(*shape: int) -> NDArray[np.float64]:
    """Return an array of zeros that starts at a cache line.

    Numpy aligns to 16 bytes; vector loads that cross cache lines make `refresh` take twice as long.
    """
    size = math.prod(shape)
    memory = np.zeros(size + 8)
    skipped = -memory.ctypes.data % 64 // memory.itemsize
    return memory[skipped : skipped + size].reshape(shape)


class WorkingMemory(NamedTuple):
    """The arrays of a `LayerState` that `refresh` and single moves fill anew; layers share them."""

    powers: NDArray[np.float64]
    power_sum: NDArray[np.float64]
    norm: NDArray[np.float64]
    inverse_sum: NDArray[np.float64]
    rank_slope: NDArray[np.float64]
    step_slope: NDArray[np.float64]
    slope: NDArray[np.float64]
    scratch: NDArray[np.float64]
    bounds: NDArray[np.float64]
    moved: NDArray[np.float64]
    after: NDArray[np.float64]


def working_memory(experts: int, ranks: int, steps: int) -> WorkingMemory:
    """Allocate the working memory of layers of one size."""
    return WorkingMemory(
        powers=np.zeros((ranks, steps)),
        power_sum=np.zeros(steps),
        norm=np.zeros(steps),
        inverse_sum=np.zeros(steps),
        rank_slope=_aligned_zeros(ranks, steps),
        step_slope=_aligned_zeros(steps, ranks),
        slope=_aligned_zeros(experts, ranks),
        scratch=np.zeros(steps),
        bounds=np.zeros(steps),
        moved=np.zeros((2, ranks)),
        after=np.zeros((4, steps)),
    )


class _CopyPrices(NamedTuple):
    """Arrays of a `LayerState` by the same names."""

    had: NDArray[np.bool_]
    copy_price: NDArray[np.float32]
    homes: NDArray[np.int64]
    cheapest: NDArray[np.float64]
    dearest: NDArray[np.float64]


@kernel
def _prices_of(copy_price: NDArray[np.float32]) -> _CopyPrices:
    """Compute what the search needs of the (E, R) prices of copies."""
    experts, ranks = copy_price.shape
    had = copy_price == 0.0
    homes, cheapest, dearest = np.zeros(experts, np.int64), np.zeros(experts), np.zeros(1)
    for expert in range(experts):
        least = np.inf
        for rank in range(ranks):
            price = copy_price[expert, rank]
            if had[expert, rank]:
                homes[expert] += 1
            else:
                least, dearest[0] = min(least, price), max(dearest[0], price)
        if homes[expert] < ranks:
            cheapest[expert] = least
    return _CopyPrices(had, copy_price, homes, cheapest, dearest)


def _free_copies(experts: int, ranks: int) -> _CopyPrices:
    """Return the prices where there is no current placement: no copy has a price."""
    return _CopyPrices(
        had=np.ones((experts, ranks), np.bool_),
        copy_price=np.zeros((experts, ranks), np.float32),
        homes=np.full(experts, ranks),
        cheapest=np.zeros(experts),
        dearest=np.zeros(1),
    )


def build_layer(
    tokens: NDArray[np.float64],
    weight: NDArray[np.float64],
    origin: NDArray[np.float64],
    row: NDArray[np.int32],
    current: NDArray[np.int32] | None,
    objective: SearchObjective,
    cross_node_factor: float,
    base: NDArray[np.float64],
    floor: NDArray[np.float64],
    memory: WorkingMemory,
) -> LayerState:
    """Build the state of a layer.

    Args:
        tokens: (E, T) tokens of each expert, in mean rank loads.
        weight: (T,) summing to 1.
        origin: (E, R) share of each expert's tokens that start on a rank.
        row: (S,) expert of each slot at the start; copied.
        current: (S,) expert of each slot at present; None for no placement: then no copy has a
            price.
        objective: names the dispatch and the nodes.
        cross_node_factor: price of a copy that no rank of the node can send.
        base: (R, T) load of each rank without routed experts, in mean rank loads.
        floor: (T,) time that every rank takes at least, in layer times.
        memory: shared by layers of a search that are worked on one after the other.
    """
    experts, steps = tokens.shape
    ranks = len(objective.node_of_rank)
    nodes = objective.node_of_rank
    if current is None:
        prices = _free_copies(experts, ranks)
    else:
        prices = _prices_of(copy_prices(current, experts, nodes, float(cross_node_factor)))
    tokens = np.ascontiguousarray(tokens)
    layer = LayerState(
        tokens=tokens,
        work=tokens if objective.work.proportional else np.zeros_like(tokens),
        one_more=tokens if objective.work.proportional else np.zeros_like(tokens),
        base=np.ascontiguousarray(base),
        floor_power=np.asarray(ranks * floor ** (2.0**objective.costs.doublings), np.float64),
        weight=weight,
        origin=np.ascontiguousarray(origin),
        row=row.astype(np.int32, copy=True),
        held=np.zeros((experts, ranks), np.int32),
        copies=np.zeros(experts, np.int64),
        share=np.zeros((experts, ranks)),
        rank_load=np.zeros((ranks, steps)),
        **prices._asdict(),
        **memory._asdict(),
    )
    load_ranks(layer, objective)
    return layer
