import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import EvenkeelError, InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies import registry
from evenkeel_moe.planning.policies.craft import (
    CraftOptions,
    GainWeighting,
    ReplicaRule,
    plan_craft,
)
from evenkeel_moe.planning.policies.eplb import EPLB, Variant, plan_eplb
from evenkeel_moe.planning.policies.gem import GemOptions, plan_gem
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.registry import (
    FORMS,
    GROUP,
    POLICIES,
    find_policy,
    known_policies,
)
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel
from evenkeel_moe.replay.planners import choose_planners
from tests.planning.builders import a_problem
from tests.strategies import cost_models, loads, placements, seeds, shapes, topologies


def test_one_form_of_eplb_can_be_chosen_by_name():
    shape = ModelShape(2, 8, 4, 3, 2, 100, num_expert_groups=2)
    load = np.random.default_rng(1).lognormal(4, 1, (6, 2, 8))
    problem = a_problem(load, shape, Topology((0, 0, 1, 1)))
    for variant in Variant:
        chosen = find_policy(f"eplb-{variant}")(problem)
        assert chosen.placement == plan_eplb(problem, variant).placement
        assert chosen.numbers["keep_nodes"] == (variant is Variant.HIERARCHICAL)


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


# --- policy entry ---------------------------------------------------------------------------------


SHAPE = ModelShape(6, 8, 4, 4, 2, 100, pool_slots_per_rank=24)


def problem_of(shape=SHAPE):
    load = np.random.default_rng(2).lognormal(4, 1, (6, 6, 8))
    return a_problem(load, shape, max_evaluations=20_000)


def test_options_reach_the_policy_in_the_types_of_its_class():
    craft = find_policy("craft").with_options(
        {"max_replicas_per_rank": 1, "weighting": "by_replicas"}
    )
    wanted = CraftOptions(GainWeighting.BY_REPLICAS, max_replicas_per_rank=1)
    assert craft(problem_of()).placement == plan_craft(problem_of(), wanted).placement
    gem = find_policy("gem").with_options({"restarts": 2, "noise": 0})
    by_hand = plan_gem(problem_of(), GemOptions(restarts=2, noise=0.0))
    assert gem(problem_of()).placement == by_hand.placement


