"""Turns the options of `evenkeel replay` into the fleet, the setup and the policies of a replay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.policy import OptionValue
from evenkeel_moe.model.topology import ModelShape, Topology, slots_of_rank
from evenkeel_moe.planning.policies.craft import factor_by_memory
from evenkeel_moe.planning.policies.registry import find_policy, known_policies
from evenkeel_moe.planning.problem.derived_cost import derived_cost, shared_tokens, tokens_cost
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import Policy
from evenkeel_moe.planning.problem.survival import Survive
from evenkeel_moe.replay.options import CostKind, CostOptions, FleetOptions, ReplayOptions
from evenkeel_moe.replay.planners import VERDICT
from evenkeel_moe.replay.walk import Setup
from evenkeel_moe.telemetry.cost_choice import RankNumbers, profiled_cost
from evenkeel_moe.wire.profile_text import parse_profile


def replay_setup(
    trace: Trace, options: ReplayOptions, *, window_steps: int, horizon_steps: int
) -> Setup:
    """Return the setup of a trace on the fleet that the options describe.

    Raises:
        InvalidInput, ShapeMismatch: an option has an unknown value or does not fit the others or
            the trace; or the trace has no load.
    """
    if not trace.counts.any():
        raise InvalidInput(f"none of the {trace.num_steps} steps has load: nothing to plan on")
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
    per_rank = slots_of_rank(slots, ranks, experts)
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


def replay_policies(names: Sequence[str], planning: ReplayOptions) -> Mapping[str, Policy]:
    """Return all policies by name, with the options that were asked for; see `policy_options`."""
    asked = policy_options(names, planning)
    with_options = {name: find_policy(name).with_options(given) for name, given in asked.items()}
    return {**known_policies(), **with_options}


def policy_options(
    names: Sequence[str], planning: ReplayOptions
) -> Mapping[str, Mapping[str, OptionValue]]:
    """Return the options of craft and keel that were asked for, by policy.

    Raises:
        InvalidInput: options are malformed, or for a policy that is not among `names`.
    """
    asked = {name.removesuffix(VERDICT) for name in names}
    options: dict[str, Mapping[str, OptionValue]] = {}
    if planning.survive is not Survive.NONE:
        if "keel" not in asked:
            raise InvalidInput("survive is for keel, which is not among the policies")
        options["keel"] = {"survive": planning.survive}
    if planning.craft_replicas is not None or planning.free_bytes is not None:
        if "craft" not in asked:
            raise InvalidInput(
                "craft_replicas and free_bytes are for craft, which is not among the policies"
            )
        options["craft"] = _craft_options(planning)
    return options


def _craft_options(planning: ReplayOptions) -> Mapping[str, OptionValue]:
    replicas, free = planning.craft_replicas, planning.free_bytes
    options: dict[str, OptionValue] = {}
    if replicas in ("memory", "knee", "per_replica_gain"):
        options["rule"] = replicas
    elif replicas is not None:
        try:
            options |= {"rule": "marginal_gain", "min_marginal_gain": float(replicas)}
        except ValueError as error:
            raise InvalidInput(
                f"craft_replicas {replicas} is neither memory, knee, per_replica_gain nor a number"
            ) from error
    if free is not None:
        options["max_replicas_per_rank"] = factor_by_memory(free, planning.bytes_per_expert)
    return options


# --- the cost model ----------------------------------------------------------------------------


def replay_cost(
    asked: CostOptions,
    shape: ModelShape,
    rank_speeds: tuple[float, ...] | None,
    dispatch: DispatchModel,
) -> CostModel:
    """Return the cost model that the options ask for.

    Args:
        asked: the options.
        shape: sizes of the deployment.
        rank_speeds: relative speed of every rank; None for equal ranks.
        dispatch: the engine's rule.

    Raises:
        InvalidInput: an option has an unknown value, is missing or does not belong to the model,
            the file holds no curve, or Waterfill has no shared experts to place.
        ShapeMismatch: not one positive speed for each rank.
    """
    _check_belongs(asked)
    if dispatch is DispatchModel.WATERFILL and shape.shared_experts is None:
        raise InvalidInput(
            "dispatch: waterfill needs shared_experts: it places their work, and without it the"
            " split is even"
        )
    if asked.cost is CostKind.CURVE:
        model = _of_curve(asked.curve, shape)
    elif asked.cost is CostKind.ROOFLINE:
        model = _of_roofline(asked, shape)
    else:
        model = tokens_cost(shape, dispatch)
    slowness = None if rank_speeds is None else 1.0 / _speeds(rank_speeds, shape.num_ranks)
    return model if slowness is None else _slowed(model, slowness)


def _check_belongs(asked: CostOptions) -> None:
    """Check that the other options belong to the cost model asked for."""
    belongs = {
        "curve": (asked.curve, CostKind.CURVE),
        "device": (asked.device, CostKind.ROOFLINE),
        "weight_format": (asked.weight_format, CostKind.ROOFLINE),
        "read_tokens": (asked.read_tokens, CostKind.ROOFLINE),
    }
    for option, (value, of) in belongs.items():
        if value is not None and asked.cost is not of:
            raise InvalidInput(f"{option} belongs to cost: {of}, not to cost: {asked.cost}")


def _of_roofline(asked: CostOptions, shape: ModelShape) -> CostModel:
    if (asked.device is None) == (asked.read_tokens is None):
        raise InvalidInput("cost: roofline needs either device or read_tokens")
    if asked.device is not None:
        return derived_cost(shape, asked.device, asked.weight_format or "fp8")
    if asked.weight_format is not None:
        raise InvalidInput("weight_format belongs to device, not to read_tokens")
    read = float(asked.read_tokens or 0.0)
    return CostModel(
        replica=ReplicaWork(read_tokens=read),
        shared_tokens=shared_tokens(shape),
        source=CostSource.DERIVED,
        detail=f"as given: an expert is read in the time of {read:g} tokens",
    )


def _of_curve(path: Path | None, shape: ModelShape) -> CostModel:
    """Return the model of a device's file of `evenkeel profile`, for all ranks.

    It is that of the curve if it explains the profile better, or if the file has no line by tokens
    and replicas that fits.
    """
    if path is None:
        raise InvalidInput("cost: curve needs curve with a file that `evenkeel profile` wrote")
    try:
        told = parse_profile(path.read_text("utf-8"))
        ranks = (RankNumbers(curve=told.curve, replica_cost=told.replica_cost),) * shape.num_ranks
        model = profiled_cost(ranks, now_unix=0.0)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, EvenkeelError) as error:
        raise InvalidInput(f"{path} is no curve: {error}") from error
    kind = "curve" if model.replica.proportional else "tokens and replicas"
    return replace(
        model,
        shared_tokens=shared_tokens(shape),
        detail=f"{kind} of {path.name}, the same on every rank",
    )


def _speeds(speeds: tuple[float, ...], ranks: int) -> NDArray[np.float64]:
    """Return the (R,) relative speeds."""
    finite = all(0 < speed < math.inf and 1 / speed < math.inf for speed in speeds)
    if len(speeds) != ranks or not finite:
        raise ShapeMismatch(
            f"rank_speeds: {ranks} positive ones are needed, got {len(speeds)}: {[*speeds]}"
        )
    return np.array(speeds, np.float64)


def _slowed(model: CostModel, slowness: NDArray[np.float64]) -> CostModel:
    """Return the model with the time of rank r multiplied by `slowness[r]`, (R,)."""
    curves = model.curves or CostCurves.linear(np.ones(len(slowness)))
    given = "relative speeds of the ranks as given"
    return replace(
        model,
        curves=curves.scaled(slowness),
        relative=not model.in_seconds,
        detail=f"{model.detail}; {given}" if model.detail else given,
    )
