"""Turns the options of `evenkeel replay` about time into the cost model of a replay."""

import json
import math
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.derived_cost import derived_cost, shared_tokens, tokens_cost
from evenkeel_moe.replay.options import CostOptions
from evenkeel_moe.telemetry.cost_choice import RankNumbers, profiled_cost
from evenkeel_moe.wire.link import CostCurve, ReplicaCost


class CostKind(StrEnum):
    """The cost models that a replay can be asked for."""

    TOKENS = "tokens"
    CURVE = "curve"
    ROOFLINE = "roofline"


def replay_cost(
    asked: CostOptions, shape: ModelShape, rank_speeds: str | None, dispatch: DispatchModel
) -> CostModel:
    """Return the cost model that the options ask for.

    Args:
        asked: the options.
        shape: sizes of the deployment.
        rank_speeds: relative speed of every rank, separated by commas; None for equal ranks.
        dispatch: the engine's rule.

    Raises:
        InvalidInput: an option has an unknown value, is missing or does not belong to the model,
            the file holds no curve, or Waterfill has no shared experts to place.
        ShapeMismatch: not one positive speed for each rank.
    """
    kind = _kind(asked)
    if dispatch is DispatchModel.WATERFILL and shape.shared_experts is None:
        raise InvalidInput(
            "--dispatch waterfill needs --shared-experts: it places their work, and without it the"
            " split is even"
        )
    if kind is CostKind.CURVE:
        model = _of_curve(asked.curve, shape)
    elif kind is CostKind.ROOFLINE:
        model = _of_roofline(asked, shape)
    else:
        model = tokens_cost(shape, dispatch)
    slowness = None if rank_speeds is None else 1.0 / _speeds(rank_speeds, shape.num_ranks)
    return model if slowness is None else _slowed(model, slowness)


def _kind(asked: CostOptions) -> CostKind:
    """Return the cost model asked for, after checking that the other options belong to it."""
    try:
        kind = CostKind(asked.cost)
    except ValueError as error:
        known = ", ".join(CostKind)
        raise InvalidInput(f"unknown cost model {asked.cost!r}; known: {known}") from error
    belongs = {
        "--curve": (asked.curve, CostKind.CURVE),
        "--device": (asked.device, CostKind.ROOFLINE),
        "--weight-format": (asked.weight_format, CostKind.ROOFLINE),
        "--read-tokens": (asked.read_tokens, CostKind.ROOFLINE),
    }
    for option, (value, of) in belongs.items():
        if value is not None and kind is not of:
            raise InvalidInput(f"{option} belongs to --cost {of}, not to --cost {kind}")
    return kind


def _of_roofline(asked: CostOptions, shape: ModelShape) -> CostModel:
    if (asked.device is None) == (asked.read_tokens is None):
        raise InvalidInput("--cost roofline needs either --device or --read-tokens")
    if asked.device is not None:
        return derived_cost(shape, asked.device, asked.weight_format or "fp8")
    if asked.weight_format is not None:
        raise InvalidInput("--weight-format belongs to --device, not to --read-tokens")
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
        raise InvalidInput("--cost curve needs --curve with a file that `evenkeel profile` wrote")
    try:
        content = json.loads(path.read_text("utf-8"))
        curve, told = content["curve"], content.get("replica_cost")
        seconds = tuple(float(value) for value in curve["tile_seconds"])
        found = CostCurve(int(curve["tile_tokens"]), seconds, float(curve["slope_s_per_token"]))
        cost = None if told is None else ReplicaCost(**{name: float(told[name]) for name in told})
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidInput(f"{path} is no curve: {error!r:.200}") from error
    ranks = (RankNumbers(curve=found, replica_cost=cost),) * shape.num_ranks
    try:
        # Checked alone, so that a fault is counted once and not for every rank.
        CostCurves(found.tile_tokens, np.array([seconds]), np.array([found.slope_s_per_token]))
        _check_cost(cost)
        model = profiled_cost(ranks, now_unix=0.0)
    except EvenkeelError as error:
        raise InvalidInput(f"{path} is no curve: {error}") from error
    kind = "curve" if model.replica.proportional else "tokens and replicas"
    return replace(
        model,
        shared_tokens=shared_tokens(shape),
        detail=f"{kind} of {path.name}, the same on every rank",
    )


def _check_cost(cost: ReplicaCost | None) -> None:
    """Check the numbers of a file.

    Raises:
        InvalidInput: a number is negative or not finite, or no time is counted for a token.
    """
    for name, value in ({} if cost is None else asdict(cost)).items():
        if not 0 <= value < math.inf or (name == "s_per_token" and value == 0):
            raise InvalidInput(f"{name} is {value}")


def _speeds(text: str, ranks: int) -> NDArray[np.float64]:
    """Return the (R,) relative speeds in a text."""
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInput(f"--rank-speeds {text}: {error}") from error
    finite = all(0 < speed < math.inf and 1 / speed < math.inf for speed in speeds)
    if len(speeds) != ranks or not finite:
        raise ShapeMismatch(f"{ranks} positive rank speeds are needed, got {len(speeds)}: {speeds}")
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
