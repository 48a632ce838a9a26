"""The policies by name.

To add a policy, write a module that ends with a `PolicyEntry`, and add the entry to `POLICIES`. A
package of your own names the entry in an entry point of the group `evenkeel.policies` instead.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from itertools import cycle, product

import numpy as np

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft import CRAFT
from evenkeel_moe.planning.policies.eplb import EPLB, EPLB_FORMS, METRO
from evenkeel_moe.planning.policies.gem import GEM
from evenkeel_moe.planning.policies.keel.policy import KEEL
from evenkeel_moe.planning.policies.libra import LIBRA
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import price_of_moves, relabel
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.signals.change_detection import detect_change

POLICIES: dict[str, PolicyEntry] = {
    entry.name: entry for entry in (CRAFT, EPLB, GEM, KEEL, LIBRA, METRO)
}
FORMS: dict[str, PolicyEntry] = {entry.name: entry for entry in EPLB_FORMS}
"""Single forms of a policy."""
GROUP = "evenkeel.policies"
"""Entry points of this group add policies of other packages. Each names a `PolicyEntry`."""


@cache
def added_policies() -> Mapping[str, PolicyEntry]:
    """Return the policies that other installed packages add, by name.

    Raises:
        InvalidInput: one cannot be imported, is no `PolicyEntry`, or has a name that is taken.
    """
    added: dict[str, PolicyEntry] = {}
    for point in entry_points(group=GROUP):
        where = f"the policy {point.name!r}, which the entry point {point.value!r} adds,"
        try:
            entry = point.load()
        except Exception as error:  # Whatever another package raises while it is imported.
            raise InvalidInput(f"{where} cannot be imported: {error}") from error
        if not isinstance(entry, PolicyEntry) or entry.name != point.name:
            raise InvalidInput(f"{where} is no PolicyEntry of that name")
        if entry.name in POLICIES | FORMS | added:
            raise InvalidInput(f"{where} has the name of another policy")
        added[entry.name] = entry
    return added


def known_policies() -> dict[str, PolicyEntry]:
    """Return all policies by name: ours, their single forms, and those of other packages.

    Raises:
        InvalidInput: see `added_policies`.
    """
    return {**POLICIES, **FORMS, **added_policies()}


def find_policy(name: str) -> PolicyEntry:
    """Return the policy of a name.

    Raises:
        InvalidInput: no policy has that name; the message lists those that are known. Or see
            `added_policies`.
    """
    # Ours first: they also work where the package of another policy is broken.
    found = (POLICIES | FORMS).get(name) or added_policies().get(name)
    if found is None:
        known = known_policies()
        raise InvalidInput(
            f"unknown policy {name!r}; known: {', '.join(sorted(known))}", Reason.UNKNOWN_POLICY
        )
    return found


def warm_kernels() -> None:
    """Compile every kernel of a cycle by planning small problems with every policy.

    The first call takes seconds; later processes read the compiled kernels from the disk cache.
    Each kind of slots meets each dispatch model and each cost model, but not all pairs of both: a
    pair has no kernels of its own, and every controller waits for these plans at its start.
    """
    fixed = ModelShape(2, 8, 4, 3, 2, 1024, num_expert_groups=4)
    pooled = replace(fixed, pool_slots_per_rank=5)
    load = np.arange(4 * 2 * 8, dtype=np.float64).reshape(4, 2, 8) % 7 + 1
    load[:, 1] **= 3  # so that keel moves copies of pooled slots to this layer
    curves = CostCurves.linear(np.full(4, 1e-6))
    costs = cycle((TOKENS, CostModel(curves), CostModel(curves, ReplicaWork(3.0))))
    for (shape, dispatch), cost in zip(
        product((fixed, pooled), DispatchModel), costs, strict=False
    ):
        problem = PlacementProblem(
            load,
            shape,
            Topology((0, 0, 1, 1)),
            current=Placement.initial(shape),
            objective=Objective(
                cost=cost, dispatch=dispatch, cross_node_factor=2.0, fill_slots=True
            ),
            max_evaluations=1000,
        )
        for policy in POLICIES.values():
            _plan_to_waves(problem, policy)
    # With one slot on every rank keel has a search of its own.
    single = replace(fixed, num_ranks=12, slots_per_rank=1)
    start = Placement.initial(single)
    problem = PlacementProblem(load, single, Topology((0,) * 12), current=start)
    _plan_to_waves(problem, POLICIES["keel"])
    # Only a plan that must survive a failure repairs its starts.
    _plan_to_waves(problem, POLICIES["keel"].with_options({"survive": "rank"}))
    detect_change(np.repeat(load, 4, axis=0))


def _plan_to_waves(problem: PlacementProblem, policy: Policy) -> None:
    current = problem.current if problem.current is not None else Placement.initial(problem.shape)
    target = relabel(problem, policy(problem).placement)
    price_of_moves(current, target, problem.topology, problem.objective.cross_node_factor)
    schedule_waves(current, target, problem.shape, problem.topology, None)
    # Windows arrive as uint32; loads computed from them are float64.
    for load in (problem.load, problem.load.astype(np.uint32)):
        metrics.balancedness(metrics.rank_load(load, target, SplitModel.of(problem)))
