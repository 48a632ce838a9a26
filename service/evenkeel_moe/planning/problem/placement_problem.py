"""The one signature of every policy: `plan(problem) -> Proposal`, pure and deterministic."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.checks import check_values
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem.objective import Objective

_MOST_TOKENS = 2.0**53
"""Up to this value float64 holds every integer number of tokens."""


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
    """(R, L, E) [tokens] - exactly the steps of `load`, summed by source rank; needed for locality
    (Libra, nearest dispatch). None where not known."""
    objective: Objective = Objective()
    max_evaluations: int | None = None
    """Budget of candidate evaluations, so that the same problem gives the same bytes on any
    machine; keel divides it among the layers, in each of its searches. None: the policy's own
    budget, which follows from the sizes."""
    threads: int = 1
    """Threads that the search of a large model may use. The placement does not depend on them."""
    seed: int = 0

    def __post_init__(self) -> None:
        load, shape = self.load, self.shape
        if load.ndim != 3 or load.shape[1:] != (shape.num_layers, shape.num_logical_experts):
            raise ShapeMismatch(
                f"load must be (T, {shape.num_layers}, {shape.num_logical_experts}),"
                f" got {load.shape}"
            )
        if load.shape[0] < 1:
            raise InvalidInput("the load window holds no step")
        check_values("load", load, _MOST_TOKENS)
        if self.topology.num_ranks != shape.num_ranks:
            raise ShapeMismatch(
                f"topology has {self.topology.num_ranks} ranks, shape {shape.num_ranks}"
            )
        if self.source_load is not None:
            _check_source(self.source_load, shape)
        self.objective.check()
        if self.threads < 1:
            raise InvalidInput(f"threads is {self.threads}, must be at least 1")
        for name, value in (("max_evaluations", self.max_evaluations), ("seed", self.seed)):
            if value is not None and not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}, must be finite and not negative")


def _check_source(source_load: NDArray[np.float64], shape: ModelShape) -> None:
    """Check that the source loads fit the deployment.

    Raises:
        ShapeMismatch, InvalidInput: they do not.
    """
    want = (shape.num_ranks, shape.num_layers, shape.num_logical_experts)
    if source_load.shape != want:
        raise ShapeMismatch(f"source_load must be {want}, got {source_load.shape}")
    check_values("source_load", source_load, _MOST_TOKENS)


def origin_shares(source_load: NDArray[np.float64], shape: ModelShape) -> NDArray[np.float64]:
    """Return the share of each expert's tokens that start on each rank.

    Args:
        source_load: (R, L, E) [tokens] routed by each source rank.
        shape: of the deployment.

    Returns:
        (R, L, E) float64 in [0, 1], summing to 1 over ranks; even for an expert without tokens.

    Raises:
        ShapeMismatch: the source loads are of another deployment.
        InvalidInput: some are negative or not finite.
    """
    _check_source(source_load, shape)
    total = source_load.sum(axis=0)
    return np.where(total > 0, source_load / np.where(total > 0, total, 1.0), 1.0 / shape.num_ranks)


def check_current(problem: PlacementProblem) -> None:
    """Check that the current placement, if any, fits the shape; for policies that look at it.

    Raises:
        ShapeMismatch: it is of another deployment.
    """
    current, shape = problem.current, problem.shape
    if current is not None and current.sizes != shape.sizes:
        raise ShapeMismatch(
            f"the current placement is ({current.num_layers}, {current.num_slots}) of"
            f" {current.num_logical_experts} experts on {current.num_ranks} ranks,"
            f" the deployment ({shape.num_layers}, {shape.num_slots}) of"
            f" {shape.num_logical_experts} on {shape.num_ranks}"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Proposal:
    """The answer of a policy."""

    placement: Placement
    score: float
    """Predicted MoE time of the window under the objective, summed over steps and layers."""
    evaluations: int = 0
    """Candidates evaluated; replaying with this as the budget gives the same bytes. keel counts the
    costliest layer of its costliest search, times the layers."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Named figures for the decision log."""


class Policy(Protocol):
    """A planning algorithm: pure and deterministic; the same problem gives the same bytes."""

    def __call__(self, problem: PlacementProblem) -> Proposal:
        """Propose a placement.

        Raises:
            InvalidInput: loads or shapes no algorithm can use.
            InfeasiblePlan: no placement satisfies the limits.
        """
        ...
