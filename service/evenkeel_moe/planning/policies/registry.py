"""The policies by name.

To add a policy, write `plan(problem) -> Proposal` in a module of its own and add it to `POLICIES`;
docs/policies.md lists what else to edit and the tests that check every policy.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import OptionValue
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft.policy import CraftOptions, plan_craft
from evenkeel_moe.planning.policies.eplb import Variant, plan_eplb
from evenkeel_moe.planning.policies.gem.policy import GemOptions, plan_gem
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.libra import LibraOptions, plan_libra
from evenkeel_moe.planning.policies.metro import plan_metro
from evenkeel_moe.planning.policies.policy_options import ConfigurablePolicy
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import price_of_moves, relabel
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.signals.change_detection import detect_change

POLICIES: dict[str, Policy] = {
    "craft": plan_craft,
    "eplb": plan_eplb,
    "gem": plan_gem,
    "keel": plan_keel,
    "libra": plan_libra,
    "metro": plan_metro,
}
FORMS: dict[str, Policy] = {
    "eplb-global": partial(plan_eplb, variant=Variant.GLOBAL),
    "eplb-hierarchical": partial(plan_eplb, variant=Variant.HIERARCHICAL),
}
"""Single forms of a policy, for deployments where it is known which form is better: for example
hierarchical for prefill and global for decode. Not every topology allows the hierarchical form."""

CONFIGURABLE: dict[str, ConfigurablePolicy[Any]] = {
    "craft": ConfigurablePolicy(
        plan_craft,
        CraftOptions,
        ("rule", "max_replicas_per_rank", "min_marginal_gain", "weighting"),
    ),
    "gem": ConfigurablePolicy(plan_gem, GemOptions, ("restarts", "noise", "least_drop")),
    "keel": ConfigurablePolicy(plan_keel, KeelOptions, ("stickiness", "caution")),
    "libra": ConfigurablePolicy(plan_libra, LibraOptions, ("locality",)),
}
"""The policies that take options from operators, with the options."""


def resolve_policy(name: str, options: Mapping[str, OptionValue] | None = None) -> Policy:
    """Return the policy of a name, with the options that an operator has set for it.

    Raises:
        InvalidInput: no policy has that name, or an option is unknown or out of range; the
            message lists those that are known.
    """
    known = POLICIES | FORMS
    if name not in known:
        raise InvalidInput(
            f"unknown policy {name!r}; known: {', '.join(sorted(known))}", Reason.UNKNOWN_POLICY
        )
    return configurable_policy(name).with_options(name, options) if options else known[name]


def configurable_policy(name: str) -> ConfigurablePolicy[Any]:
    """Return a policy that takes options.

    Raises:
        InvalidInput: no policy has that name, or it takes no options.
    """
    if name not in CONFIGURABLE:
        resolve_policy(name)
        raise InvalidInput(
            f"{name} takes no options; policies with options: {', '.join(sorted(CONFIGURABLE))}"
        )
    return CONFIGURABLE[name]


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
    detect_change(np.repeat(load, 4, axis=0))


def _plan_to_waves(problem: PlacementProblem, policy: Policy) -> None:
    current = problem.current if problem.current is not None else Placement.initial(problem.shape)
    target = relabel(problem, policy(problem).placement)
    price_of_moves(current, target, problem.topology, problem.objective.cross_node_factor)
    schedule_waves(current, target, problem.shape, problem.topology, None)
    # Windows arrive as uint32; loads computed from them are float64.
    for load in (problem.load, problem.load.astype(np.uint32)):
        metrics.balancedness(metrics.rank_load(load, target, SplitModel.of(problem)))
