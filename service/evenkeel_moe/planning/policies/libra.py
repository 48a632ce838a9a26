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
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.proposal import build_proposal, place_on_ranks
from evenkeel_moe.planning.policies.slot_budget import equal_slots_per_rank
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    check_current,
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
        ShapeMismatch: the current placement is of another deployment.
    """
    check_current(problem)
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
        held[layer] = replicate_by_source(
            np.ascontiguousarray(demand[:, layer]), home, capacity, options.locality
        )
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
    slots = np.arange(current.num_slots)
    filled = current.phy2log[layer] >= 0
    held = np.zeros((experts, ranks), np.bool_)
    held[current.phy2log[layer][filled], slots[filled] // current.slots_per_rank] = True
    home = np.where(held[np.arange(experts), ordered], ordered, held.argmax(axis=1))
    full = np.bincount(home, minlength=ranks).max() > capacity
    return ordered if full or not held.any(axis=1).all() else np.asarray(home, np.int64)


@kernel
def replicate_by_source(
    demand: NDArray[np.float64],
    home: NDArray[np.int64],
    capacity: int,
    locality: float,
) -> NDArray[np.bool_]:
    """Run Algorithm 1 for one layer.

    Args:
        demand: (R, E) [tokens] - tokens that start on each rank and choose each expert.
        home: (E,) rank that computes the tokens of ranks without a copy.
        capacity: experts a rank may hold, those it is home to included.
        locality: share of a rank's copies that phase 1 may use.

    Returns:
        (E, R) - True where a rank holds an expert.

    Order: more tokens first, then the lower expert; among target ranks less load first, then the
    lower rank.
    """
    ranks, experts = demand.shape
    held = np.zeros((experts, ranks), np.bool_)
    used = np.zeros(ranks, np.int64)
    for expert in range(experts):
        held[expert, home[expert]] = True
        used[home[expert]] += 1
    passes = 0
    for rank in range(ranks):
        room = capacity - used[rank]
        local = int(room * locality)
        passes += room - local
        for _ in range(local):
            best = -1
            for expert in range(experts):
                if not held[expert, rank] and (
                    best < 0 or demand[rank, expert] > demand[rank, best]
                ):
                    best = expert
            if best < 0 or demand[rank, best] <= 0.0:
                break
            held[best, rank] = True
            used[rank] += 1
    _relieve_fullest_rank(demand, home, capacity, held, used, passes)
    return held


@kernel
def _relieve_fullest_rank(
    demand: NDArray[np.float64],
    home: NDArray[np.int64],
    capacity: int,
    held: NDArray[np.bool_],
    used: NDArray[np.int64],
    passes: int,
) -> None:
    """Run phase 2 until no rank is above the mean load or no copy is allowed.

    Mutates `held` (E, R) and `used` (R,), the experts each rank holds.
    """
    ranks, experts = demand.shape
    load = np.zeros(ranks)
    # (E,) tokens that an expert's home computes for other ranks.
    remote = np.zeros(experts)
    for expert in range(experts):
        for rank in range(ranks):
            if held[expert, rank]:
                load[rank] += demand[rank, expert]
            else:
                load[home[expert]] += demand[rank, expert]
                remote[expert] += demand[rank, expert]
    target = load.sum() / ranks
    for _ in range(passes):
        source = int(np.argmax(load))
        if load[source] <= target:
            return
        from_source = np.where(home == source, remote, 0.0)
        hottest = int(np.argmax(from_source))
        if from_source[hottest] <= 0.0:
            return
        goal = -1
        for rank in range(ranks):
            free = not held[hottest, rank] and used[rank] < capacity
            if free and (goal < 0 or load[rank] < load[goal]):
                goal = rank
        if goal < 0 or load[goal] + demand[goal, hottest] > target:
            return
        tokens = demand[goal, hottest]
        held[hottest, goal] = True
        used[goal] += 1
        load[source] -= tokens
        load[goal] += tokens
        remote[hottest] -= tokens
