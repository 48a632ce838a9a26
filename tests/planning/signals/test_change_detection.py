"""Detection of changes of traffic, and the weights of steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.signals.change_detection import (
    HALF_LIFE,
    OLD_WEIGHT,
    Change,
    ChangeRules,
    detect_change,
    forget_old_means,
    step_weights,
)
from tests.planning.builders import a_problem
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


@given(seeds)
def test_a_few_steps_are_enough_for_a_large_change(seed):
    rng = np.random.default_rng(seed)
    load = np.concatenate([traffic(rng, 96, 0), traffic(rng, 4, 5)])
    assert detect_change(load, ChangeRules(shortest=2 / 100)).first_step == 96
    assert detect_change(load).first_step <= 94, "a sixteenth of 100 steps is 6"


def layers_of(rng, steps, hot):
    """(steps, 12, 8) Poisson tokens; `hot` names the hot expert of layer 3, 0 elsewhere."""
    load = np.concatenate([traffic(rng, steps, 0) for _ in range(6)], axis=1)
    load[:, 3] = traffic(rng, steps, hot)[:, 0]
    return load


ALONE = ChangeRules(shortest=2 / 100, layer_threshold=12.0)


@given(seeds)
def test_a_change_in_one_of_many_layers_is_found_and_named(seed):
    rng = np.random.default_rng(seed)
    load = np.concatenate([layers_of(rng, 97, 0), layers_of(rng, 3, 5)])
    change = detect_change(load, ALONE)
    assert change.first_step == 97
    strengths = np.array(change.layer_strengths)
    assert np.argmax(strengths) == 3
    assert strengths[3] > 12
    assert np.median(strengths) < 2
    assert detect_change(load, ChangeRules(shortest=2 / 100)).strength < change.strength


@given(seeds)
def test_chance_in_one_of_many_layers_is_no_change(seed):
    change = detect_change(layers_of(np.random.default_rng(seed), 100, 0), ALONE)
    assert (change.first_step, change.layer_strengths) == (0, ())


def test_blocks_around_a_change_do_not_hide_a_smaller_one_after_it():
    rng = np.random.default_rng(8)
    oldest = traffic(rng, 10, 0)
    oldest[:, :, 0] += 2000.0
    last = traffic(rng, 9, 2)
    last[:, :, 7] += 20.0
    load = np.concatenate([oldest, traffic(rng, 10, 5), traffic(rng, 20, 2), last])
    # Of the six differences of neighbouring blocks of 7 steps, three are around a large change.
    assert abs(detect_change(load).first_step - 40) <= 1


def test_only_layers_that_changed_forget_their_old_means():
    rng = np.random.default_rng(5)
    load = np.concatenate([layers_of(rng, 60, 0), layers_of(rng, 40, 5)])
    change = detect_change(load, ALONE)
    moved = forget_old_means(load[:90], change)
    first = change.first_step
    others = [layer for layer in range(12) if layer != 3]
    np.testing.assert_array_equal(moved[:, others], load[:90, others])
    np.testing.assert_array_equal(moved[first:], load[first:90])
    old, new = moved[:first, 3].mean(axis=0), load[first:90, 3].mean(axis=0)
    np.testing.assert_allclose(old / old.sum(), new / new.sum())
    assert old.sum() == pytest.approx(load[:first, 3].sum() / first)
    # A step keeps its deviation from the mean of the old steps.
    was = load[:first, 3] / load[:first, 3].mean(axis=0)
    np.testing.assert_allclose(moved[:first, 3] / old, was)


def test_an_expert_that_was_idle_gets_its_load_in_every_old_step():
    load = np.zeros((8, 1, 3))
    load[:, 0, 0] = 10.0
    load[:, 0, 1] = [5, 15, 5, 15, 0, 0, 0, 0]
    load[4:, 0, 2] = 10.0
    moved = forget_old_means(load, Change(4, 9.0, 1.0, (9.0,)))
    np.testing.assert_allclose(moved[:4].mean(axis=0), load[4:].mean(axis=0))
    np.testing.assert_allclose(moved[:4, 0, 2], 10.0)


def test_without_a_change_nothing_is_moved():
    load = traffic(np.random.default_rng(6), 20, 0)
    np.testing.assert_array_equal(forget_old_means(load, Change(0, 1.0)), load)


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
    usual = 0.5 ** (1 / (HALF_LIFE * len(load)))
    before, after = weights[change.first_step - 1 : change.first_step + 1]
    assert before / after == pytest.approx(OLD_WEIGHT * usual)


def test_keel_gives_the_spare_slot_to_what_is_hot_since_the_change():
    rng = np.random.default_rng(4)
    load = np.concatenate([traffic(rng, 70, 0), traffic(rng, 30, 5)])
    shape = ModelShape(2, 8, 3, 3, 2, 100)
    problem = a_problem(load, shape)
    assert (plan_eplb(problem).placement.logcnt[:, 0] == 2).all(), (
        "over the whole window expert 0 is the hottest"
    )
    assert (plan_keel(problem).placement.logcnt[:, 5] == 2).all()
