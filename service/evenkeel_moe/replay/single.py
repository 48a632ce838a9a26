"""Plans one placement on the newest steps of a trace."""

import math
from collections.abc import Mapping

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.placement_problem import Policy
from evenkeel_moe.planning.schedule.relabel import count_moves
from evenkeel_moe.replay.planners import VERDICT, choose_planners
from evenkeel_moe.replay.walk import Replan, Setup, relabelled


def plan_once(
    policy: str, setup: Setup, current: Placement | None, policies: Mapping[str, Policy] = POLICIES
) -> tuple[Placement, dict[str, float]]:
    """Plan on the last `setup.window_steps` steps of a trace.

    Args:
        policy: a policy or a baseline.
        setup: trace and fleet.
        current: current placement; None at a cold start.
        policies: policies by name.

    Returns:
        The placement, and its metrics on the window: `balancedness_mean`, `time_over_fluid`,
        `replicas` over all layers, and `copies` from `current` if given. Metrics without a value
        are left out.

    Raises:
        InvalidInput: the policy is unknown, or a verdict has no current placement to compare with.
        ShapeMismatch: `current` belongs to another deployment.
        EvenkeelError: the policy failed.
    """
    planner = choose_planners([policy], baselines=False, policies=policies)[policy]
    if current is None and policy.endswith(VERDICT):
        raise InvalidInput(
            f"{policy} compares its plan with the current placement: give it with --current"
        )
    steps = len(setup.load)
    first = steps - setup.window_steps
    shape = setup.shape
    if current is not None:
        want = (shape.num_layers, shape.num_slots, shape.num_ranks, shape.num_logical_experts)
        have = (
            current.num_layers,
            current.num_slots,
            current.num_ranks,
            current.num_logical_experts,
        )
        if want != have:
            raise ShapeMismatch(
                f"the current placement has (L, S, R, E) = {have}, the fleet has {want}"
            )
    problem = setup.problem(first, steps, current)
    proposal = planner(Replan(0, steps, problem, setup.load, setup))
    target = current if current is not None else Placement.initial(shape)
    if proposal is not None:
        objective = setup.objective
        proposal.placement.check(
            shape, allow_duplicates=objective.allow_duplicates, fill_slots=objective.fill_slots
        )
        target = relabelled(problem, proposal)
    load, split = setup.load[first:], setup.split(first, steps)
    numbers = {
        "balancedness_mean": metrics.balancedness_mean(metrics.rank_load(load, target, split)),
        "time_over_fluid": moe_time.time_over_fluid(load, target, setup.objective.cost, split),
        "replicas": float((target.logcnt - 1).sum()),
    }
    if current is not None:
        numbers["copies"] = float(count_moves(current, target))
    return target, {name: value for name, value in numbers.items() if math.isfinite(value)}
