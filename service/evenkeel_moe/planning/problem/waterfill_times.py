"""Pours the work of shared experts onto the least loaded ranks, as Waterfill does per batch.

Every rank holds the shared expert, so its work can go to any rank. It fills the routed work of the
ranks like water. The rank with the most work then has the larger of the routed peak and the
waterline (total work / R): below the waterline nothing but the placement can help.

`dispatch.waterfill` draws a rank for each token in proportion to the room below the waterline, and
by default only among the ranks that the token visits. Both reach this peak if enough tokens visit
ranks with room; how the ranks below the peak share the rest may differ.

Source: SGLang's dispatch blog, "Waterfill Dispatch Strategy".
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.checks import check_values


def waterfilled_work(
    routed: NDArray[np.generic], shared: NDArray[np.generic]
) -> NDArray[np.float64]:
    """Return the work of each rank after the shared work is poured onto the least loaded ranks.

    Args:
        routed: (T, L, R) [tokens] routed work of each rank.
        shared: (T, L) [tokens] shared work of the whole batch, in routed choices: tokens times the
            routed experts that one shared expert costs.

    Returns:
        (T, L, R) float64 [tokens]: the larger of the routed work and the level that the poured work
        reaches; the sum over ranks is the sum of both inputs. Without shared work, the routed work.

    Raises:
        ShapeMismatch: the arrays are not of the same steps and layers, or there is no rank.
        InvalidInput: values that are negative or not finite.
    """
    if routed.ndim != 3 or routed.shape[2] == 0 or shared.shape != routed.shape[:2]:
        raise ShapeMismatch(
            "routed work must be (T, L, R) with R at least 1 and shared work (T, L),"
            f" got {routed.shape} and {shared.shape}"
        )
    work = np.ascontiguousarray(routed, np.float64)
    poured = np.ascontiguousarray(shared, np.float64)
    if work.size:
        check_values("routed work", work)
        check_values("shared work", poured)
    return waterfill_kernel(work, poured)


@kernel
def waterfill_kernel(
    routed: NDArray[np.float64], shared: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Pour (T, L) shared onto (T, L, R) routed work; see `waterfilled_work`."""
    steps, layers, ranks = routed.shape
    out = np.empty((steps, layers, ranks))
    for t in range(steps):
        for layer in range(layers):
            level = fill_level(routed[t, layer], shared[t, layer])
            for rank in range(ranks):
                out[t, layer, rank] = max(routed[t, layer, rank], level)
    return out


@kernel
def fill_level(routed: NDArray[np.float64], shared: float) -> float:
    """Return the level that shared work reaches on (R,) routed work; 0 without shared work.

    The level starts as if all ranks were below it. Ranks above it take nothing, so the rest of the
    ranks has less to share and the level falls, until no further rank is above it.
    """
    if shared <= 0.0:
        return 0.0
    ranks = routed.shape[0]
    below = ranks
    level = (routed.sum() + shared) / ranks
    while True:
        total = shared
        wet = 0
        for rank in range(ranks):
            if routed[rank] <= level:
                total += routed[rank]
                wet += 1
        # Rounding may lift the level by a last bit, so `below` must fall for another round.
        if wet >= below or wet == 0:
            return float(level)
        below = wet
        level = total / wet
