"""The GEM policy: one copy per expert, placed by the slowest rank of every step.

Source: GEM section 3.3 and Appendix B, Algorithms 1-4.
"""

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.capacity_packing import interleaved_capacity
from evenkeel_moe.planning.policies.gem.kernels import search_layers
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.proposal import build_proposal, place_on_ranks
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal, SlotBudget

_MOST_RESTARTS = 1000
_MOST_UNITS = 65_536
"""Most entries of a cost table."""
_MOST_WORK = 10_000_000_000
"""Bound on evaluations times steps, some ten seconds of a core.

It allows all K restarts of any recorded trace, and of 58 layers of 256 experts on 16 steps; on 256
steps of those, four restarts. Every layer's first search runs in any case.
"""


@dataclass(frozen=True, slots=True)
class GemOptions:
    """The paper's constants."""

    restarts: int = 30
    """K: searches from different orders of the experts."""
    noise: float = 0.2
    """Largest relative change of utilisation, uniform, that sets the order of a restart. The first
    restart has none."""
    least_drop: float = 0.001
    """A search ends when its best swap lowers the score by less than this share."""

    def __post_init__(self) -> None:
        # The orders of all restarts are drawn at once, so their number bounds memory.
        if not 1 <= self.restarts <= _MOST_RESTARTS:
            raise InvalidInput(f"restarts is {self.restarts}, must be from 1 to {_MOST_RESTARTS}")
        for name in ("noise", "least_drop"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise InvalidInput(f"{name} is {value}, must be in [0, 1)")


def plan_gem(problem: PlacementProblem, options: GemOptions = GemOptions()) -> Proposal:
    """Plan by GEM.

    Args:
        problem: every expert gets one slot, the rest stay empty. Move limits and the current
            placement are ignored. Ranks hold the same number of experts; if experts do not divide
            over the ranks, some ranks hold one fewer.
        options: the constants of the search.

    Complexity: O(K L E^2 T) at worst; most swaps are skipped because other ranks are the slowest.

    Raises:
        InfeasiblePlan: too few slots, or a replica budget that cannot be met (none of it is used).
        ShapeMismatch: curves for another number of ranks.
    """
    shape = problem.shape
    ranks, experts, layers = shape.num_ranks, shape.num_logical_experts, shape.num_layers
    capacity = _capacity(shape, problem.topology)
    SlotBudget.of(problem)
    rng = np.random.default_rng(problem.seed)
    noise = 1.0 + rng.uniform(-options.noise, options.noise, (options.restarts, layers, experts))
    noise[0] = 1.0
    load, table = cost_table(problem.load, ranks, problem.objective.cost)
    most = _MOST_WORK // max(1, len(problem.load))
    if problem.max_evaluations is not None:
        most = min(most, problem.max_evaluations)
    rank_of, _, evaluations = search_layers(load, noise, capacity, table, options.least_drop, most)
    placement = place_on_ranks(rank_of[:, :, None] == np.arange(ranks), shape.slots_per_rank)
    return build_proposal(problem, placement, evaluations)


def _capacity(shape: ModelShape, topology: Topology) -> NDArray[np.int64]:
    """Return (L, R), the experts that each rank holds. Ranks take turns to hold one more."""
    layers, ranks, experts = shape.num_layers, shape.num_ranks, shape.num_logical_experts
    most = -(-experts // ranks)
    if most > shape.slots_per_rank:
        raise InfeasiblePlan(
            f"{experts} experts over {ranks} ranks need {most} slots per rank,"
            f" there are {shape.slots_per_rank}",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    return interleaved_capacity(np.full(layers, experts, np.int64), topology)


def cost_table(
    load: NDArray[np.float64], num_ranks: int, cost: CostModel
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Convert loads to whole units, and tabulate the time of every number of units.

    The search then only looks costs up.

    Args:
        load: (T, L, E) [tokens]. A unit is one token of work, or more if a step of a layer holds
            over 65,536. If tokens are not whole, it is the least power of two that suffices.
        num_ranks: R.
        cost: the time of a rank. Every expert has one replica, so its work follows from its tokens.

    Returns:
        (L, E, T) int64 units and (R, N + 1) float64 seconds of 0..N units, N the most in one step
        of a layer.
    """
    tokens = np.moveaxis(moe_time.replica_work(load, cost.replica), 0, 2)
    most = float(tokens.sum(axis=1).max())
    unit = max(1.0, most / _MOST_UNITS)
    if (load % 1.0).any():
        # A power of two, so that whole tokens stay exact: at the edge of a tile time jumps.
        unit = max(float(np.exp2(np.ceil(np.log2(most / _MOST_UNITS)))), sys.float_info.min)
    units = np.rint(tokens / unit).astype(np.int64)
    entries = np.arange(int(units.sum(axis=1).max()) + 1) * unit
    table = moe_time.rank_times(np.repeat(entries[:, None], num_ranks, axis=1), cost)
    return np.ascontiguousarray(units), np.ascontiguousarray(table.T)


GEM = PolicyEntry(
    "gem",
    "no replicas; the slowest rank of each step gets less, also if ranks differ in speed",
    plan_gem,
    GemOptions,
    ("restarts", "noise", "least_drop"),
    # The paper's window (its section 3.3.1) and profile (3.3.2).
    PolicyInputs(plan_steps=16, curves=True),
)
