"""The one signature of every policy: `plan(problem) -> Proposal`, pure and deterministic."""

import math
import sys
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology

__all__ = [
    "CostCurves",
    "DispatchModel",
    "PlacementProblem",
    "Policy",
    "Proposal",
    "check_current",
    "origin_shares",
]

_MOST_TOKENS = 2.0**53
"""Up to here float64 holds every number of tokens."""


class DispatchModel(StrEnum):
    """How the engine splits an expert's tokens over its replicas; the planner scores under it."""

    EVEN = "even"
    """Every replica takes the same share."""
    NEAREST = "nearest"
    """A source rank uses its own replica, else one on its node, else an even share."""
    OPTIMAL = "optimal"
    """Per-batch LP (LPLB): the split that minimises the largest rank load."""


@dataclass(frozen=True, eq=False, slots=True)
class CostCurves:
    """Seconds of one MoE layer on each rank as a function of its tokens (GEM eq. 1).

    A step curve up to `dense_limit` tokens (one value per tile), linear beyond it.
    """

    tile_tokens: int
    """Tokens per tile: the width of one stair."""
    tile_seconds: NDArray[np.float64]
    """(R, K) seconds at 1..K tiles; a load of n tokens costs tile ceil(n / tile_tokens); 0 tokens cost 0."""
    slope_s_per_token: NDArray[np.float64]
    """(R,) seconds per token beyond K * tile_tokens."""

    def __post_init__(self) -> None:
        stairs, slope = self.tile_seconds, self.slope_s_per_token
        if stairs.ndim != 2 or stairs.size == 0 or slope.shape != stairs.shape[:1]:
            raise ShapeMismatch(
                f"tile_seconds must be (R, K) with K at least 1 and slope (R,), got {stairs.shape} and {slope.shape}"
            )
        if not 1 <= self.tile_tokens < math.inf:
            raise InvalidInput(f"tile_tokens is {self.tile_tokens}, must be finite and at least 1")
        _check_values("tile_seconds", stairs)
        _check_values("slope_s_per_token", slope)
        steps = np.diff(stairs, axis=1)
        if (steps < 0).any():
            raise InvalidInput(
                "cost curves must not fall with the number of tokens:"
                f" {int((steps < 0).sum())} stairs are lower than the one before, the most by {-steps.min():g} s"
            )

    @classmethod
    def linear(cls, seconds_per_token: NDArray[np.float64]) -> "CostCurves":
        """C_r(n) = n * seconds_per_token[r]; (R,) float64 [s/token]."""
        rates = np.asarray(seconds_per_token, np.float64)
        return cls(1, rates[:, None].copy(), rates.copy())


@dataclass(frozen=True, eq=False, slots=True)
class PlacementProblem:
    """Everything a policy may look at."""

    load: NDArray[np.float64]
    """(T, L, E) [tokens] - one entry per step, oldest first; in [0, 2**53]."""
    shape: ModelShape
    topology: Topology
    current: Placement | None = None
    """None at a cold start: nothing is saved by staying close."""
    replica_budget: int | None = None
    """Redundant slots per layer on average; None uses what the shape holds."""
    source_load: NDArray[np.float64] | None = None
    """(R, L, E) [tokens] of the steps of `load` and no others, summed by source rank; for locality (Libra, nearest
    dispatch). None where not known."""
    costs: CostCurves | None = None
    """None means C_r(n) = n: the score is then in tokens."""
    dispatch: DispatchModel = DispatchModel.EVEN
    limits: PlanLimits = PlanLimits()
    cost_per_move: float = 0.0
    """Price of one copy between ranks in the unit of the score, per step of the window (score units a step)."""
    cross_node_factor: float = 1.0
    """How many times dearer a copy between nodes is."""
    max_evaluations: int | None = None
    """Budget of candidate evaluations, so that the same problem gives the same bytes on any machine. None: the policy's
    own, which follows from the sizes."""
    seed: int = 0
    allow_duplicates: bool = False
    """Whether one rank may hold an expert twice in a layer."""

    def __post_init__(self) -> None:
        load = self.load
        if load.ndim != 3 or load.shape[1:] != (
            self.shape.num_layers,
            self.shape.num_logical_experts,
        ):
            raise ShapeMismatch(
                f"load must be (T, {self.shape.num_layers}, {self.shape.num_logical_experts}), got {load.shape}"
            )
        if load.shape[0] < 1:
            raise InvalidInput("the load window holds no step")
        _check_values("load", load, _MOST_TOKENS)
        if self.topology.num_ranks != self.shape.num_ranks:
            raise ShapeMismatch(
                f"topology has {self.topology.num_ranks} ranks, shape {self.shape.num_ranks}"
            )
        if self.source_load is not None:
            _check_source(self.source_load, self.shape)
        numbers = {
            "cost_per_move": self.cost_per_move,
            "cross_node_factor": self.cross_node_factor,
            "max_evaluations": self.max_evaluations,
            "seed": self.seed,
        }
        for name, value in (numbers | asdict(self.limits)).items():
            if value is not None and not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}, must be finite and not negative")


