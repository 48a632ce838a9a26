"""The forecast of expert loads, and its use by keel."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, minimize

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.signals.change_detection import detect_change, step_weights
from evenkeel_moe.planning.signals.forecast import Forecast, _add_products, forecast, recentred
from tests.planning import twins
from tests.planning.builders import a_problem
from tests.strategies import loads, seeds

HALF_LIVES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, np.inf)
BLIND = KeelOptions(foresight=0.999)
"""Options with which keel ignores forecasts."""


def drifting(rng, steps, begin=0.0, end=1.0, experts=16, tokens=4000):
    """Return (steps, 2, experts) Poisson tokens whose popularity moves part of the way to another
    skew."""
    old, new = rng.gamma(0.6, 1.0, (2, 2, experts))
    way = np.linspace(begin, end, steps)[:, None, None]
    mean = (1 - way) * old / old.sum(axis=1, keepdims=True) + way * new / new.sum(
        axis=1, keepdims=True
    )
    return rng.poisson(mean * tokens).astype(float)


def known_forecast(load) -> Forecast:
    """Return the forecast of a load that has one."""
    found = forecast(load)
    assert found is not None
    return found


def shares(load):
    mean = load.mean(axis=0)
    return mean / mean.sum(axis=1, keepdims=True)


@given(loads(2, 5, max_steps=40))
def test_it_is_the_mix_of_fading_means_that_would_have_erred_least(load):
    steps = len(load)
    first, ahead = max(1, round(steps / 2)), max(4, steps // 8)
    found = forecast(load)
    errors, ends = twins.fading_errors(load, np.array(HALF_LIVES) * steps, first, ahead)
    if steps < 9 or errors[-1, -1] < 1e-18 * load.size:
        assert found is None
        return
    assert found is not None and 0 <= found.error <= 1
    totals = load.sum(axis=(0, 2)) > 0
    assert found.shares.sum(axis=1) == pytest.approx(totals.astype(float))
    scaled = errors / errors[-1, -1]
    settings: dict[str, Any] = {
        "method": "SLSQP",
        "bounds": [(0, 1)] * 5,
        "constraints": LinearConstraint(np.ones(5), 1, 1),
        "options": {"ftol": 1e-12, "maxiter": 500},
    }

    def error_of(mix: NDArray[np.float64]) -> float:
        return float(mix @ scaled @ mix)

    settings["jac"] = lambda mix: 2 * scaled @ mix
    least = minimize(error_of, np.full(5, 0.2), **settings)
    assert found.error == pytest.approx(least.fun, abs=2e-4)
    low, high = ends.min(axis=0) / load.shape[2], ends.max(axis=0) / load.shape[2]
    assert (found.shares >= low - 1e-9).all() and (found.shares <= high + 1e-9).all()


@given(seeds)
def test_under_drift_it_is_nearer_to_what_comes_than_the_windows_mean(seed):
    load = drifting(np.random.default_rng(seed), 120)
    past, coming = load[:100], shares(load[100:])
    found = known_forecast(past)
    assert found.error < 0.5
    assert ((found.shares - coming) ** 2).sum() < 0.7 * ((shares(past) - coming) ** 2).sum()


@given(seeds)
def test_after_an_abrupt_change_it_is_what_came_after(seed):
    rng = np.random.default_rng(seed)
    load = np.concatenate([drifting(rng, 70, 0, 0), drifting(rng, 30, 1, 1)])
    now = shares(load[70:])
    error = np.abs(known_forecast(load).shares - now).max()
    assert error < 0.25 * np.abs(shares(load) - now).max()


@given(seeds)
def test_where_only_chance_moves_loads_nothing_beats_the_mean(seed):
    found = known_forecast(drifting(np.random.default_rng(seed), 100, 0, 0, experts=64))
    assert found.error > 1 - KeelOptions().foresight


def test_too_few_steps_foretell_nothing():
    rng = np.random.default_rng(0)
    assert forecast(drifting(rng, 8)) is None
    assert forecast(drifting(rng, 9)) is not None
    assert forecast(np.zeros((40, 2, 4))) is None


@given(seeds, st.integers(9, 60))
def test_recentring_moves_the_means_and_leaves_what_steps_do_beside(seed, steps):
    load = drifting(np.random.default_rng(seed), steps, tokens=100)
    load[:, :, 0] = 0.0
    weights, _ = step_weights(load)
    found = known_forecast(load)
    moved = recentred(load, weights, found)
    before, after = (np.tensordot(weights, each, axes=1) for each in (load, moved))
    wanted = found.shares * before.sum(axis=1, keepdims=True)
    assert after == pytest.approx(np.clip(wanted, before / 4, before * 4))
    factor = np.divide(after, before, out=np.ones_like(after), where=before > 0)
    assert moved == pytest.approx(load * factor)


def _problem(load, **changes):
    shape = ModelShape(load.shape[1], load.shape[2], 4, load.shape[2] // 4 + 1, 2, 100)
    return a_problem(load, shape, **changes)


def test_keel_plans_for_where_loads_go():
    gained = []
    for seed in range(16):
        # The load is constant, shifts, and is constant again: half of the window is out of date.
        parts = ((50, 0.0, 0.0), (50, 0.0, 1.0), (40, 1.0, 1.0))
        load = np.concatenate(
            [drifting(np.random.default_rng(seed), *part, experts=16, tokens=300) for part in parts]
        )
        problem = _problem(load[:100])
        seen, blind = plan_keel(problem), plan_keel(problem, BLIND)
        assert seen.numbers["forecast_error"] == blind.numbers["forecast_error"] < 0.5
        later = replace(problem, load=load[100:])
        gained.append(
            moe_time.score(later, blind.placement) / moe_time.score(later, seen.placement)
        )
        # The figures of the plan refer to the original window.
        assert seen.score == pytest.approx(moe_time.score(problem, seen.placement))
    assert np.mean(gained) > 1.005


def test_keel_believes_no_forecast_that_hardly_beats_the_mean():
    problem = _problem(drifting(np.random.default_rng(1), 100, 0, 0))
    seen = plan_keel(problem)
    assert seen.numbers["forecast_error"] > 0.875
    assert seen.placement.digest == plan_keel(problem, BLIND).placement.digest
    assert math.isnan(plan_keel(_problem(problem.load[:8])).numbers["forecast_error"])
    with pytest.raises(InvalidInput, match="foresight is 1"):
        KeelOptions(foresight=1.0)


def test_a_copy_must_save_more_where_tokens_come_by_the_request():
    rng = np.random.default_rng(2)
    one_by_one = drifting(rng, 64, 0, 0)
    # Requests that last four steps and send all their tokens to the same experts.
    by_request = np.repeat(drifting(rng, 16, 0, 0, tokens=400), 4, axis=0) * 10
    prices = []
    for load in (one_by_one, by_request):
        planned = plan_keel(_problem(load)).placement
        prices.append(plan_keel(_problem(load, current=planned)).numbers["price"])
    per_rank, usual = 5, detect_change(by_request).usual
    assert usual > 10
    seen = by_request.sum() / (2 * 4) / per_rank
    assert prices[1] == pytest.approx((0.0025 + 0.225 * (usual**0.7 / seen) ** 0.5) / per_rank)
    seen = one_by_one.sum() / (2 * 4) / per_rank
    noise = max(1.0, detect_change(one_by_one).usual) ** 0.7
    assert prices[0] == pytest.approx((0.0025 + 0.225 * (noise / seen) ** 0.5) / per_rank)
    assert prices[1] > 1.5 * prices[0]


def _foreseen_time(problem, placement):
    """Return the predicted time of the loads that keel plans for, with the step weights of keel."""
    weights, _ = step_weights(problem.load)
    expected = known_forecast(problem.load)
    load = problem.load
    if expected.error < 1 - KeelOptions().foresight:
        load = recentred(load, weights, expected)
    return float(weights @ moe_time.step_times(load, placement, problem.objective.cost).sum(axis=1))


@pytest.mark.parametrize("fades", [1, 2, 3, 4, 5, 7])
def test_three_sums_at_a_time_have_the_bits_of_one_after_another(fades):
    rng = np.random.default_rng(0)
    off, sums = rng.normal(size=(fades, 11)), rng.normal(size=(fades, fades))
    wanted = sums.copy()
    for fade in range(fades):
        for other in range(fade + 1):
            for expert in range(11):
                wanted[fade, other] += off[fade, expert] * off[other, expert]
    _add_products(off, sums)
    assert (sums == wanted).all()


@pytest.mark.parametrize(
    ("moves", "speeds", "within"),
    [
        (0.0, None, 0.003),
        (1.0, None, 0.01),
        (1.0, (1.0, 1.0, 1.0, 1.005), 0.01),
        (1.0, (1.0, 1.0, 1.0, 1.3), 0.0),
    ],
    ids=["steady", "moving", "moving, ranks all but alike", "moving, a slow rank"],
)
def test_a_first_plan_is_this_near_to_one_from_nothing(moves, speeds, within):
    costs = None if speeds is None else CostCurves.linear(np.array(speeds) * 1e-6)
    behind = []
    for seed in range(24):
        load = drifting(np.random.default_rng(seed), 64, 0.0, moves, tokens=400)
        nothing = _problem(load, objective=Objective(cost=CostModel(costs)))
        first = plan_keel(replace(nothing, current=Placement.initial(nothing.shape)))
        best = _foreseen_time(nothing, plan_keel(nothing).placement)
        assert (first.numbers["forecast_error"] < 0.875) == bool(moves)
        behind.append(1 - best / _foreseen_time(nothing, first.placement))
    assert max(behind) <= within + 1e-9


def test_loads_that_are_no_whole_numbers_leave_nothing_where_there_is_none():
    load = drifting(np.random.default_rng(3), 60) * 0.1
    load[42:, 1] = 0.0
    found = known_forecast(load)
    errors, ends = twins.fading_errors(load, np.array(HALF_LIVES) * 60, 30, 7)
    assert found.error <= (np.diag(errors) / errors[-1, -1]).min() + 1e-4
    assert (found.shares >= ends.min(axis=0) / 16 - 1e-9).all()
    assert (found.shares <= ends.max(axis=0) / 16 + 1e-9).all()
