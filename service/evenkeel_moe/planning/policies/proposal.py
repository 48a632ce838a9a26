"""The last step of every policy: from the copies it chose to a scored `Proposal`."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.problem import bounds, moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal


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
    """Score a placement and add the lower bound of its problem.

    Args:
        problem: the score is under its dispatch and costs.
        placement: the placement to propose.
        evaluations: candidates evaluated to find it.
        numbers: named figures for the decision log; None for none.
        score: the score, if it is known already.
    """
    return Proposal(
        placement,
        moe_time.score(problem, placement) if score is None else score,
        evaluations,
        bounds.lower_bound(problem),
        {} if numbers is None else numbers,
    )
