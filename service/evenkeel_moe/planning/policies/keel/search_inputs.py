"""Converts what a search of all layers needs of a problem to the units of the search."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.state import SearchObjective, SmoothCosts
from evenkeel_moe.planning.policies.keel.window import SearchWindow
from evenkeel_moe.planning.policies.keel.work import smooth_work
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, origin_shares
from evenkeel_moe.planning.problem.token_split import SplitModel


def scaled_objective(
    problem: PlacementProblem, window: SearchWindow, options: KeelOptions, sharp: bool
) -> SearchObjective:
    """Convert the problem's objective to search units, and curves without stairs to lines."""
    unit_tokens, unit_cost = window.unit_tokens, window.unit_cost
    ranks, costs = problem.shape.num_ranks, problem.objective.cost.curves
    replica, dispatch = problem.objective.cost.replica, problem.objective.dispatch
    tile, stairs = 0.0, np.zeros((ranks, 1))
    if costs is None:
        rates = np.ones(ranks) * unit_tokens / unit_cost
    else:
        _, seconds, slope = moe_time.curve_arrays(costs, ranks)
        rates = slope * unit_tokens / unit_cost
        straight = np.arange(1, seconds.shape[1] + 1) * costs.tile_tokens * slope[:, None]
        if costs.tile_tokens != 1 or not np.allclose(seconds, straight, rtol=1e-9, atol=0.0):
            tile, stairs = costs.tile_tokens / unit_tokens, seconds / unit_cost
    doublings = options.sharp_doublings if sharp else options.smooth_doublings
    quick = sharp or window.merged
    return SearchObjective(
        costs=SmoothCosts(rates, tile, stairs, doublings),
        quick=quick,
        swap_share=options.swap_share if quick else 1.0,
        nearest=dispatch is DispatchModel.NEAREST and replica.proportional,
        node_of_rank=np.array(problem.topology.node_of_rank, np.int64),
        work=smooth_work(replica, unit_tokens, single=dispatch is DispatchModel.FEWEST),
        drops=not replica.proportional,
    )


def unplanned(
    problem: PlacementProblem, load: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what no placement changes: the work of shared experts, and a least time.

    Under Waterfill the shared experts run where there is room, so only the level that they reach
    counts: below it, the routed load of a rank does not matter. It is a level of work, so the
    slowest rank gives the time.

    Returns:
        (L, R, T) [tokens] and (T, L) in the unit of the score; the other of the two is 0. A single
        layer of the first stands for all.
    """
    cost, ranks = problem.objective.cost, problem.shape.num_ranks
    if problem.objective.dispatch is DispatchModel.WATERFILL and cost.shared_tokens > 0.0:
        level = np.maximum(moe_time.waterline_times(load, ranks, cost) - cost.fixed, 0.0)
        return np.zeros((1, ranks, load.shape[0])), level
    if cost.shared_tokens == 0.0:
        return np.zeros((1, ranks, load.shape[0])), np.zeros(load.shape[:2])
    shared = moe_time.shared_work(load, ranks, cost, SplitModel.of(problem))
    return np.moveaxis(shared, 0, 2), np.zeros(load.shape[:2])


def source_shares(problem: PlacementProblem) -> NDArray[np.float64]:
    """Return (L, E, R) shares of an expert's tokens that start on a rank.

    A single layer of even shares stands for all if the ranks are unknown.
    """
    shape = problem.shape
    if problem.source_load is None:
        return np.full((1, shape.num_logical_experts, shape.num_ranks), 1.0 / shape.num_ranks)
    return np.ascontiguousarray(np.moveaxis(origin_shares(problem.source_load, shape), 0, 2))
