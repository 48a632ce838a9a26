"""The only definitions of rank load, balancedness, predicted MoE time and its fluid bound.

Balance is taken over the ranks of one layer in one step and summarised only afterwards. Without
load there is no balance: NaN, never 1 or 0.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import kernels
from evenkeel_moe.planning.problem.objective import CostCurves, DispatchModel
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.problem.token_split import (
    EVEN_SPLIT,
    SplitModel,
    check_counts,
    check_load,
    slot_load,
    slot_shares,
)


def rank_load(
    load: NDArray[np.generic], placement: Placement, split: SplitModel = EVEN_SPLIT
) -> NDArray[np.float64]:
    """Return the load of each EP rank in every step.

    Args:
        load: (T, L, E) [tokens] - routed tokens per step.
        placement: (L, S) slots on R ranks.
        split: how the engine divides an expert's tokens over its replicas.

    Returns:
        (T, L, R) float64 [tokens]; the sum over ranks is the sum over experts.

    Raises:
        ShapeMismatch: load and placement differ in layers or experts.
        InfeasiblePlan: an expert that has load has no replica.

    Source: deepseek-ai/EPLB eplb.py@d52c72d step 3 for the even split.
    """
    tokens = check_counts(load, placement)
    if split.dispatch is DispatchModel.OPTIMAL:
        per_slot = slot_load(tokens, placement, split)
        by_rank = per_slot.reshape(
            *per_slot.shape[:2], placement.num_ranks, placement.slots_per_rank
        )
        return np.asarray(by_rank.sum(axis=3), np.float64)
    return kernels.rank_load_kernel(
        tokens, placement.phy2log.copy(), slot_shares(placement, split), placement.num_ranks
    )


def window_rank_load(
    load: NDArray[np.generic], placement: Placement, split: SplitModel = EVEN_SPLIT
) -> NDArray[np.float64]:
    """Return the (L, R) float64 [tokens] load of each EP rank over a whole window.

    It hides imbalance that changes from step to step; judge a placement by `rank_load` per step.
    """
    return np.asarray(rank_load(load, placement, split).sum(axis=0), np.float64)


def balancedness(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over ranks divided by the maximum over ranks of the rank load.

    Args:
        rank_load: (..., R) [tokens] - the last axis is the ranks.

    Returns:
        (...) float64 in (0, 1], NaN without load.
    """
    values = np.ascontiguousarray(rank_load, np.float64)
    flat = values.reshape(-1, values.shape[-1])
    return kernels.balancedness_kernel(flat).reshape(values.shape[:-1])


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


