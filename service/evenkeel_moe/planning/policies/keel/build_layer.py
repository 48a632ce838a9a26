"""Builds the state of a layer from its tokens, its start and the current placement."""

import math

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective, load_ranks


def _aligned_zeros(*shape: int) -> NDArray[np.float64]:
    """Return an array of zeros that starts at a cache line.

    Numpy aligns to 16 bytes; vector loads that cross cache lines make `refresh` take twice as long.
    """
    size = math.prod(shape)
    memory = np.zeros(size + 8)
    skipped = -memory.ctypes.data % 64 // memory.itemsize
    return memory[skipped : skipped + size].reshape(shape)


def _copy_prices(
    current: NDArray[np.int32] | None,
    experts: int,
    nodes: NDArray[np.int64],
    cross_node_factor: float,
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return `had` and `copy_price` of a `LayerState`; arguments as in `build_layer`."""
    ranks = len(nodes)
    if current is None:
        return np.ones((experts, ranks), np.bool_), np.zeros((experts, ranks))
    had = np.zeros((experts, ranks), np.bool_)
    holders = np.arange(len(current)) // (len(current) // ranks)
    filled = current >= 0
    had[current[filled], holders[filled]] = True
    on_node = np.zeros((experts, int(nodes.max()) + 1), np.bool_)
    for rank in range(ranks):
        on_node[:, nodes[rank]] |= had[:, rank]
    price = np.where(had, 0.0, np.where(on_node[:, nodes], 1.0, cross_node_factor))
    return had, price


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
    """
    experts, steps = tokens.shape
    ranks = len(objective.node_of_rank)
    had, copy_price = _copy_prices(current, experts, objective.node_of_rank, cross_node_factor)
    cheapest = np.where(had, np.inf, copy_price).min(axis=1)
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
        held=np.zeros((experts, ranks), np.int64),
        copies=np.zeros(experts, np.int64),
        share=np.zeros((experts, ranks)),
        had=had,
        copy_price=copy_price,
        homes=had.sum(axis=1),
        cheapest=np.where(had.all(axis=1), 0.0, cheapest),
        dearest=np.array([copy_price.max()]),
        rank_load=np.zeros((ranks, steps)),
        powers=np.zeros((ranks, steps)),
        power_sum=np.zeros(steps),
        norm=np.zeros(steps),
        rank_slope=_aligned_zeros(steps, ranks),
        slope=_aligned_zeros(experts, ranks),
        scratch=np.zeros(steps),
        moved=np.zeros((2, ranks)),
        after=np.zeros((4, steps)),
    )
    load_ranks(layer, objective)
    return layer