def _check_values(name: str, values: NDArray[np.float64], most: float = sys.float_info.max) -> None:
    """Raises InvalidInput unless all are finite, not negative and at most `most`."""
    least, largest = values.min(), values.max()
    if 0 <= least and largest <= most:  # never so with a NaN
        return
    finite = np.isfinite(values)
    if not finite.all():
        raise InvalidInput(f"{name} holds {int((~finite).sum())} values that are not finite")
    if least < 0:
        raise InvalidInput(
            f"{name} holds {int((values < 0).sum())} negative values, smallest {least:g}"
        )
    raise InvalidInput(
        f"{name} holds {int((values > most).sum())} values above {most:g}, largest {largest:g}"
    )


def _check_source(source_load: NDArray[np.float64], shape: ModelShape) -> None:
    """Raises ShapeMismatch or InvalidInput unless they are source loads of the deployment."""
    want = (shape.num_ranks, shape.num_layers, shape.num_logical_experts)
    if source_load.shape != want:
        raise ShapeMismatch(f"source_load must be {want}, got {source_load.shape}")
    _check_values("source_load", source_load, _MOST_TOKENS)


def origin_shares(source_load: NDArray[np.float64], shape: ModelShape) -> NDArray[np.float64]:
    """Share of each expert's tokens that start on each rank.

    Args:
        source_load: (R, L, E) [tokens] routed by each source rank.
        shape: of the deployment.

    Returns:
        (R, L, E) float64 in [0, 1], summing to 1 over ranks; even for an expert no rank routed to.

    Raises:
        ShapeMismatch: the source loads are of another deployment.
        InvalidInput: some are negative or not finite.
    """
    _check_source(source_load, shape)
    total = source_load.sum(axis=0)
    return np.where(total > 0, source_load / np.where(total > 0, total, 1.0), 1.0 / shape.num_ranks)


def check_current(problem: PlacementProblem) -> None:
    """Hold the current placement, if any, against the shape; for policies that look at it.

    Raises:
        ShapeMismatch: it is of another deployment.
    """
    current, shape = problem.current, problem.shape
    if current is not None and (
        current.num_layers,
        current.num_slots,
        current.num_ranks,
        current.num_logical_experts,
    ) != (shape.num_layers, shape.num_slots, shape.num_ranks, shape.num_logical_experts):
        raise ShapeMismatch(
            f"the current placement is ({current.num_layers}, {current.num_slots}) of {current.num_logical_experts}"
            f" experts on {current.num_ranks} ranks, the deployment ({shape.num_layers}, {shape.num_slots}) of"
            f" {shape.num_logical_experts} on {shape.num_ranks}"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Proposal:
    """What a policy answers."""

    placement: Placement
    score: float
    """Predicted MoE time of the window under the problem's dispatch and costs, summed over steps and layers."""
    evaluations: int = 0
    """Candidates evaluated; replaying with this as the budget gives the same bytes."""
    lower_bound: float | None = None
    """No placement within the limits scores below this."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Named figures for the decision log."""


class Policy(Protocol):
    """A planning algorithm: pure, deterministic, same problem in, same bytes out."""

    def __call__(self, problem: PlacementProblem) -> Proposal:
        """Propose a placement.

        Raises:
            InvalidInput: loads or shapes no algorithm can use.
            InfeasiblePlan: no placement satisfies the limits.
        """
        ...