def cost_arrays(
    costs: CostCurves | None, num_ranks: int
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Return cost curves in the form of `kernels.token_cost`: (tile, (R, K) seconds, (R,) slope).

    Without curves, tile is 0, which stands for C_r(n) = n.

    Raises:
        ShapeMismatch: curves for another number of ranks.
    """
    if costs is None:
        return 0.0, np.zeros((num_ranks, 1)), np.ones(num_ranks)
    if costs.tile_seconds.shape[0] != num_ranks:
        raise ShapeMismatch(
            f"cost curves are for {costs.tile_seconds.shape[0]} ranks, placement has {num_ranks}"
        )
    if costs.tile_seconds.shape[1] < 1:
        raise InvalidInput("cost curves need at least one tile")
    return (
        float(costs.tile_tokens),
        np.array(costs.tile_seconds, np.float64, order="C"),
        np.array(costs.slope_s_per_token, np.float64, order="C"),
    )


def rank_seconds(rank_load: NDArray[np.float64], costs: CostCurves | None) -> NDArray[np.float64]:
    """Return C_r(rank load): (..., R) [tokens] -> [s], or [tokens] without curves."""
    tile, tile_seconds, slope = cost_arrays(costs, rank_load.shape[-1])
    if tile == 0.0:
        return np.array(rank_load, np.float64)
    tiles = tile_seconds.shape[1]
    used = np.clip(np.ceil(rank_load / tile - kernels.TILE_SLACK).astype(np.int64), 1, None)
    within = tile_seconds[np.arange(len(slope)), np.minimum(used, tiles) - 1]
    beyond = np.where(used > tiles, slope * (rank_load - tiles * tile), 0.0)
    return np.where(rank_load > 0, within + beyond, 0.0)


def step_times(
    load: NDArray[np.generic],
    placement: Placement,
    costs: CostCurves | None = None,
    split: SplitModel = EVEN_SPLIT,
) -> NDArray[np.float64]:
    """Return the predicted time of every step and layer: the maximum over ranks of C_r(rank load).

    Returns:
        (T, L) float64 [s], or [tokens] without curves.

    Raises:
        ShapeMismatch: load, placement or curves of different deployments.
        InfeasiblePlan: an expert that has load has no replica.
    """
    if split.dispatch is DispatchModel.OPTIMAL:
        return np.asarray(
            rank_seconds(rank_load(load, placement, split), costs).max(axis=2), np.float64
        )
    return kernels.step_times_kernel(
        check_load(load, placement),
        placement.phy2log.copy(),
        slot_shares(placement, split),
        placement.num_ranks,
        *cost_arrays(costs, placement.num_ranks),
    )


def predicted_time(
    load: NDArray[np.generic],
    placement: Placement,
    costs: CostCurves | None = None,
    split: SplitModel = EVEN_SPLIT,
) -> float:
    """Return the predicted MoE time of a placement on a window, the sum of `step_times`.

    Source: GEM eq. 1.
    """
    return float(step_times(load, placement, costs, split).sum())


def score(problem: PlacementProblem, placement: Placement) -> float:
    """Return the `predicted_time` of a placement under the load and objective of the problem."""
    return predicted_time(problem.load, placement, problem.objective.costs, SplitModel.of(problem))


def fluid_times(
    load: NDArray[np.generic], num_ranks: int, costs: CostCurves | None = None
) -> NDArray[np.float64]:
    """Return the time of every step and layer if tokens could be split freely over all ranks.

    Args:
        load: (T, L, E) [tokens].
        num_ranks: R.
        costs: with curves, faster ranks take more: the time is the least v at which all ranks
            together can take the tokens of the layer with no rank above v.

    Returns:
        (T, L) float64 [s], or [tokens] without curves. No placement or dispatcher is faster.
    """
    if load.ndim != 3:
        raise ShapeMismatch(f"load must be (T, L, E), got {load.shape}")
    totals = np.asarray(load, np.float64).sum(axis=2)
    tile, tile_seconds, slope = cost_arrays(costs, num_ranks)
    if tile == 0.0:
        return np.asarray(totals / num_ranks, np.float64)
    levels = np.unique(np.concatenate([[0.0], tile_seconds.ravel()]))
    capacity, growth = _capacity_at(levels, tile, tile_seconds, slope)
    # Between two levels the capacity grows by the ranks beyond their last tile; at a level it
    # jumps.
    hit = np.searchsorted(capacity, totals * (1.0 - kernels.TILE_SLACK))
    below = np.clip(hit - 1, 0, None)
    missing = totals - capacity[below]
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = levels[below] + np.where(missing > 0, missing / growth[below], 0.0)
    ceiling = np.where(hit < len(levels), levels[np.minimum(hit, len(levels) - 1)], np.inf)
    return np.where(totals > 0, np.where(hit == 0, levels[0], np.minimum(grown, ceiling)), 0.0)


def _capacity_at(
    levels: NDArray[np.float64],
    tile: float,
    tile_seconds: NDArray[np.float64],
    slope: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tokens all ranks take within each level of seconds, and their growth above."""
    capacity = np.zeros(len(levels))
    growth = np.zeros(len(levels))
    tiles = tile_seconds.shape[1]
    for seconds, rate in zip(tile_seconds, slope, strict=True):
        capacity += np.searchsorted(seconds, levels, side="right") * tile
        past = levels >= seconds[-1]
        if rate > 0.0:
            capacity += np.where(past, (levels - seconds[tiles - 1]) / rate, 0.0)
            growth += np.where(past, 1.0 / rate, 0.0)
        else:
            capacity[past] = np.inf
    return capacity, growth


def fluid_bound(
    load: NDArray[np.generic], num_ranks: int, costs: CostCurves | None = None
) -> float:
    """Return the sum of `fluid_times`, a lower bound on the predicted time of every placement."""
    return float(fluid_times(load, num_ranks, costs).sum())


def time_over_fluid(
    load: NDArray[np.generic],
    placement: Placement,
    costs: CostCurves | None = None,
    split: SplitModel = EVEN_SPLIT,
) -> float:
    """Return predicted time / fluid bound, >= 1, the main measure of quality; NaN without load."""
    bound = fluid_bound(load, placement.num_ranks, costs)
    return predicted_time(load, placement, costs, split) / bound if bound > 0 else float("nan")
