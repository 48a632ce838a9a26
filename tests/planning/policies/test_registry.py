import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.placement import EMPTY
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies import registry
from evenkeel_moe.planning.policies.eplb import EPLB, Variant, plan_eplb
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.registry import (
    FORMS,
    GROUP,
    POLICIES,
    find_policy,
    known_policies,
)
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel
from evenkeel_moe.replay.planners import choose_planners
from tests.planning.builders import a_problem


def test_one_form_of_eplb_can_be_chosen_by_name():
    shape = ModelShape(2, 8, 4, 3, 2, 100, num_expert_groups=2)
    load = np.random.default_rng(1).lognormal(4, 1, (6, 2, 8))
    problem = a_problem(load, shape, Topology((0, 0, 1, 1)))
    for variant in Variant:
        chosen = find_policy(f"eplb-{variant}")(problem)
        assert chosen.placement == plan_eplb(problem, variant).placement
        assert chosen.numbers["keep_nodes"] == (variant is Variant.HIERARCHICAL)
    with pytest.raises(InvalidInput, match="hierarchical EPLB is not possible: there is one node"):
        find_policy("eplb-hierarchical")(replace(problem, topology=Topology.single_node(4)))


def test_unknown_policy_names_the_known_ones():
    with pytest.raises(InvalidInput, match="unknown policy 'magic'; known: .*eplb") as error:
        find_policy("magic")
    assert error.value.reason is Reason.UNKNOWN_POLICY


PLAN_AFTER_WARMING = """
import importlib, pkgutil
from itertools import product
import numpy as np
from numba.core.dispatcher import Dispatcher
import evenkeel_moe.planning
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies import registry as policies
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.schedule.relabel import relabel
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.signals.change_detection import detect_change

def compiled():
    found = pkgutil.walk_packages(evenkeel_moe.planning.__path__, "evenkeel_moe.planning.")
    return {
        (module, name): len(value.signatures)
        for module in (importlib.import_module(m.name) for m in found)
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
    }

policies.warm_kernels()
before = compiled()
load = np.random.default_rng(0).integers(0, 99, (8, 3, 12)).astype(float)
topology = Topology((0, 1, 0, 1))
curves = CostCurves.linear(np.linspace(1e-6, 2e-6, 4))
costs = (TOKENS, CostModel(curves), CostModel(curves, ReplicaWork(2.0)))
for pool, dispatch, cost in product((None, 11), DispatchModel, costs):
    shape = ModelShape(3, 12, 4, 4, 2, 100, pool_slots_per_rank=pool)
    current = Placement.initial(shape)
    objective = Objective(cost=cost, dispatch=dispatch, fill_slots=pool is None)
    problem = PlacementProblem(
        load, shape, topology, current=current, objective=objective, max_evaluations=2000
    )
    for policy in policies.POLICIES.values():
        target = relabel(problem, policy(problem).placement)
        schedule_waves(current, target, shape, problem.topology, None)
detect_change(np.tile(load, (16, 1, 1)))
print(*(key for key, count in compiled().items() if count > before[key]))
"""


def test_nothing_compiles_after_warming():
    # In a process of its own: in this one, other tests have compiled the kernels already.
    done = subprocess.run(
        [sys.executable, "-c", PLAN_AFTER_WARMING], capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_planning_again_on_the_same_load_moves_nothing(name):
    shape = ModelShape(3, 12, 4, 4, 2, 100)
    load = np.random.default_rng(4).lognormal(4, 1, (6, 3, 12))
    topology = Topology.single_node(4)
    first = find_policy(name)(a_problem(load, shape, topology, max_evaluations=20_000)).placement
    again = a_problem(
        load,
        shape,
        topology,
        current=first,
        copy_cost=1.0,
        lifetime_steps=1,
        max_evaluations=20_000,
    )
    target = relabel(again, find_policy(name)(again).placement)
    assert count_moves(first, target) == 0


@pytest.mark.parametrize("name", ["craft", "eplb"])
@given(st.integers(0, 1000))
def test_other_names_of_the_experts_change_nothing_else(name, seed):
    """This holds for policies that plan from the loads alone.

    keel searches from a placement, and GEM draws orders by expert id.
    """
    rng = np.random.default_rng(seed)
    load, new = rng.lognormal(4, 1, (4, 2, 8)), rng.permutation(8)
    shape = ModelShape(2, 8, 3, 4, 2, 100)
    plan, topology = find_policy(name), Topology.single_node(3)
    first = plan(a_problem(load, shape, topology))
    renamed = plan(a_problem(load[:, :, new], shape, topology))
    names = np.append(new, EMPTY)  # The last stands for an empty slot, -1.
    assert by_rank(names[renamed.placement.phy2log]) == by_rank(first.placement.phy2log)
    assert renamed.score == pytest.approx(first.score)


def by_rank(phy2log):
    """Return the sets of experts that ranks hold in each layer, in an order without rank ids."""
    return [sorted(sorted(rank) for rank in row.reshape(3, -1).tolist()) for row in phy2log]


@pytest.fixture
def added_by(monkeypatch):
    """Returns a function that lets another package add an entry point."""

    def add(name, value):
        point = EntryPoint(name, f"{__name__}:{value}", GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        registry.added_policies.cache_clear()

    yield add
    registry.added_policies.cache_clear()


OURS = PolicyEntry("ours", "as eplb", EPLB.plan, inputs=PolicyInputs(source_ranks=True))
TAKEN = replace(OURS, name="gem")


def test_a_policy_of_another_package_is_one_like_the_others(added_by):
    added_by("ours", "OURS")
    assert find_policy("ours") is OURS
    assert find_policy("ours").with_options({"plan_steps": 4}) is OURS
    assert set(known_policies()) == {*POLICIES, *FORMS, "ours"}
    planners = choose_planners(["ours"], baselines=False)
    assert list(planners) == ["ours"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ours", "absent", "which the entry point '.*:absent' adds, cannot be imported"),
        ("ours", "a_problem", "is no PolicyEntry of that name"),
        ("other", "OURS", "is no PolicyEntry of that name"),
        ("gem", "TAKEN", "has the name of another policy"),
    ],
)
def test_a_broken_policy_of_another_package_is_named_and_stops_no_other(
    added_by, name, value, words
):
    added_by(name, value)
    with pytest.raises(InvalidInput, match=words):
        find_policy("magic")
    assert find_policy("keel") is POLICIES["keel"]
