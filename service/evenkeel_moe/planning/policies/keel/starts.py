"""The placements from which keel's search starts."""

import heapq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.model.cost import CostCurves
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.capacity_packing import interleaved_capacity, pack_copies
from evenkeel_moe.planning.policies.eplb import Variant, choose_form
from evenkeel_moe.planning.policies.replication import replicate_experts
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, SlotBudget
from evenkeel_moe.planning.schedule.relabel import relabel


def eplb_start(problem: PlacementProblem) -> Placement | None:
    """Return EPLB's placement with the fewest moves; None if EPLB cannot plan, or under limits."""
    if problem.objective.limits != PlanLimits():
        return None
    try:
        placement, _, form = choose_form(problem)
    except (InvalidInput, InfeasiblePlan):
        return None
    return relabel(problem, placement, keep_nodes=form is Variant.HIERARCHICAL)


def metro_start(problem: PlacementProblem) -> Placement | None:
    """Return METRO's placement, EPLB's on activations, as `eplb_start`."""
    return eplb_start(replace(problem, load=np.minimum(problem.load, 1.0)))


def linear_rates(costs: CostCurves | None, num_ranks: int) -> NDArray[np.float64]:
    """Return how slow each rank is, (R,): cost per token at the last stair over the mean."""
    if costs is None:
        return np.ones(num_ranks)
    tiles = costs.tile_seconds.shape[1]
    rates = costs.tile_seconds[:, -1] / (tiles * costs.tile_tokens)
    mean = float(rates.mean())
    return np.asarray(rates / mean, np.float64) if mean > 0 else np.ones(num_ranks)


def is_engine_start(shape: ModelShape, placement: Placement) -> bool:
    """Return True if nothing was planned yet, so that engines have just started.

    Their start is one of ours, or has the same map in every layer. A single layer, or one of a pool
    with experts that do not divide by ranks, does not show the latter.
    """
    if placement.num_layers > 1 and (placement.phy2log == placement.phy2log[0]).all():
        return True
    return placement in (Placement.initial(shape), Placement.linear(shape))


def cold_start(problem: PlacementProblem) -> Placement:
    """Build a placement from nothing: copies by load per copy, packed heaviest first by rank speed.

    Raises:
        InfeasiblePlan: too few slots.
    """
    shape = problem.shape
    layers, ranks = shape.num_layers, shape.num_ranks
    load = problem.load.sum(axis=0)
    share = SlotBudget.of(problem).equal_share(layers)
    _, logcnt = replicate_experts(load.astype(np.float32), share, ranks)
    capacity = interleaved_capacity(np.full(layers, share, np.int64), problem.topology)
    rates = linear_rates(problem.objective.cost.curves, ranks)
    rows = pack_copies(load, logcnt, capacity, shape.slots_per_rank, rates)
    return Placement(rows, ranks, shape.num_logical_experts)


def fit_to_budget(problem: PlacementProblem, current: Placement) -> Placement | None:
    """Remove from a placement second copies on a rank, and the copies that exceed the budget.

    Args:
        problem: names the budget.
        current: a placement of its shape.

    Returns:
        None if an expert has no copy to start from.

    Raises:
        InfeasiblePlan: a rank's pool cannot hold the experts that have no other copy.
    """
    shape = problem.shape
    if (current.logcnt == 0).any():
        return None
    budget = SlotBudget.of(problem)
    rows = current.phy2log.copy()
    load = problem.load.sum(axis=0)
    # The slots of one rank in all layers side by side; both are views of `rows`.
    by_rank = rows.reshape(shape.num_layers, shape.num_ranks, shape.slots_per_rank)
    before = np.tri(shape.slots_per_rank, k=-1, dtype=np.bool_)
    again = (by_rank[..., :, None] == by_rank[..., None, :]) & before
    by_rank[again.any(axis=-1)] = EMPTY
    if budget.pool_per_rank is None:
        for layer in range(shape.num_layers):
            _drop_copies(rows[layer : layer + 1], load[layer : layer + 1], None, budget.per_layer)
    else:
        for rank in range(shape.num_ranks):
            slots = np.arange(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
            _drop_copies(rows, load, slots, budget.pool_per_rank)
        _drop_copies(rows, load, None, budget.total)
    return Placement(rows, shape.num_ranks, shape.num_logical_experts)


def _drop_copies(
    rows: NDArray[np.int32],
    load: NDArray[np.float64],
    slots: NDArray[np.int64] | None,
    most: int,
) -> None:
    """Empty slots until at most `most` are filled, always the copy whose loss matters least.

    Args:
        rows: (L, S) experts of the slots. Mutated.
        load: (L, E) [tokens].
        slots: the slots that count; None for all.
        most: filled slots to keep, over all layers.
    """
    among = np.arange(rows.shape[1]) if slots is None else slots
    surplus = int((rows[:, among] >= 0).sum()) - most
    if surplus <= 0:
        return
    copies = np.zeros(load.shape, np.int64)
    held = np.nonzero(rows >= 0)
    np.add.at(copies, (held[0], rows[held]), 1)

    def load_left(layer: int, slot: int) -> float:
        """Return the load per copy of the slot's expert without the slot; inf for its last copy."""
        expert = rows[layer, slot]
        others = int(copies[layer, expert]) - 1
        return float(load[layer, expert]) / others if others else np.inf

    filled = zip(*np.nonzero(rows[:, among] >= 0), strict=True)
    choices = [(load_left(layer, among[n]), int(among[n]), int(layer)) for layer, n in filled]
    heapq.heapify(choices)
    while surplus > 0:
        left, slot, layer = heapq.heappop(choices)
        if not np.isfinite(left):
            raise InfeasiblePlan(
                "a rank's pool is smaller than the experts that have no other copy",
                Reason.POOL_EXCEEDED,
            )
        # Since the entry was made, other copies may have gone: what is left has only risen.
        now = load_left(layer, slot)
        if now > left:
            heapq.heappush(choices, (now, slot, layer))
            continue
        copies[layer, rows[layer, slot]] -= 1
        rows[layer, slot] = EMPTY
        surplus -= 1
