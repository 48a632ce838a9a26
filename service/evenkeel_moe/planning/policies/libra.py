"""The Libra policy: replicas first where tokens start, then where load is left over.

Every expert keeps a home. Phase 1 gives each rank copies of the remote experts its own tokens want most.
Phase 2 takes load off the fullest rank by copying its most wanted expert to the emptiest rank, whose own tokens for
it then stay at home.

Source: Libra Algorithm 1, on recorded instead of predicted demand.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.eplb import slots_to_fill
from evenkeel_moe.planning.problem import bounds, metrics
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    check_current,
)

__all__ = ["LibraOptions", "plan_libra", "replicate_by_source"]


@dataclass(frozen=True, slots=True)
class LibraOptions:
    """The paper's constants."""

    locality: float = 0.5
    """L / N: share of a rank's copies that phase 1 may use."""

    def __post_init__(self) -> None:
        if not 0 <= self.locality <= 1:
            raise InvalidInput(f"locality is {self.locality}, must be in [0, 1]")


@kernel
def replicate_by_source(
    demand: NDArray[np.float64], home: NDArray[np.int64], capacity: int, locality: float
) -> NDArray[np.bool_]:
    """Algorithm 1 for one layer.

    Args:
        demand: (R, E) [tokens] each rank's tokens route to each expert.
        home: (E,) rank that computes what no local copy does.
        capacity: experts a rank may hold, home ones included.
        locality: share of a rank's copies that phase 1 may use.

    Returns:
        (E, R) whether a rank holds an expert.

    Order: more tokens first, then the lower expert; among target ranks less load first, then the lower rank. Where
    line 15 does not hold the next (expert, rank) is tried; the phase ends when none is left.
    """
    ranks, experts = demand.shape
    held = np.zeros((experts, ranks), np.bool_)
    used = np.zeros(ranks, np.int64)
    for expert in range(experts):
        held[expert, home[expert]] = True
        used[home[expert]] += 1
    for rank in range(ranks):
        for _ in range(int((capacity - used[rank]) * locality)):
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
    load = np.zeros(ranks)
    remote = np.zeros(experts)
    for expert in range(experts):
        for rank in range(ranks):
            if held[expert, rank]:
                load[rank] += demand[rank, expert]
            else:
                load[home[expert]] += demand[rank, expert]
                remote[expert] += demand[rank, expert]
    target = load.sum() / ranks
    while True:
        source = int(np.argmax(load))
        if load[source] <= target:
            return held
        chosen, goal = -1, -1
        for expert in np.argsort(-remote, kind="mergesort"):
            if home[expert] != source or remote[expert] <= 0.0:
                continue
            for rank in range(ranks):
                tokens = demand[rank, expert]
                if held[expert, rank] or used[rank] >= capacity or tokens <= 0.0:
                    continue
                if load[rank] + tokens <= target and (goal < 0 or load[rank] < load[goal]):
                    chosen, goal = expert, rank
            if goal >= 0:
                break
        if goal < 0:
            return held
        tokens = demand[goal, chosen]
        held[chosen, goal] = True
        used[goal] += 1
        load[source] -= tokens
        load[goal] += tokens
        remote[chosen] -= tokens


def plan_libra(problem: PlacementProblem, options: LibraOptions = LibraOptions()) -> Proposal:
    """Plan by Libra.

    Args:
        problem: `source_load` is the demand; without it every rank is taken to route the same. Homes are experts in
            order over the ranks, or where the current placement has them. Meant for nearest dispatch;
            the score is under the problem's own. Move limits are not looked at.
        options: the split between the phases.

    Complexity: O(L (R N E + copies (E log E + R))) with N copies a rank.

    Raises:
        InvalidInput: a replica budget that does not divide over the ranks.
        InfeasiblePlan: too few slots.
        ShapeMismatch: the current placement is of another deployment.
    """
    check_current(problem)
    shape = problem.shape
    ranks, layers, experts = shape.num_ranks, shape.num_layers, shape.num_logical_experts
    capacity = slots_to_fill(problem)
    if problem.source_load is None:
        demand = np.repeat(problem.load.sum(axis=0)[None] / ranks, ranks, axis=0)
    else:
        demand = np.asarray(problem.source_load, np.float64)
    rows = np.full((layers, ranks, shape.slots_per_rank), EMPTY, np.int32)
    for layer in range(layers):
        home = _homes(problem.current, layer, ranks, experts, capacity)
        held = replicate_by_source(
            np.ascontiguousarray(demand[:, layer]), home, capacity, options.locality
        )
        for rank in range(ranks):
            on_rank = np.nonzero(held[:, rank])[0]
            rows[layer, rank, : len(on_rank)] = on_rank
    placement = Placement(rows.reshape(layers, -1), ranks, experts)
    return Proposal(
        placement=placement,
        score=metrics.score(problem, placement),
        evaluations=int(placement.logcnt.sum()) - layers * experts,
        lower_bound=bounds.lower_bound(problem),
    )


def _homes(
    current: Placement | None, layer: int, ranks: int, experts: int, capacity: int
) -> NDArray[np.int64]:
    """(E,) home rank of every expert: its place in order, unless the current placement has it only elsewhere."""
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
