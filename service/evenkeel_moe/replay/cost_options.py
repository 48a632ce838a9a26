"""Turns the options of `evenkeel replay` about time into the cost model of a replay."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.derived_cost import derived_cost, shared_tokens, tokens_cost
from evenkeel_moe.replay.options import CostKind, CostOptions
from evenkeel_moe.telemetry.cost_choice import RankNumbers, profiled_cost
from evenkeel_moe.wire.profile_text import parse_profile


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

    It is that of tokens and replicas if the file has one that fits, else that of the curve.
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
