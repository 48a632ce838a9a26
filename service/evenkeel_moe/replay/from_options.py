"""Turns the options of `evenkeel replay` into the fleet, the setup and the policies of a replay."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft.policy import (
    CraftOptions,
    ReplicaRule,
    factor_by_memory,
    plan_craft,
)
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import Policy
from evenkeel_moe.replay.cost_options import replay_cost
from evenkeel_moe.replay.options import FleetOptions, PlanningOptions, ReplayOptions
from evenkeel_moe.replay.planners import VERDICT
from evenkeel_moe.replay.walk import Setup


def replay_setup(
    trace: Trace,
    options: ReplayOptions,
    *,
    window_steps: int,
    horizon_steps: int,
) -> Setup:
    """Return the setup of a trace on the fleet that the options describe.

    Raises:
        InvalidInput, ShapeMismatch: an option has an unknown value or does not fit the others or
            the trace.
    """
    shape = _shape(options, trace)
    if window_steps > trace.num_steps:
        raise InvalidInput(f"window {window_steps}: the trace has {trace.num_steps} steps")
    if words := undivided(options.ranks, "ranks", options.nodes, "nodes"):
        raise ShapeMismatch(words)
    source = None
    if trace.source is not None and trace.source.shape[1] == options.ranks:
        source = trace.source.astype(np.float64)
    return Setup(
        load=trace.counts.astype(np.float64),
        shape=shape,
        topology=Topology(
            tuple(rank * options.nodes // options.ranks for rank in range(options.ranks))
        ),
        window_steps=window_steps,
        horizon_steps=horizon_steps,
        source=source,
        objective=Objective(
            cost=replay_cost(options, shape, options.rank_speeds, options.dispatch),
            dispatch=options.dispatch,
            cross_node_factor=options.cross_node_factor,
            allow_duplicates=options.allow_duplicates,
            fill_slots=options.fill_slots,
        ),
        copy_price=options.copy_price,
        max_evaluations=options.max_evaluations,
        seed=options.seed,
    )


def _shape(fleet: FleetOptions, trace: Trace) -> ModelShape:
    """Return the shape of a deployment of the trace's model on the fleet."""
    ranks, experts = fleet.ranks, trace.num_experts
    slots = fleet.slots if fleet.slots is not None else (-(-experts // ranks) + 1) * ranks
    if words := undivided(slots, "slots", ranks, "ranks", least=experts):
        raise ShapeMismatch(words)
    per_rank = slots // ranks
    if per_rank > experts:
        raise ShapeMismatch(
            f"{slots} slots on {ranks} ranks are {per_rank} per rank, the model has {experts}"
            f" experts; at most {experts * ranks} slots can be used"
        )
    return ModelShape(
        num_layers=trace.num_layers,
        num_logical_experts=experts,
        num_ranks=ranks,
        slots_per_rank=min(experts, 2 * per_rank) if fleet.pooled else per_rank,
        top_k=trace.top_k or 1,
        bytes_per_expert=fleet.bytes_per_expert,
        num_expert_groups=fleet.expert_groups,
        shared_experts=fleet.shared_experts,
        pool_slots_per_rank=per_rank * trace.num_layers if fleet.pooled else None,
    )


def replay_policies(
    names: Sequence[str], planning: PlanningOptions, bytes_per_expert: int
) -> Mapping[str, Policy]:
    """Return all policies by name, craft with the replicas that the options ask for.

    Raises:
        InvalidInput: the options for craft are malformed, or craft is not among `names`.
    """
    replicas, free = planning.craft_replicas, planning.free_bytes
    if replicas is None and free is None:
        return POLICIES
    if "craft" not in {name.removesuffix(VERDICT) for name in names}:
        raise InvalidInput(
            "craft_replicas and free_bytes are for craft, which is not among the policies"
        )
    if replicas in (None, "memory", "knee", "per_replica_gain"):
        options = CraftOptions(rule=ReplicaRule(replicas or "memory"))
    else:
        try:
            options = CraftOptions(
                rule=ReplicaRule.MARGINAL_GAIN, min_marginal_gain=float(replicas)
            )
        except ValueError as error:
            raise InvalidInput(
                f"craft_replicas {replicas} is neither memory, knee, per_replica_gain nor a number"
            ) from error
    if free is not None:
        most = factor_by_memory(free, bytes_per_expert)
        options = replace(options, max_replicas_per_rank=most)
    return {**POLICIES, "craft": partial(plan_craft, options=options)}
