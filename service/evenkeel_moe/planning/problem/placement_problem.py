"""The one signature of every policy: `plan(problem) -> Proposal`, pure and deterministic."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.checks import check_values, undivided
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
    machine; keel divides it among the layers, in each of its searches, and evaluates at least one
    in each. None: the policy's own budget, which follows from the sizes."""
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
        if self.current is not None:
            self.current.check_sizes(shape)
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
    return rank_shares(source_load)


def rank_shares(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R, ...) tokens as shares of their sum over ranks; even where the sum is 0."""
    total = tokens.sum(axis=0)
    return np.where(total > 0, tokens / np.where(total > 0, total, 1.0), 1.0 / len(tokens))


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """The number of slots a plan may fill per layer, in all, and per rank of a pool."""

    per_layer: int
    """Copies one layer may hold. With pooled slots this is the average: any layer may then hold
    `shape.num_slots`."""
    total: int
    """Copies all layers together may hold."""
    pool_per_rank: int | None
    """Slots of one rank over all layers; None where each layer owns its slots."""

    @classmethod
    def of(cls, problem: PlacementProblem) -> "SlotBudget":
        """Return the budget of a problem; errors as `of_shape`."""
        return cls.of_shape(problem.shape, problem.replica_budget)

    @classmethod
    def of_shape(cls, shape: ModelShape, redundant: int | None) -> "SlotBudget":
        """Return the budget of a shape with a replica budget; None for all slots.

        Raises:
            InfeasiblePlan: the replica budget is negative or asks for more copies than there are
                slots.
        """
        experts, layers, ranks = shape.num_logical_experts, shape.num_layers, shape.num_ranks
        pool = shape.pool_slots_per_rank
        # A second copy of an expert on the same rank is useless.
        most = min(shape.num_slots, experts * ranks)
        if redundant is None:
            return cls(most, most * layers if pool is None else pool * ranks, pool)
        if redundant < 0:
            raise InfeasiblePlan(
                f"a replica budget of {redundant} leaves experts without a slot",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
        wanted = experts + redundant
        if wanted > shape.num_slots:
            raise InfeasiblePlan(
                f"{experts} experts + {redundant} redundant = {wanted} copies a layer exceed"
                f" {ranks} ranks x {shape.slots_per_rank} slots = {shape.num_slots}",
                Reason.MEMORY_EXCEEDED,
            )
        if pool is not None and wanted * layers > pool * ranks:
            raise InfeasiblePlan(
                f"{layers} layers x {wanted} copies exceed {ranks} ranks x {pool} pooled slots",
                Reason.POOL_EXCEEDED,
            )
        per_layer = min(wanted, most)
        return cls(per_layer, per_layer * layers, pool)

    def equal_share(self, layers: int) -> int:
        """Return the number of copies each layer can hold if all layers hold the same number."""
        return min(self.per_layer, self.total // layers)


def equal_slots_per_rank(problem: PlacementProblem) -> int:
    """Return the number of slots every rank fills in every layer, if all fill the same number.

    Raises:
        InvalidInput: the replica budget does not divide over the ranks.
        InfeasiblePlan: the slots cannot hold one copy of every expert.
    """
    shape = problem.shape
    ranks, experts = shape.num_ranks, shape.num_logical_experts
    most = shape.slots_per_rank
    if shape.pool_slots_per_rank is not None:
        most = min(most, shape.pool_slots_per_rank // shape.num_layers)
    per_rank = most
    if problem.replica_budget is not None:
        wanted = experts + problem.replica_budget
        if words := undivided(wanted, "slots", ranks, "ranks", least=experts):
            raise InvalidInput(f"{experts} experts + {problem.replica_budget} redundant = {words}")
        per_rank = wanted // ranks
        if per_rank > most:
            raise InfeasiblePlan(
                f"a replica budget of {problem.replica_budget} needs {per_rank} slots per rank"
                f" and layer, there are {most}",
                Reason.MEMORY_EXCEEDED,
            )
    if per_rank * ranks < experts:
        raise InfeasiblePlan(
            f"{per_rank} slots per rank and layer x {ranks} ranks = {per_rank * ranks}"
            f" cannot hold {experts} experts",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    return per_rank


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
