"""The only definitions of rank load and balancedness; `moe_time` has those of predicted time.

Balance is taken over the ranks of one layer in one step and summarised only afterwards. Without
load there is no balance: NaN, never 1 or 0.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import kernels
from evenkeel_moe.planning.problem.token_split import (
    EVEN_SPLIT,
    SplitModel,
    check_counts,
    slot_load,
    slot_shares,
)


def rank_load(
    load: NDArray[np.generic],
    placement: Placement,
    split: SplitModel = EVEN_SPLIT,
    most: float = np.inf,
) -> NDArray[np.float64]:
    """Return the load of each EP rank in every step.

    Args:
        load: (T, L, E) [tokens] - routed tokens per step.
        placement: (L, S) slots on R ranks.
        split: how the engine divides an expert's tokens over its replicas.
        most: at most so many tokens of a replica count; all by default.

    Returns:
        (T, L, R) float64 [tokens]; the sum over ranks is the sum over experts if all tokens count.

    Raises:
        ShapeMismatch: load and placement differ in layers or experts.
        InfeasiblePlan: an expert that has load has no replica.

    Source: deepseek-ai/EPLB eplb.py@d52c72d step 3 for the even split.
    """
    tokens = check_counts(load, placement)
    ranks = placement.num_ranks
    if split.dispatch.per_batch:
        per_slot = np.minimum(slot_load(tokens, placement, split), most)
        by_rank = per_slot.reshape(*per_slot.shape[:2], ranks, placement.slots_per_rank)
        return np.asarray(by_rank.sum(axis=3), np.float64)
    rows, shares = placement.phy2log.copy(), slot_shares(placement, split)
    return kernels.rank_load_kernel(tokens, rows, shares, ranks, most)


def rank_totals(
    load: NDArray[np.generic], placement: Placement, split: SplitModel = EVEN_SPLIT
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tokens and the active replicas of each EP rank in every step, over all layers.

    A replica with less than one token, as an even split gives it on average, runs in some steps
    only, and counts as that share of an active one.

    Args:
        load: (T, L, E) [tokens] - routed tokens per step.
        placement: (L, S) slots on R ranks.
        split: how the engine divides an expert's tokens over its replicas.

    Returns:
        (T, R) float64 [tokens], (T, R) float64 [replicas].

    Raises:
        ShapeMismatch: load and placement differ in layers or experts.
        InfeasiblePlan: an expert that has load has no replica.
    """
    active = rank_load(load, placement, split, most=1.0)
    return rank_load(load, placement, split).sum(axis=1), active.sum(axis=1)


def balancedness(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over ranks divided by the maximum over ranks of the rank load.

    Args:
        rank_load: (..., R) [tokens] - the last axis is the ranks.

    Returns:
        (...) float64 in (0, 1], NaN without load.
    """
    worst = rank_load.max(axis=-1)
    mean = rank_load.sum(axis=-1) / rank_load.shape[-1]
    # Without rounding errors, a mean never exceeds the maximum.
    balance = np.minimum(mean / np.where(worst > 0.0, worst, 1.0), 1.0)
    return np.where(worst > 0.0, balance, np.nan)


def balancedness_by_layer(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the balancedness of each layer, averaged over the steps in which it had load.

    Args:
        rank_load: (T, L, R) [tokens].

    Returns:
        (L,) float64 in (0, 1], NaN for a layer without load in any step.
    """
    if rank_load.ndim != 3:
        raise ShapeMismatch(f"rank load must be (T, L, R), got {rank_load.shape}")
    values = balancedness(rank_load)
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    steps = known.sum(axis=0)
    return np.where(steps > 0, total / np.maximum(steps, 1), np.nan)


def balancedness_mean(rank_load: NDArray[np.float64]) -> float:
    """Return the mean over layers of `balancedness_by_layer`; NaN if no layer has load.

    rank_load: (T, L, R).
    """
    values = balancedness_by_layer(rank_load)
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def balancedness_worst(rank_load: NDArray[np.float64]) -> float:
    """Return the minimum over layers of `balancedness_by_layer`; NaN if no layer has load.

    rank_load: (T, L, R).
    """
    values = balancedness_by_layer(rank_load)
    known = values[~np.isnan(values)]
    return float(known.min()) if known.size else float("nan")
