"""The only definitions of predicted MoE time, its fluid bound and time balance.

Times are those of a `CostModel`, in its unit. The time of a layer in a step is that of its slowest
rank.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.model.cost import TOKENS, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import kernels
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.problem.token_split import (
    EVEN_SPLIT,
    SplitModel,
    check_load,
    slot_load,
    slot_shares,
    source_shares,
)

_BLOCK_STEPS = 16
"""Steps of a window that are converted to float64 at a time."""


def replica_work(tokens: NDArray[np.float64], replica: ReplicaWork) -> NDArray[np.float64]:
    """Return the work w(n) of replicas by their tokens; any shape, both in tokens."""
    if replica.proportional:
        return tokens
    flat = np.ascontiguousarray(tokens, np.float64).reshape(-1)
    return kernels.replica_work_kernel(flat, kernels.work_terms(replica)).reshape(tokens.shape)


def shared_work(
    load: NDArray[np.generic], num_ranks: int, cost: CostModel, split: SplitModel = EVEN_SPLIT
) -> NDArray[np.float64]:
    """Return the (T, L, R) work of shared experts, which a rank computes for its own tokens.

    Without source loads, tokens start evenly on all ranks.
    """
    steps, layers, _ = load.shape
    if cost.shared_tokens == 0.0:
        return np.zeros((steps, layers, num_ranks))
    total = np.asarray(load, np.float64).sum(axis=2)
    return np.asarray(
        (cost.shared_tokens * total)[:, :, None] * source_shares(split, num_ranks, layers),
        np.float64,
    )


def rank_work(
    load: NDArray[np.generic],
    placement: Placement,
    cost: CostModel = TOKENS,
    split: SplitModel = EVEN_SPLIT,
) -> NDArray[np.float64]:
    """Return the (T, L, R) work of each rank in every step, shared experts included [tokens].

    Raises:
        ShapeMismatch: load, placement or curves of different deployments.
        InfeasiblePlan: an expert that has load has no replica.
    """
    cost.check_ranks(placement.num_ranks)
    per_slot = replica_work(slot_load(load, placement, split), cost.replica)
    by_rank = per_slot.reshape(*per_slot.shape[:2], placement.num_ranks, placement.slots_per_rank)
    routed = np.asarray(by_rank.sum(axis=3), np.float64)
    if split.dispatch is DispatchModel.WATERFILL:
        tokens = np.asarray(load, np.float64).sum(axis=2)
        return waterfilled_work(routed, cost.shared_tokens * tokens)
    return routed + shared_work(load, placement.num_ranks, cost, split)


def waterfilled_work(
    routed: NDArray[np.float64], shared: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the work of each rank after shared work is poured onto the least loaded ranks.

    Every rank holds the shared expert, so its work can go to any rank, and fills the routed work of
    the ranks like water. The rank with the most work then has the larger of the routed peak and the
    waterline (total work / R): below the waterline nothing but the placement can help.

    `dispatch.waterfill` draws a rank for each token in proportion to the room below the waterline,
    and by default only among the ranks that the token visits. Both reach this peak if enough tokens
    visit ranks with room; how the ranks below the peak share the rest may differ.

    Args:
        routed: (T, L, R) [tokens] routed work of each rank, not negative.
        shared: (T, L) [tokens] shared work of the whole batch, not negative.

    Returns:
        (T, L, R) float64 [tokens]: the larger of the routed work and the level that the poured work
        reaches; the sum over ranks is the sum of both inputs.

    Source: SGLang's dispatch blog, "Waterfill Dispatch Strategy".
    """
    # If it is poured onto the n lowest ranks alone, the level is lowest for the n that it covers.
    below = np.sort(routed, axis=2).cumsum(axis=2) + shared[:, :, None]
    level = (below / np.arange(1, routed.shape[2] + 1)).min(axis=2, keepdims=True)
    return np.where(shared[:, :, None] > 0.0, np.maximum(routed, level), routed)


def rank_times(work: NDArray[np.float64], cost: CostModel = TOKENS) -> NDArray[np.float64]:
    """Return T_r of (..., R) work [tokens], in the unit of the cost model.

    The fixed part is counted where a rank has work.
    """
    cost.check_ranks(work.shape[-1])
    flat = np.ascontiguousarray(work, np.float64).reshape(-1, work.shape[-1])
    terms = kernels.time_terms(cost, work.shape[-1])
    return kernels.rank_times_kernel(flat, terms).reshape(work.shape)


def step_times(
    load: NDArray[np.generic],
    placement: Placement,
    cost: CostModel = TOKENS,
    split: SplitModel = EVEN_SPLIT,
) -> NDArray[np.float64]:
    """Return the predicted time of every step and layer: the maximum over ranks of T_r.

    Returns:
        (T, L) float64 in the unit of the cost model.

    Raises:
        ShapeMismatch: load, placement or curves of different deployments.
        InfeasiblePlan: an expert that has load has no replica.
    """
    ranks = placement.num_ranks
    if split.dispatch.per_batch or split.dispatch is DispatchModel.WATERFILL:
        return np.asarray(
            rank_times(rank_work(load, placement, cost, split), cost).max(axis=2), np.float64
        )
    cost.check_ranks(ranks)
    if placement.slots_per_rank == 1 and cost.by_tokens and split.dispatch is DispatchModel.EVEN:
        # All ranks with an expert take equally long: there may be thousands.
        share = 1.0 / np.maximum(placement.logcnt, 1)
        tokens = check_load(load, placement)
        return np.array([(step * share).max(axis=1) for step in tokens]).reshape(tokens.shape[:2])
    return kernels.step_times_kernel(
        check_load(load, placement),
        placement.phy2log.copy(),
        slot_shares(placement, split),
        cost.shared_tokens * source_shares(split, ranks, placement.num_layers),
        kernels.work_terms(cost.replica),
        kernels.time_terms(cost, ranks),
    )


