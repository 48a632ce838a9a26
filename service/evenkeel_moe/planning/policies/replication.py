"""Decides how many copies each expert gets, from its load alone.

Source: deepseek-ai/EPLB eplb.py@d52c72d, replication step: a redundant slot goes to the expert with
the most load per copy.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason, ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY


def replicate_experts(
    weight: NDArray[np.float32], num_slots: int, max_copies: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Give every expert one slot, and each further slot to the expert with the most load per copy.

    Args:
        weight: (X, n) float32 [tokens] - load of n experts in each of X rows (layers, or layers x
            nodes).
        num_slots: slots to fill in every row.
        max_copies: most copies of one expert; None for no bound.

    Returns:
        logical: (X, num_slots) int32 - slots 0..n-1 hold expert 0..n-1, then follow the redundant
            copies in the order they were given; EMPTY once every expert has `max_copies`.
        logcnt: (X, n) int32 - copies of each expert.

    Raises:
        ShapeMismatch: `weight` is not two-dimensional.
        InfeasiblePlan: fewer slots than experts.

    Order: the lower expert id wins a tie; at zero load the expert with the fewest copies.
    """
    if weight.ndim != 2:
        raise ShapeMismatch(f"weight must be (X, n), got {weight.shape}")
    if num_slots < weight.shape[1]:
        raise InfeasiblePlan(
            f"{num_slots} slots cannot hold one copy each of {weight.shape[1]} experts",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    bound = num_slots if max_copies is None else max_copies
    return _replicate(np.ascontiguousarray(weight, np.float32), num_slots, bound)


@kernel
def _replicate(
    weight: NDArray[np.float32], num_slots: int, max_copies: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    rows, experts = weight.shape
    logical = np.full((rows, num_slots), np.int32(EMPTY), np.int32)
    logcnt = np.ones((rows, experts), np.int32)
    # A complete binary tree over the experts. Each node names the expert below it that comes first,
    # and the leaves are the second half.
    leaves = 1
    while leaves < experts:
        leaves *= 2
    tree = np.arange(2 * leaves) - leaves
    copies = np.empty(leaves, np.int32)
    # Load per copy; -1 marks an expert that may get no further copy.
    per_copy = np.full(leaves, np.float32(-1.0), np.float32)
    for row in range(rows):
        copies[:] = 1
        for expert in range(experts):
            logical[row, expert] = expert
            per_copy[expert] = weight[row, expert] if max_copies > 1 else np.float32(-1.0)
        for node in range(leaves - 1, 0, -1):
            tree[node] = _first(tree[2 * node], tree[2 * node + 1], per_copy, copies)
        for slot in range(experts, num_slots):
            best = tree[1]
            if per_copy[best] < 0:
                break
            logical[row, slot] = best
            copies[best] += 1
            if copies[best] >= max_copies:
                per_copy[best] = np.float32(-1.0)
            else:
                per_copy[best] = weight[row, best] / np.float32(copies[best])
            node = (leaves + best) // 2
            while node > 0:
                tree[node] = _first(tree[2 * node], tree[2 * node + 1], per_copy, copies)
                node //= 2
        logcnt[row] = copies[:experts]
    return logical, logcnt


@kernel
def _first(low: int, high: int, per_copy: NDArray[np.float32], copies: NDArray[np.int32]) -> int:
    """Return the one of two experts that gets a copy before the other; `low` has the lower id.

    Where no load is left to divide, it is the one with fewer copies, or one expert would get every
    slot.
    """
    if per_copy[low] != per_copy[high]:
        return low if per_copy[low] > per_copy[high] else high
    if per_copy[low] == 0:
        return low if copies[low] <= copies[high] else high
    return low
