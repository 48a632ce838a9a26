"""The policies by name.

To add a policy, write `plan(problem) -> Proposal` in a module of its own and add it to `POLICIES`;
docs/policies.md lists what else to edit and the tests that hold every policy.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft.policy import plan_craft
from evenkeel_moe.planning.policies.eplb import Variant, plan_eplb
from evenkeel_moe.planning.policies.gem.policy import plan_gem
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.libra import plan_libra, plan_libra_refined
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import relabel
from evenkeel_moe.planning.schedule.waves import schedule_waves

POLICIES: dict[str, Policy] = {
    "craft": plan_craft,
    "eplb": plan_eplb,
    "gem": plan_gem,
    "keel": plan_keel,
    "libra": plan_libra,
    "libra-refined": plan_libra_refined,
}
FORMS: dict[str, Policy] = {
    "eplb-global": partial(plan_eplb, variant=Variant.GLOBAL),
    "eplb-hierarchical": partial(plan_eplb, variant=Variant.HIERARCHICAL),
}
"""Single forms of a policy, for deployments whose better form is known: for example hierarchical
for prefill and global for decode. Not every topology allows the hierarchical form."""


def resolve_policy(name: str) -> Policy:
    """Return the policy of a name.

    Raises:
        InvalidInput: no policy has that name; the message lists those that do.
    """
    known = POLICIES | FORMS
    if name not in known:
        raise InvalidInput(
            f"unknown policy {name!r}; known: {', '.join(sorted(known))}", Reason.UNKNOWN_POLICY
        )
    return known[name]


def warm_kernels() -> None:
    """Compile every kernel by planning small problems with every policy.

    The first call takes seconds; later processes read the compiled kernels from the disk cache.
    """
    fixed = ModelShape(2, 8, 4, 3, 2, 1024, num_expert_groups=4)
    pooled = replace(fixed, pool_slots_per_rank=5)
    load = np.arange(4 * 2 * 8, dtype=np.float64).reshape(4, 2, 8) % 7 + 1
    curves = CostCurves.linear(np.full(4, 1e-6))
    costs = (CostModel(curves), CostModel(curves, ReplicaWork(3.0)), TOKENS)
    for shape, dispatch, cost in product((fixed, pooled), DispatchModel, costs):
        problem = PlacementProblem(
            load,
            shape,
            Topology((0, 0, 1, 1)),
            current=Placement.initial(shape),
            objective=Objective(cost=cost, dispatch=dispatch, fill_slots=True),
            max_evaluations=1000,
        )
        for policy in POLICIES.values():
            _plan_to_waves(problem, policy)


def _plan_to_waves(problem: PlacementProblem, policy: Policy) -> None:
    current = problem.current if problem.current is not None else Placement.initial(problem.shape)
    target = relabel(problem, policy(problem).placement)
    schedule_waves(current, target, problem.shape, problem.topology, None)
    # Windows arrive as uint32; loads computed from them are float64.
    for load in (problem.load, problem.load.astype(np.uint32)):
        metrics.balancedness(metrics.rank_load(load, target, SplitModel.of(problem)))
