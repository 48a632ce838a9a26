"""Measures what replicas gain and cost: balance against KV-cache memory, for a list of budgets.

Every budget is walked over the same trace with the same simple rule, uniform over layers: give
replicas to the expert with the most load per copy, and pack the copies into ranks whose capacities
differ by at most one slot. So any number of replicas can be tried, not only multiples of the number
of ranks.

Source: CRAFT figures 5 (balance against replicas, the crosses one replica per layer and rank) and 9
(gain against memory).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.capacity_packing import pack_copies
from evenkeel_moe.planning.policies.replication import replicate_experts
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal
from evenkeel_moe.replay.walk import Replan, Setup, walk_forward
from evenkeel_moe.replay.walk_metrics import measure_walk


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """The result of one replica budget."""

    replicas_per_layer: int
    balancedness_mean: float
    time_over_fluid: float
    gain_per_replica: float
    """Balancedness gained over the previous budget, per replica added; NaN for the first budget."""
    kv_bytes_lost: float
    """Mean bytes of replicas on one rank, over all layers: memory the KV cache cannot use."""


def budgets_to_try(num_experts: int, num_ranks: int, current: int) -> tuple[int, ...]:
    """Return the budgets to try, in replicas per layer.

    These are 0, the powers of two up to one replica per expert, and `current`, the fleet's budget.
    """
    most = min(num_experts, num_experts * (num_ranks - 1))
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return tuple(sorted({0, *powers, *([current] if 0 < current <= most else [])}))


def budget_curve(
    setup: Setup,
    budgets: tuple[int, ...],
    bytes_per_expert: int,
    *,
    on_replan: Callable[[], None] = lambda: None,
) -> tuple[BudgetPoint, ...]:
    """Walk the trace once per budget.

    Args:
        setup: trace and fleet; the number of slots is replaced by what each budget needs.
        budgets: replicas per layer, rising.
        bytes_per_expert: size of all tensors of one expert.
        on_replan: called after each replan of each walk.
    """
    shape = setup.shape
    points: list[BudgetPoint] = []
    for budget in budgets:
        per_rank = -(-(shape.num_logical_experts + budget) // shape.num_ranks)
        fixed = replace(shape, slots_per_rank=per_rank, pool_slots_per_rank=None)

        def planner(replan: Replan, budget: int = budget) -> Proposal:
            return plan_uniform(replan.problem, budget)

        walk = walk_forward(
            f"{budget} replicas", planner, replace(setup, shape=fixed), on_replan=on_replan
        )
        result = measure_walk(walk, bytes_per_expert)
        gain = float("nan")
        if points:
            before = points[-1]
            gain = (result.balancedness_mean - before.balancedness_mean) / (
                budget - before.replicas_per_layer
            )
        points.append(
            BudgetPoint(
                budget,
                result.balancedness_mean,
                result.time_over_fluid,
                gain,
                budget * shape.num_layers * bytes_per_expert / shape.num_ranks,
            )
        )
    return tuple(points)


def plan_uniform(problem: PlacementProblem, replicas_per_layer: int) -> Proposal:
    """Plan the same number of replicas in every layer, on the mean load.

    Raises:
        InfeasiblePlan: the slots cannot hold the copies.
    """
    shape = problem.shape
    load = problem.load.sum(axis=0)
    copies = shape.num_logical_experts + replicas_per_layer
    if replicas_per_layer < 0 or copies > shape.num_slots:
        raise InfeasiblePlan(
            f"{shape.num_logical_experts} experts + {replicas_per_layer} replicas = {copies}"
            f" copies, a layer has {shape.num_slots} slots",
            Reason.MEMORY_EXCEEDED,
        )
    _, logcnt = replicate_experts(load.astype(np.float32), copies, shape.num_ranks)
    rows = pack_copies(load, logcnt, _capacity(shape, copies), shape.slots_per_rank)
    return Proposal(Placement(rows, shape.num_ranks, shape.num_logical_experts), score=float("nan"))


def _capacity(shape: ModelShape, copies: int) -> NDArray[np.int64]:
    """Return the (L, R) slots of each rank; the ranks that have one more rotate over the layers."""
    base, extra = divmod(copies, shape.num_ranks)
    ranks, layers = np.arange(shape.num_ranks), np.arange(shape.num_layers)
    turn = (ranks[None, :] - extra * layers[:, None]) % shape.num_ranks
    return np.asarray(base + (turn < extra), np.int64)
