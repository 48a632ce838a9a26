"""Computes what a copy costs on each rank, by where the expert is at present."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel


@kernel
def copy_prices(
    current: NDArray[np.int32], experts: int, nodes: NDArray[np.int64], cross_node_factor: float
) -> NDArray[np.float32]:
    """Compute the price of a copy of each expert on each rank, in copies inside a node.

    Args:
        current: (S,) expert of each slot at present, -1 for empty.
        experts: E.
        nodes: (R,) node of each rank.
        cross_node_factor: price of a copy that no rank of the node can send.

    Returns:
        (E, R) - 0 where the rank has the expert, 1 where another rank of its node has it, else the
        factor.
    """
    ranks = nodes.shape[0]
    per_rank = current.shape[0] // ranks
    far = np.float32(cross_node_factor)
    on_node = np.zeros((experts, nodes.max() + 1), np.bool_)
    for slot in range(current.shape[0]):
        if current[slot] >= 0:
            on_node[current[slot], nodes[slot // per_rank]] = True
    prices = np.empty((experts, ranks), np.float32)
    for expert in range(experts):
        for rank in range(ranks):
            prices[expert, rank] = 1.0 if on_node[expert, nodes[rank]] else far
    for slot in range(current.shape[0]):
        if current[slot] >= 0:
            prices[current[slot], slot // per_rank] = 0.0
    return prices
