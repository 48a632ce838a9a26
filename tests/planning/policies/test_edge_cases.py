"""Every policy on extreme problems, and the typed errors for problems that no policy can solve."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import EvenkeelError, InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.registry import POLICIES
from tests.planning.builders import a_problem
from tests.strategies import loads, shapes, topologies

EVERY = pytest.mark.parametrize("name", sorted(POLICIES))


def problem_of(load, ranks, slots_per_rank, **fields):
    _, layers, experts = load.shape
    shape = ModelShape(layers, experts, ranks, slots_per_rank, 1, 100)
    return a_problem(load, shape, max_evaluations=5000, **fields)


def planned(name, problem):
    """Plan, check everything that holds for any proposal, and return the placement."""
    proposal = POLICIES[name](problem)
    proposal.placement.check(problem.shape)
    assert (proposal.placement.logcnt >= 1).all()
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
    placement = planned(name, problem_of(load, ranks, slots, **fields))
    assert replicas or (placement.logcnt == 1).all()


@pytest.mark.parametrize("name", ["eplb", "keel"])
def test_a_hot_expert_is_on_every_rank(name):
    """GEM never replicates, and libra and CRAFT replicate by other rules."""
    assert (planned(name, problem_of(one_hot(), 3, 3)).logcnt[:, 4] == 3).all()


@EVERY
@given(data=st.data())
def test_any_small_deployment_gets_a_sound_answer_or_a_typed_refusal(name, data):
    shape = data.draw(shapes())
    problem = a_problem(
        data.draw(loads(shape.num_layers, shape.num_logical_experts)),
        shape,
        data.draw(topologies(shape.num_ranks)),
        replica_budget=data.draw(st.none() | st.integers(0, 3)),
        max_evaluations=2000,
    )
    try:
        planned(name, problem)
    except (InvalidInput, InfeasiblePlan) as refused:
        assert str(refused)


@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "not finite"), (np.inf, "not finite"), (-1.0, "negative")]
)
def test_loads_that_cannot_be_are_refused_before_any_policy_sees_them(value, words):
    load = random_load(2, 6)
    load[1, 1, 1] = value
    with pytest.raises(InvalidInput, match=words):
        problem_of(load, 3, 3)


def test_a_window_without_steps_is_refused():
    with pytest.raises(InvalidInput, match="no step"):
        problem_of(np.zeros((0, 2, 6)), 3, 3)


def test_loads_and_topologies_of_another_deployment_are_refused():
    shape = ModelShape(2, 6, 3, 3, 1, 100)
    for load, ranks in ((random_load(2, 7), 3), (random_load(2, 6), 4)):
        with pytest.raises(ShapeMismatch):
            a_problem(load, shape, Topology.single_node(ranks))


@EVERY
def test_curves_of_another_fleet_are_refused(name):
    with pytest.raises(ShapeMismatch):
        cost = CostModel(CostCurves.linear(np.ones(4)))
        POLICIES[name](problem_of(random_load(2, 6), 3, 3, cost=cost))


@EVERY
@pytest.mark.parametrize("budget", [-1, 4])
def test_a_budget_that_no_slots_hold_is_refused(name, budget):
    with pytest.raises((InvalidInput, InfeasiblePlan)):
        POLICIES[name](problem_of(random_load(2, 6), 3, 3, replica_budget=budget))


@EVERY
def test_a_present_placement_of_another_deployment_is_refused_or_not_looked_at(name):
    other = Placement.initial(ModelShape(2, 6, 2, 4, 1, 100))
    problem = problem_of(random_load(2, 6), 3, 3)
    try:
        found = POLICIES[name](replace(problem, current=other)).placement
    except EvenkeelError as refused:
        assert isinstance(refused, ShapeMismatch)
    else:
        assert found.digest == POLICIES[name](problem).placement.digest
