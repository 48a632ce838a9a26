"""Numba kernels of CRAFT: the replay under many placements, and the knapsack over layers."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel

_BLOCK = 64
"""Steps replayed together, in single precision: their rank loads stay in the first-level cache."""


@kernel
def replay_layer(
    load: NDArray[np.float64], rows: NDArray[np.int32], share: NDArray[np.float32], num_ranks: int
) -> NDArray[np.float64]:
    """Return the mean balancedness of one layer, over the steps that have load, for each placement.

    Args:
        load: (T, E) [tokens]; may be a strided view.
        rows: (K, S) slots of each placement.
        share: (K, S) share of its expert's tokens that each slot takes.
        num_ranks: R.

    Returns:
        (K,) float64; 1 where the window has no load, because nothing can be gained then.
    """
    steps, experts = load.shape
    plans, slots = rows.shape
    per_rank = slots // num_ranks
    tokens = np.empty((experts, _BLOCK), np.float32)
    total = np.empty(_BLOCK, np.float32)
    rank_load = np.empty(_BLOCK, np.float32)
    peak = np.empty(_BLOCK, np.float32)
    sums = np.zeros(plans)
    counted = 0
    for start in range(0, steps, _BLOCK):
        width = min(_BLOCK, steps - start)
        if width < _BLOCK:
            tokens[:] = np.float32(0.0)
        for b in range(width):
            for expert in range(experts):
                tokens[expert, b] = np.float32(load[start + b, expert])
        total[:] = np.float32(0.0)
        for expert in range(experts):
            for b in range(_BLOCK):
                total[b] += tokens[expert, b]
        for b in range(width):
            counted += total[b] > 0.0
        for plan in range(plans):
            peak[:] = np.float32(0.0)
            for rank in range(num_ranks):
                rank_load[:] = np.float32(0.0)
                for slot in range(rank * per_rank, (rank + 1) * per_rank):
                    part = share[plan, slot]
                    if part > 0.0:
                        held = np.uint32(rows[plan, slot])
                        for b in range(_BLOCK):
                            rank_load[b] += part * tokens[held, b]
                for b in range(_BLOCK):
                    if rank_load[b] > peak[b]:
                        peak[b] = rank_load[b]
            for b in range(width):
                if total[b] > 0.0:
                    sums[plan] += float(total[b]) / num_ranks / float(peak[b])
    if counted == 0:
        return np.ones(plans)
    return sums / counted


@kernel
def knapsack(
    value: NDArray[np.float64], counts: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Run Algorithm 2 for every capacity at once.

    Args:
        value: (K, L) value of giving layer l `counts[k]` replicas.
        counts: (K,) replicas, positive.
        capacity: C.

    Returns:
        best: (C + 1,) highest value with at most c replicas. Zero replicas have the value 0, so it
            never falls below 0 and never falls with c.
        choice: (L, C + 1) index into `counts` taken for a layer, -1 for none.

    Complexity: O(L C K) time, O(L C) space.
    """
    options, layers = value.shape
    best = np.zeros(capacity + 1)
    choice = np.full((layers, capacity + 1), -1)
    for layer in range(layers):
        before = best.copy()
        for c in range(capacity + 1):
            for k in range(options):
                if counts[k] <= c and before[c - counts[k]] + value[k, layer] > best[c]:
                    best[c] = before[c - counts[k]] + value[k, layer]
                    choice[layer, c] = k
    return best, choice
