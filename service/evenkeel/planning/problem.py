"""The one signature of every policy: `plan(problem) -> Proposal`, pure and deterministic."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenkeel.errors import InvalidInput, ShapeMismatch
from evenkeel.model.placement import Placement
from evenkeel.model.plan import PlanLimits
from evenkeel.model.topology import ModelShape, Topology

__all__ = ["CostCurves", "DispatchModel", "PlacementProblem", "Policy", "Proposal", "check_current"]


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
        if self.tile_seconds.ndim != 2 or self.slope_s_per_token.shape != self.tile_seconds.shape[:1]:
            raise ShapeMismatch(
                f"tile_seconds must be (R, K) and slope (R,), got {self.tile_seconds.shape} and"
                f" {self.slope_s_per_token.shape}"
            )
        if self.tile_tokens < 1:
            raise InvalidInput(f"tile_tokens is {self.tile_tokens}, must be at least 1")
        if not (np.isfinite(self.tile_seconds).all() and np.isfinite(self.slope_s_per_token).all()):
            raise InvalidInput("cost curves must be finite")
        if (np.diff(self.tile_seconds, axis=1) < 0).any() or (self.slope_s_per_token < 0).any():
            raise InvalidInput("cost curves must not fall with the number of tokens")

    @classmethod
    def linear(cls, seconds_per_token: NDArray[np.float64]) -> "CostCurves":
        """C_r(n) = n * seconds_per_token[r]; (R,) float64 [s/token]."""
        rates = np.asarray(seconds_per_token, np.float64)
        return cls(1, rates[:, None].copy(), rates.copy())


@dataclass(frozen=True, eq=False, slots=True)
class PlacementProblem:
    """Everything a policy may look at."""

    load: NDArray[np.float64]
    """(T, L, E) [tokens] - one entry per step, oldest first; finite, not negative."""
    shape: ModelShape
    topology: Topology
    current: Placement | None = None
    """None at a cold start: nothing is saved by staying close."""
    replica_budget: int | None = None
    """Redundant slots per layer on average; None uses what the shape holds."""
    source_load: NDArray[np.float64] | None = None
    """(R, L, E) [tokens] routed by each source rank, for locality (Libra, nearest dispatch)."""
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
        if load.ndim != 3 or load.shape[1:] != (self.shape.num_layers, self.shape.num_logical_experts):
            raise ShapeMismatch(
                f"load must be (T, {self.shape.num_layers}, {self.shape.num_logical_experts}), got {load.shape}"
            )
        if load.shape[0] < 1:
            raise InvalidInput("the load window holds no step")
        if not np.isfinite(load).all():
            raise InvalidInput(f"load holds {int((~np.isfinite(load)).sum())} values that are not finite")
        if (load < 0).any():
            raise InvalidInput(f"load holds {int((load < 0).sum())} negative values, smallest {load.min():g}")
        if self.topology.num_ranks != self.shape.num_ranks:
            raise ShapeMismatch(f"topology has {self.topology.num_ranks} ranks, shape {self.shape.num_ranks}")


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
