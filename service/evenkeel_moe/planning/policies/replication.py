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
    # Load per copy; -1 marks an expert that may get no further copy.
    per_copy = np.empty(experts, np.float32)
    for row in range(rows):
        for expert in range(experts):
            logical[row, expert] = expert
            per_copy[expert] = weight[row, expert] if max_copies > 1 else np.float32(-1.0)
        for slot in range(experts, num_slots):
            best = 0
            for expert in range(1, experts):
                if per_copy[expert] > per_copy[best]:
                    best = expert
            if per_copy[best] < 0:
                break
            if per_copy[best] == 0:
                # No load is left to divide. Take the expert with the fewest copies, or one expert
                # would get every slot.
                best = -1
                for expert in range(experts):
                    if per_copy[expert] == 0 and (
                        best < 0 or logcnt[row, expert] < logcnt[row, best]
                    ):
                        best = expert
            logical[row, slot] = best
            logcnt[row, best] += 1
            if logcnt[row, best] >= max_copies:
                per_copy[best] = np.float32(-1.0)
            else:
                per_copy[best] = weight[row, best] / np.float32(logcnt[row, best])
    return logical, logcnt
