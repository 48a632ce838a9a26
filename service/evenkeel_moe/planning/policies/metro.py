"""The metro policy: EPLB by activations instead of tokens.

Decode is often memory-bound: a rank's time then follows the number of experts that it activates.
METRO routes every batch to the fewest replicas (`fewest` dispatch) over EPLB's placement. This
policy carries the idea to the placement: it gives EPLB, as load, the steps in which an expert has
tokens at all. It is a baseline; keel weighs both by the cost model.

Source: METRO, arXiv 2512.09277.
"""

from dataclasses import replace

import numpy as np

from evenkeel_moe.planning.policies.eplb import Variant, choose_form
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry
from evenkeel_moe.planning.policies.proposal import build_proposal
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal


def plan_metro(problem: PlacementProblem) -> Proposal:
    """Plan by EPLB on the share of steps in which each expert is active.

    Args:
        problem: as for EPLB.

    Raises:
        InvalidInput, InfeasiblePlan: as EPLB.
    """
    active = np.minimum(problem.load, 1.0)
    placement, scores, form = choose_form(replace(problem, load=active))
    keep_nodes = float(form is Variant.HIERARCHICAL)
    return build_proposal(problem, placement, len(scores), {"keep_nodes": keep_nodes})


METRO = PolicyEntry(
    "metro", "eplb, with the steps in which an expert has tokens at all as its load", plan_metro
)
