"""Turns the options of `evenkeel replay` into the fleet, the setup and the policies of a replay."""

from collections.abc import Mapping, Sequence

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import Trace
from evenkeel_moe.planning.policies.craft.policy import CraftOptions, ReplicaRule
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem.objective import DispatchModel, Objective
from evenkeel_moe.planning.problem.placement_problem import Policy
from evenkeel_moe.replay.compare import ReplayFleet, load_by_source
from evenkeel_moe.replay.options import FleetOptions, PlanningOptions
from evenkeel_moe.replay.planners import VERDICT, craft_within
from evenkeel_moe.replay.walk import Setup

__all__ = ["replay_policies", "replay_setup"]


def replay_setup(
    trace: Trace,
    fleet_options: FleetOptions,
    planning: PlanningOptions,
    *,
    window_steps: int,
    horizon_steps: int,
) -> Setup:
    """Return the setup of a trace on the fleet that the options describe.

    Raises:
        InvalidInput: an option has a value that is not known or does not fit the trace.
    """
    fleet = _fleet(fleet_options, trace)
    try:
        dispatch = DispatchModel(planning.dispatch)
    except ValueError as error:
        known = ", ".join(DispatchModel)
        raise InvalidInput(
            f"unknown dispatch model {planning.dispatch!r}; known: {known}"
        ) from error
    load, source = load_by_source(trace, fleet.ranks)
    return Setup(
        load=load,
        shape=fleet.shape(trace),
        topology=fleet.topology(),
        window_steps=window_steps,
        horizon_steps=horizon_steps,
        source=source,
        objective=Objective(
            costs=fleet.costs(),
            dispatch=dispatch,
            cross_node_factor=planning.cross_node_factor,
            allow_duplicates=planning.allow_duplicates,
        ),
        copy_price=planning.copy_price,
        max_evaluations=planning.max_evaluations,
        seed=planning.seed,
    )


def _fleet(options: FleetOptions, trace: Trace) -> ReplayFleet:
    slots = options.slots
    if slots is None:
        slots = (-(-trace.num_experts // options.ranks) + 1) * options.ranks
    speeds = None
    if options.rank_speeds is not None:
        try:
            speeds = tuple(float(part) for part in options.rank_speeds.split(","))
        except ValueError as error:
            raise InvalidInput(f"--rank-speeds {options.rank_speeds}: {error}") from error
    return ReplayFleet(
        options.ranks,
        slots,
        options.nodes,
        options.expert_groups,
        options.bytes_per_expert,
        options.pooled,
        speeds,
    )


def replay_policies(names: Sequence[str], planning: PlanningOptions) -> Mapping[str, Policy]:
    """Return all policies by name, craft with the replicas that the options ask for.

    Raises:
        InvalidInput: the options for craft are malformed, or craft is not among `names`.
    """
    replicas = planning.craft_replicas
    if replicas is None and planning.free_bytes is None:
        return POLICIES
    if "craft" not in {name.removesuffix(VERDICT) for name in names}:
        raise InvalidInput(
            "--craft-replicas and --free-bytes are for craft, which is not among the policies"
        )
    if replicas in (None, "memory", "knee"):
        options = CraftOptions(rule=ReplicaRule(replicas or "memory"))
    else:
        try:
            options = CraftOptions(
                rule=ReplicaRule.MARGINAL_GAIN, min_marginal_gain=float(replicas)
            )
        except ValueError as error:
            raise InvalidInput(
                f"--craft-replicas {replicas} is neither memory, knee nor a number"
            ) from error
    return {**POLICIES, "craft": craft_within(options, planning.free_bytes)}
