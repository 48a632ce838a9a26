"""Detection of changes of traffic, and the weights of steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.signals.change_detection import ChangeRules, detect_change, step_weights
from tests.strategies import loads, seeds


def traffic(rng, steps, hot):
    """(steps, 2, 8) Poisson tokens, one expert five times as hot as the others."""
    mean = np.full(8, 40.0)
    mean[hot] = 200.0
    return rng.poisson(mean, (steps, 2, 8)).astype(float)


@given(seeds, st.integers(30, 70))
def test_an_abrupt_change_is_found_at_its_step(seed, at):
    rng = np.random.default_rng(seed)
    change = detect_change(np.concatenate([traffic(rng, at, 0), traffic(rng, 100 - at, 5)]))
    assert abs(change.first_step - at) <= 1
    assert change.strength > ChangeRules().threshold


@given(seeds)
def test_of_two_changes_the_newer_counts(seed):
    rng = np.random.default_rng(seed)
    change = detect_change(np.concatenate([traffic(rng, 40, hot) for hot in (0, 5, 2)]))
    assert abs(change.first_step - 80) <= 1


@given(seeds)
def test_chance_alone_is_no_change(seed):
    change = detect_change(traffic(np.random.default_rng(seed), 100, 0))
    assert change.first_step == 0
    assert change.strength < ChangeRules().threshold


def test_too_few_steps_tell_nothing():
    change = detect_change(traffic(np.random.default_rng(0), 5, 0))
    assert change.first_step == 0 and np.isnan(change.strength)


@given(loads(2, 6, max_steps=40))
def test_weights_sum_to_one_and_never_fall_with_time(load):
    weights, _ = step_weights(load)
    assert weights.shape == (len(load),)
    assert weights.sum() == pytest.approx(1.0)
    assert (np.diff(weights) >= 0).all()


def test_steps_before_a_change_keep_a_tenth():
    rng = np.random.default_rng(3)
    load = np.concatenate([traffic(rng, 60, 0), traffic(rng, 40, 5)])
    weights, change = step_weights(load)
    usual = 0.5 ** (1 / (ChangeRules().half_life_windows * len(load)))
    before, after = weights[change.first_step - 1 : change.first_step + 1]
    assert before / after == pytest.approx(ChangeRules().old_weight * usual)


def test_keel_gives_the_spare_slot_to_what_is_hot_since_the_change():
    rng = np.random.default_rng(4)
    load = np.concatenate([traffic(rng, 70, 0), traffic(rng, 30, 5)])
    shape = ModelShape(2, 8, 3, 3, 2, 100)
    problem = PlacementProblem(load, shape, Topology.single_node(3))
    assert (plan_eplb(problem).placement.logcnt[:, 0] == 2).all(), (
        "over the whole window expert 0 is the hottest"
    )
    assert (plan_keel(problem).placement.logcnt[:, 5] == 2).all()


def test_what_it_refuses():
    with pytest.raises(ShapeMismatch, match=r"\(4, 6\)"):
        detect_change(np.ones((4, 6)))
    for rules in ({"threshold": 0.0}, {"steady": -1.0}, {"half_life_windows": float("nan")}):
        with pytest.raises(InvalidInput, match=next(iter(rules))):
            ChangeRules(**rules)
    for rules in ({"old_weight": 1.5}, {"shortest": 0.6}):
        with pytest.raises(InvalidInput, match="must be in"):
            ChangeRules(**rules)
