"""The last step of every policy: from the copies it chose to a scored `Proposal`."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.fill_slots import fill_empty_slots
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal
from evenkeel_moe.planning.schedule.relabel import relabel


def place_on_ranks(held: NDArray[np.bool_], slots_per_rank: int) -> Placement:
    """Build a placement from the experts each rank holds.

    Args:
        held: (L, E, R) - True where a rank holds a copy of an expert.
        slots_per_rank: local slots of a layer. A rank fills its first slots, in the order of expert
            ids; the others stay empty.
    """
    layers, experts, ranks = held.shape
    rows = np.full((layers, ranks, slots_per_rank), EMPTY, np.int32)
    layer, expert, rank = np.nonzero(held)
    rows[layer, rank, held.cumsum(axis=1)[layer, expert, rank] - 1] = expert
    return Placement(rows.reshape(layers, -1), ranks, experts)


def build_proposal(
    problem: PlacementProblem,
    placement: Placement,
    evaluations: int,
    numbers: dict[str, float] | None = None,
    *,
    score: float | None = None,
) -> Proposal:
    """Fill slots that must not stay empty, and score the placement.

    Args:
        problem: the score is under its dispatch and costs.
        placement: the placement to propose. Before its empty slots are filled, its ranks are
            renamed so that the fewest experts move.
        evaluations: candidates evaluated to find it.
        numbers: named figures for the decision log; None for none.
        score: the score, if it is known already.

    Returns:
        numbers: those given, and `filled_slots` if slots were filled.
    """
    numbers = {} if numbers is None else dict(numbers)
    empty = int((placement.phy2log == EMPTY).sum())
    if problem.objective.fill_slots and empty and not problem.shape.pooled:
        keep_nodes = numbers.get("keep_nodes", 0.0) > 0
        placement = fill_empty_slots(problem, relabel(problem, placement, keep_nodes=keep_nodes))
        numbers["filled_slots"] = float(empty - int((placement.phy2log == EMPTY).sum()))
        score = None
    return Proposal(
        placement,
        moe_time.score(problem, placement) if score is None else score,
        evaluations,
        numbers,
    )
