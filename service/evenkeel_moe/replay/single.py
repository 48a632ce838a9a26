"""Plans one placement on steps of a trace."""

import math
from collections.abc import Mapping

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.placement_problem import Policy
from evenkeel_moe.planning.schedule.relabel import count_moves
from evenkeel_moe.replay.planners import VERDICT, choose_planners
from evenkeel_moe.replay.walk import Replan, Setup, checked_target


def plan_newest(
    policy: str, setup: Setup, current: Placement | None, policies: Mapping[str, Policy]
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
    if current is None and policy.endswith(VERDICT):
        raise InvalidInput(
            f"{policy} compares its plan with the current placement: give it with --current"
        )
    if current is not None:
        check_fits("the current placement", current, setup.shape)
    first, last = len(setup.load) - setup.window_steps, len(setup.load)
    kept = current or Placement.initial(setup.shape)
    target = plan_steps(policy, setup, first, last, current, policies) or kept
    load, split = setup.load[first:], setup.split(first, last)
    numbers = {
        "balancedness_mean": metrics.balancedness_mean(metrics.rank_load(load, target, split)),
        "time_over_fluid": moe_time.time_over_fluid(load, target, setup.objective.cost, split),
        "replicas": float((target.logcnt - 1).sum()),
    }
    if current is not None:
        numbers["copies"] = float(count_moves(current, target))
    return target, {name: value for name, value in numbers.items() if math.isfinite(value)}


def plan_steps(
    policy: str,
    setup: Setup,
    first: int,
    last: int,
    current: Placement | None,
    policies: Mapping[str, Policy],
) -> Placement | None:
    """Return the plan on the steps first..last-1; None if the policy keeps the placement."""
    planner = choose_planners([policy], baselines=False, policies=policies)[policy]
    problem = setup.problem(first, last, current)
    proposal = planner(Replan(0, last, problem, setup))
    return None if proposal is None else checked_target(problem, proposal)


def check_fits(what: str, placement: Placement, shape: ModelShape) -> None:
    """Check that a placement that somebody named is of the fleet.

    Raises:
        ShapeMismatch: it is not.
    """
    if placement.sizes != shape.sizes:
        raise ShapeMismatch(
            f"{what} has (L, S, R, E) = {placement.sizes}, the fleet has {shape.sizes}"
        )