def predicted_time(
    load: NDArray[np.generic],
    placement: Placement,
    cost: CostModel = TOKENS,
    split: SplitModel = EVEN_SPLIT,
) -> float:
    """Return the predicted MoE time of a placement on a window, the sum of `step_times`.

    Source: GEM eq. 1.
    """
    return float(step_times(load, placement, cost, split).sum())


def score(problem: PlacementProblem, placement: Placement) -> float:
    """Return the `predicted_time` of a placement under the load and objective of the problem."""
    return predicted_time(problem.load, placement, problem.objective.cost, SplitModel.of(problem))


def fluid_times(
    load: NDArray[np.generic], num_ranks: int, cost: CostModel = TOKENS
) -> NDArray[np.float64]:
    """Return the time of every step and layer if its work could be split freely over all ranks.

    Args:
        load: (T, L, E) [tokens].
        num_ranks: R.
        cost: every active expert has the work of one replica, the least that any number of
            replicas has. Faster ranks take more: the time is the least v at which all ranks
            together can take the work of the layer with no rank above v.

    Returns:
        (T, L) float64 in the unit of the cost model. No placement or dispatcher is faster.
    """
    if load.ndim != 3:
        raise ShapeMismatch(f"load must be (T, L, E), got {load.shape}")
    cost.check_ranks(num_ranks)
    totals = _layer_work(load, cost)
    _, tile, tile_seconds, slope = kernels.time_terms(cost, num_ranks)
    if tile == 0.0:
        return np.where(totals > 0, totals / num_ranks + cost.fixed, 0.0)
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
    fluid = np.where(hit == 0, levels[0], np.minimum(grown, ceiling)) + cost.fixed
    return np.where(totals > 0, fluid, 0.0)


def waterline_times(
    load: NDArray[np.generic], num_ranks: int, cost: CostModel = TOKENS
) -> NDArray[np.float64]:
    """Return the (T, L) time of the slowest rank if all ranks have the same work.

    This is the time under Waterfill, which levels work whatever the speeds of ranks, of every
    placement that leaves the routed work of all ranks below the waterline. Arguments and errors are
    those of `fluid_times`.
    """
    cost.check_ranks(num_ranks)
    level = _layer_work(load, cost) / num_ranks
    work = np.broadcast_to(level[:, :, None], (*level.shape, num_ranks))
    return np.asarray(rank_times(work, cost).max(axis=2), np.float64)


def _layer_work(load: NDArray[np.generic], cost: CostModel) -> NDArray[np.float64]:
    """Return the (T, L) work of one replica for each expert, shared experts included [tokens].

    No array as large as the load is made of uint32 counts: a window has hundreds of megabytes.
    """
    tokens = load.sum(axis=2, dtype=np.float64)
    work = tokens
    if not cost.replica.proportional:
        blocks = np.array_split(load, -(-len(load) // _BLOCK_STEPS) or 1)
        work = np.concatenate(
            [replica_work(block.astype(np.float64), cost.replica).sum(axis=2) for block in blocks]
        )
    return np.asarray(work + cost.shared_tokens * tokens, np.float64)


def _capacity_at(
    levels: NDArray[np.float64],
    tile: float,
    tile_seconds: NDArray[np.float64],
    slope: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the work all ranks take within each level of seconds, and its growth above."""
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


def fluid_bound(load: NDArray[np.generic], num_ranks: int, cost: CostModel = TOKENS) -> float:
    """Return the sum of `fluid_times`, a lower bound on the predicted time of every placement."""
    return float(fluid_times(load, num_ranks, cost).sum())


def time_over_fluid(
    load: NDArray[np.generic],
    placement: Placement,
    cost: CostModel = TOKENS,
    split: SplitModel = EVEN_SPLIT,
) -> float:
    """Return predicted time / fluid bound, >= 1, the main measure of quality; NaN without load."""
    bound = fluid_bound(load, placement.num_ranks, cost)
    return predicted_time(load, placement, cost, split) / bound if bound > 0 else float("nan")


def balance_of(times: NDArray[np.float64], fluid: NDArray[np.float64]) -> float:
    """Return the time balance, fluid time / predicted time, in (0, 1]; NaN without load.

    With equal ranks and times in tokens it is the balancedness of the whole window, weighted by the
    time of each step and layer. Unlike balancedness it also falls where one rank is slower, and
    where replicas add more reading than they relieve.

    Args:
        times: (T, L) `step_times`.
        fluid: (T, L) `fluid_times` of the same steps.
    """
    total = float(times.sum())
    return float(fluid.sum()) / total if total > 0 else float("nan")


def worst_balance_of(times: NDArray[np.float64], fluid: NDArray[np.float64]) -> float:
    """Return the least `balance_of` of a layer over (T, L) times; NaN without load."""
    actual = times.sum(axis=0)
    loaded = actual > 0
    return float((fluid.sum(axis=0)[loaded] / actual[loaded]).min()) if loaded.any() else np.nan
