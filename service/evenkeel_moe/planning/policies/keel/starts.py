"""Where keel's search starts, and how many copies it may hold."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.capacity_packing import pack_copies
from evenkeel_moe.planning.policies.replication import replicate_experts
from evenkeel_moe.planning.policies.slot_budget import SlotBudget
from evenkeel_moe.planning.problem.objective import CostCurves
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

__all__ = ["cold_start", "fit_to_budget", "linear_rates"]


def linear_rates(costs: CostCurves | None, num_ranks: int) -> NDArray[np.float64]:
    """(R,) cost per token at the end of the stairs, over the mean of ranks: a rank's slowness in one number."""
    if costs is None:
        return np.ones(num_ranks)
    tiles = costs.tile_seconds.shape[1]
    rates = costs.tile_seconds[:, -1] / (tiles * costs.tile_tokens)
    mean = float(rates.mean())
    return np.asarray(rates / mean, np.float64) if mean > 0 else np.ones(num_ranks)


def cold_start(problem: PlacementProblem) -> Placement:
    """A placement from nothing: copies by load per copy, packed heaviest first by rank speed.

    Raises:
        InfeasiblePlan: too few slots.
    """
    shape = problem.shape
    budget = SlotBudget.of(problem)
    layers, ranks = shape.num_layers, shape.num_ranks
    load = problem.load.sum(axis=0)
    share = budget.equal_share(layers)
    logical, logcnt = replicate_experts(load.astype(np.float32), share, ranks)
    # Every rank the same number of places where they divide; the rest go to the first ranks, turned by layer
    # so that pools fill evenly.
    base, rest = divmod(share, ranks)
    capacity = np.full((layers, ranks), base, np.int64)
    for layer in range(layers):
        capacity[layer, (np.arange(rest) + layer * rest) % ranks] += 1
    rows = pack_copies(
        load, logcnt, capacity, shape.slots_per_rank, linear_rates(problem.objective.costs, ranks)
    )
    return Placement(rows, ranks, shape.num_logical_experts)


def fit_to_budget(problem: PlacementProblem, current: Placement) -> Placement | None:
    """The current placement without second copies on a rank and without what exceeds the budget.

    Args:
        problem: names the budget.
        current: a placement of its shape.

    Returns:
        None if an expert has no copy to start from.
    """
    shape = problem.shape
    if (current.logcnt == 0).any():
        return None
    budget = SlotBudget.of(problem)
    rows = current.phy2log.copy()
    per_rank = shape.slots_per_rank
    load = problem.load.sum(axis=0)
    by_rank = rows.reshape(shape.num_layers, shape.num_ranks, per_rank)
    again = (by_rank[..., :, None] == by_rank[..., None, :]) & np.tri(
        per_rank, k=-1, dtype=np.bool_
    )
    by_rank[again.any(axis=-1)] = EMPTY
    if budget.pool_per_rank is None:
        filled = (rows >= 0).sum(axis=1)
        for layer in np.nonzero(filled > budget.per_layer)[0]:
            _drop(rows[layer], load[layer], int(filled[layer]) - budget.per_layer, None, per_rank)
    if budget.pool_per_rank is not None:
        _drop_to_pool(rows, load, budget, per_rank)
    return Placement(rows, shape.num_ranks, shape.num_logical_experts)


def _cheapest(
    row: NDArray[np.int32], load: NDArray[np.float64], slots: NDArray[np.int64]
) -> tuple[float, int]:
    """(load per copy that would remain, slot) of the redundant copy among `slots` that is missed least."""
    count = np.bincount(row[row >= 0], minlength=len(load))
    best, at = np.inf, -1
    for slot in slots:
        expert = row[slot]
        if expert >= 0 and count[expert] > 1:
            left = load[expert] / (count[expert] - 1)
            if left < best:
                best, at = float(left), int(slot)
    return best, at


def _drop(
    row: NDArray[np.int32], load: NDArray[np.float64], surplus: int, rank: int | None, per_rank: int
) -> None:
    slots = (
        np.arange(len(row)) if rank is None else np.arange(rank * per_rank, (rank + 1) * per_rank)
    )
    for _ in range(surplus):
        row[_cheapest(row, load, slots)[1]] = EMPTY


def _drop_to_pool(
    rows: NDArray[np.int32], load: NDArray[np.float64], budget: SlotBudget, per_rank: int
) -> None:
    """Empty slots until every rank's pool and the whole budget hold."""
    layers, slots = rows.shape
    ranks = slots // per_rank
    pool = budget.pool_per_rank or 0
    by_rank = [np.arange(rank * per_rank, (rank + 1) * per_rank) for rank in range(ranks)]

    def drop_one(among: NDArray[np.int64]) -> None:
        choices = [(*_cheapest(rows[layer], load[layer], among), layer) for layer in range(layers)]
        _, slot, layer = min(choices)
        if slot < 0:
            raise InfeasiblePlan(
                "a rank's pool is smaller than the experts that have no other copy",
                Reason.POOL_EXCEEDED,
            )
        rows[layer, slot] = EMPTY

    for rank in range(ranks):
        for _ in range(int((rows[:, by_rank[rank]] >= 0).sum()) - pool):
            drop_one(by_rank[rank])
    for _ in range(int((rows >= 0).sum()) - budget.total):
        drop_one(np.arange(slots))
