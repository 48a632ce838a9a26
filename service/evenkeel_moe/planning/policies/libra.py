"""The Libra policy: replicas first where tokens start, then where load remains to be spread.

Every expert has a home rank, which computes the tokens of all ranks that hold no copy of it. Phase
1 gives each rank copies of the remote experts that its own tokens choose most. Phase 2 relieves the
rank with the most load: it copies one of that rank's experts to a rank with little load, whose own
tokens for the expert then stay local.

It tries the expert with the most remote tokens on the rank with the least load, and ends where that
rank would exceed the mean.

Source: Libra Algorithm 1 as printed, on recorded instead of predicted demand.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.libra_replication import plan_copies
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.proposal import build_proposal, place_on_ranks
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    equal_slots_per_rank,
)


@dataclass(frozen=True, slots=True)
class LibraOptions:
    """The paper's constants."""

    locality: float = 0.5
    """L / N: share of a rank's copies that phase 1 may use."""

    def __post_init__(self) -> None:
        if not 0 <= self.locality <= 1:
            raise InvalidInput(f"locality is {self.locality}, must be in [0, 1]")


def plan_libra(problem: PlacementProblem, options: LibraOptions = LibraOptions()) -> Proposal:
    """Plan by Libra as published.

    Args:
        problem: `source_load` is the demand; without it every rank is assumed to route the same
            tokens. Homes follow from the order of experts, or from the current placement. Libra is
            meant for nearest dispatch; the score is under the problem's own dispatch. Move limits
            are ignored.
        options: how the copies divide between the phases.

    Complexity: O(L (R N E + copies (E log E + R))) with N copies a rank.

    Raises:
        InvalidInput: a replica budget that does not divide over the ranks.
        InfeasiblePlan: too few slots.
    """
    shape = problem.shape
    ranks, layers, experts = shape.num_ranks, shape.num_layers, shape.num_logical_experts
    capacity = equal_slots_per_rank(problem)
    if problem.source_load is None:
        demand = np.repeat(problem.load.sum(axis=0)[None] / ranks, ranks, axis=0)
    else:
        demand = np.asarray(problem.source_load, np.float64)
    held = np.empty((layers, experts, ranks), np.bool_)
    for layer in range(layers):
        home = _homes(problem.current, layer, ranks, experts, capacity)
        resident, tokens = home[:, None] == np.arange(ranks), np.ascontiguousarray(demand[:, layer])
        room = capacity - np.bincount(home, minlength=ranks)
        held[layer], _ = plan_copies(tokens, resident, room, options.locality, False)
    placement = place_on_ranks(held, shape.slots_per_rank)
    return build_proposal(problem, placement, int(held.sum()) - layers * experts)


def _homes(
    current: Placement | None, layer: int, ranks: int, experts: int, capacity: int
) -> NDArray[np.int64]:
    """Return the home rank of every expert of a layer, (E,).

    Experts are dealt out in order, E / R to each rank. An expert that the current placement holds,
    but not on that rank, has its home on the lowest rank that holds it. The order alone decides if
    an expert has no copy at present, or if a rank would get more homes than it has slots.
    """
    counts = np.full(ranks, experts // ranks)
    counts[: experts % ranks] += 1
    ordered = np.repeat(np.arange(ranks), counts)
    if current is None:
        return ordered
    held = current.held(layer)
    home = np.where(held[np.arange(experts), ordered], ordered, held.argmax(axis=1))
    full = np.bincount(home, minlength=ranks).max() > capacity
    return ordered if full or not held.any(axis=1).all() else np.asarray(home, np.int64)


LIBRA = PolicyEntry(
    "libra",
    "replicas near the ranks whose tokens choose the expert, as the paper prints it",
    plan_libra,
    LibraOptions,
    ("locality",),
    PolicyInputs(source_ranks=True),
)