def test_craft_places_no_more_replicas_than_the_bound():
    craft = find_policy("craft").with_options({"rule": "memory"})
    assert craft(problem_of()).numbers["replicas"] > 4
    for most in (0, 1):
        for rule in ReplicaRule:
            options = {"max_replicas_per_rank": most, "rule": rule.value}
            proposal = find_policy("craft").with_options(options)(problem_of())
            assert proposal.numbers["replicas"] <= 4 * most
            assert proposal.numbers["replication_factor"] <= most


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_option_that_is_offered_is_a_field_and_takes_its_default(name):
    one = POLICIES[name]
    defaults = one.options()
    assert set(one.option_names) <= {field.name for field in fields(defaults)}
    given = {key: getattr(defaults, key) for key in one.option_names}
    set_ones = {key: value for key, value in given.items() if value is not None}
    problem = problem_of(ModelShape(6, 8, 4, 3, 2, 100))
    answer = one.with_options(set_ones)(problem)
    assert answer.placement == POLICIES[name](problem).placement


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "gem",
            {"restart": 3},
            "unknown options of gem: restart; known: least_drop, noise, p",
        ),
        (
            "keel",
            {"change": 3},
            "of keel: change; known: caution, plan_steps, stick",
        ),
        ("eplb", {"a": 1}, "unknown options of eplb: a; known: plan_steps$"),
        ("eplb-global", {"a": 1}, "unknown options of eplb-global: a; known: plan_steps$"),
        ("magic", {"plan_steps": 16}, "unknown policy 'magic'"),
        ("metro", {"plan_steps": 0}, "options of metro: plan_steps is 0, must be at least 1"),
        ("gem", {"plan_steps": 1.5}, "gem.plan_steps is 1.5, must be a whole number"),
        ("gem", {"restarts": 2.5}, "gem.restarts is 2.5, must be a whole number"),
        ("gem", {"restarts": True}, "gem.restarts is True, must be a whole number"),
        ("gem", {"restarts": 10**400}, "gem.restarts is 1000000"),
        ("gem", {"restarts": 1001}, "options of gem: restarts is 1001, must be from 1 to 1000"),
        ("gem", {"noise": 1}, r"options of gem: noise is 1.0, must be in \[0, 1\)$"),
        ("gem", {"noise": "much"}, "gem.noise is 'much', must be a finite number"),
        ("gem", {"noise": float("nan")}, "gem.noise is nan, must be a finite number"),
        ("gem", {"noise": 10**400}, "must be a finite number below"),
        ("craft", {"rule": "best"}, "craft.rule is 'best', must be one of memory, marginal_gain"),
        ("craft", {"rule": 3}, "craft.rule is 3, must be one of"),
        ("craft", {"max_replicas_per_rank": -1}, "max_replicas_per_rank is -1, must not be neg"),
        ("libra", {"locality": 2}, "options of libra: locality is 2.0, must be in"),
        ("keel", {"caution": -0.1}, "options of keel: caution is -0.1, must be in"),
    ],
)
def test_options_that_cannot_be_right_are_refused_in_words(name, options, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        find_policy(name).with_options(options)
    assert len(str(caught.value)) < 220


# --- edge cases -----------------------------------------------------------------------------------


EVERY = pytest.mark.parametrize("name", sorted(POLICIES))


def extreme_problem(load, ranks, slots_per_rank, **fields):
    _, layers, experts = load.shape
    shape = ModelShape(layers, experts, ranks, slots_per_rank, 1, 100)
    return a_problem(load, shape, max_evaluations=5000, **fields)


def planned(name, problem):
    """Plan, check everything that holds for any proposal, and return the placement."""
    proposal = POLICIES[name](problem)
    proposal.placement.check(problem.shape)
    assert (proposal.placement.logcnt >= 1).all()
    assert proposal.score == pytest.approx(moe_time.score(problem, proposal.placement))
    assert np.isfinite(proposal.score)
    assert POLICIES[name](problem).placement.digest == proposal.placement.digest
    return proposal.placement


def random_load(layers, experts, steps=3):
    return np.random.default_rng(5).integers(0, 500, (steps, layers, experts)).astype(np.float64)


def silent(where):
    load = random_load(2, 6)
    load[where] = 0.0
    return load


def one_hot():
    load = np.zeros((3, 2, 6))
    load[:, :, 4] = 1000.0
    return load


@EVERY
@pytest.mark.parametrize(
    ("load", "ranks", "slots", "fields", "replicas"),
    [
        (np.zeros((3, 2, 6)), 3, 3, {}, True),
        (silent((slice(None), 0)), 3, 3, {}, True),
        (silent(1), 3, 3, {}, True),
        (one_hot(), 3, 3, {}, True),
        (random_load(2, 3), 5, 2, {}, True),
        (random_load(2, 6), 1, 6, {}, False),
        (random_load(1, 1), 1, 1, {}, False),
        (random_load(2, 6), 3, 2, {}, False),
        (random_load(2, 6), 3, 3, {"replica_budget": 0}, False),
    ],
    ids=[
        "no load", "silent layer", "silent step", "one hot expert", "more ranks than experts",
        "one rank", "one expert", "as many slots as experts", "no budget",
    ],
)  # fmt: skip
def test_extreme_problems_have_sound_plans(name, load, ranks, slots, fields, replicas):
    placement = planned(name, extreme_problem(load, ranks, slots, **fields))
    assert replicas or (placement.logcnt == 1).all()


@pytest.mark.parametrize("name", ["eplb", "keel"])
def test_a_hot_expert_is_on_every_rank(name):
    """GEM never replicates, and libra and CRAFT replicate by other rules."""
    assert (planned(name, extreme_problem(one_hot(), 3, 3)).logcnt[:, 4] == 3).all()


@EVERY
@given(data=st.data())
def test_any_small_deployment_gets_a_sound_answer_or_a_typed_refusal(name, data):
    shape = data.draw(shapes())
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    size, rng = (shape.num_ranks, *load.shape[1:]), np.random.default_rng(data.draw(seeds))
    source = rng.integers(0, 9, size) * 10.0 ** rng.integers(-9, 12, size)
    problem = a_problem(
        load,
        shape,
        data.draw(topologies(shape.num_ranks)),
        current=data.draw(st.none() | placements(shape)),
        replica_budget=data.draw(st.none() | st.integers(0, 3)),
        source_load=source if data.draw(st.booleans()) else None,
        cost=data.draw(cost_models(shape.num_ranks)),
        dispatch=data.draw(st.sampled_from(DispatchModel)),
        max_evaluations=2000,
    )
    try:
        planned(name, problem)
    except (InvalidInput, InfeasiblePlan) as refused:
        assert problem.replica_budget is not None, "a policy may refuse a small budget alone"
        assert str(refused) and "source" not in str(refused)


@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "not finite"), (np.inf, "not finite"), (-1.0, "negative")]
)
def test_loads_that_cannot_be_are_refused_before_any_policy_sees_them(value, words):
    load = random_load(2, 6)
    load[1, 1, 1] = value
    with pytest.raises(InvalidInput, match=words):
        extreme_problem(load, 3, 3)


def test_a_window_without_steps_is_refused():
    with pytest.raises(InvalidInput, match="no step"):
        extreme_problem(np.zeros((0, 2, 6)), 3, 3)


def test_loads_and_topologies_of_another_deployment_are_refused():
    shape = ModelShape(2, 6, 3, 3, 1, 100)
    for load, ranks in ((random_load(2, 7), 3), (random_load(2, 6), 4)):
        with pytest.raises(ShapeMismatch):
            a_problem(load, shape, Topology.single_node(ranks))


@EVERY
def test_curves_of_another_fleet_are_refused(name):
    with pytest.raises(ShapeMismatch):
        cost = CostModel(CostCurves.linear(np.ones(4)))
        POLICIES[name](extreme_problem(random_load(2, 6), 3, 3, cost=cost))


@EVERY
@pytest.mark.parametrize("budget", [-1, 4])
def test_a_budget_that_no_slots_hold_is_refused(name, budget):
    with pytest.raises((InvalidInput, InfeasiblePlan)):
        POLICIES[name](extreme_problem(random_load(2, 6), 3, 3, replica_budget=budget))


@EVERY
def test_a_present_placement_of_another_deployment_is_refused_or_not_looked_at(name):
    other = Placement.initial(ModelShape(2, 6, 2, 4, 1, 100))
    problem = extreme_problem(random_load(2, 6), 3, 3)
    try:
        found = POLICIES[name](replace(problem, current=other)).placement
    except EvenkeelError as refused:
        assert isinstance(refused, ShapeMismatch)
    else:
        assert found.digest == POLICIES[name](problem).placement.digest
