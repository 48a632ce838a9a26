"""Puts all tokens of an expert on one replica, so that few experts are active on every rank.

This is how the planner scores dispatch by the fewest active experts: (L, S) placements against
(T, L, E) windows. The choice itself is in `fewest_active`, which `dispatch.fewest` uses too, so the
replicas are those that the engine chooses for the same batch and placement.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.fewest_active import choose_replicas, slots_by_expert
from evenkeel_moe.jit import kernel


@kernel
def fewest_split_kernel(
    load: NDArray[np.float64], phy2log: NDArray[np.int32], num_ranks: int
) -> NDArray[np.float64]:
    """Split a load with the fewest active experts on the worst rank of each batch.

    Args:
        load: (T, L, E) [tokens], float64 or uint32, finite. Tokens of an expert without a replica
            are in no slot; check for them before.
        phy2log: (L, S) logical expert of each slot, negative if empty. Not read-only: numba would
            compile another version for such an array.
        num_ranks: R.

    Returns:
        (T, L, S) float64 [tokens] per slot: all tokens of an expert on the slot that serves it.
    """
    steps, layers, experts = load.shape
    out = np.zeros((steps, layers, phy2log.shape[1]))
    active = np.empty(num_ranks, np.int64)
    tokens = np.empty(num_ranks)
    chosen = np.empty(experts, np.int64)
    for layer in range(layers):
        row = phy2log[layer]
        first, following = slots_by_expert(row, experts, num_ranks)
        for t in range(steps):
            routed = load[t, layer]
            choose_replicas(routed, row, first, following, active, tokens, chosen)
            for expert in range(experts):
                if chosen[expert] >= 0:
                    out[t, layer, chosen[expert]] = routed[expert]
    return out
