"""The factor by which verdicts are calibrated: robust, bounded, near 1 with few plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.delivered import GainPair
from evenkeel_moe.planning.decision.calibration import (
    NOT_CALIBRATED,
    PLANS,
    Calibration,
    calibrate,
)
from evenkeel_moe.planning.decision.verdict import Call, judge


def pairs(*ratios, modelled=0.1):
    return [GainPair(modelled, ratio * modelled, 0.01) for ratio in ratios]


def test_without_plans_nothing_is_calibrated():
    assert calibrate([]) == NOT_CALIBRATED == Calibration(1.0, 0)


def test_few_plans_move_the_factor_little_and_many_move_it_there():
    factors = [calibrate(pairs(*[0.6] * n)).factor for n in range(9)]
    assert factors == pytest.approx([1 - 0.4 * n / (n + 4) for n in range(9)])
    assert calibrate(pairs(*[0.6] * 20)) == calibrate(pairs(*[0.6] * PLANS))


def test_only_the_newest_plans_count():
    assert calibrate(pairs(*[0.2] * 9, *[1.0] * PLANS)).factor == pytest.approx(1.0)


def test_one_odd_plan_decides_nothing():
    assert calibrate(pairs(0.9, 0.9, -8.0, 0.9, 0.9)).factor == pytest.approx(1 - 0.1 * 5 / 9)
    large = pairs(0.9, 0.9, modelled=0.3)
    noise = pairs(-1.0, -1.0, -1.0, modelled=0.03)
    assert calibrate(large + noise).factor == pytest.approx(1 - 0.1 * 5 / 9), "weighted by gains"


def test_rough_measurements_and_plans_without_a_modelled_gain_do_not_count():
    assert calibrate([GainPair(0.1, 0.0, 0.06)]) == NOT_CALIBRATED
    assert calibrate([GainPair(0.1, 0.0, 0.05)]).plans == 1
    assert calibrate([GainPair(0.0, 0.3, 0.0), GainPair(-0.1, 0.1, 0.0)]) == NOT_CALIBRATED


@given(
    st.lists(
        st.builds(
            GainPair, st.floats(-1, 1), st.floats(-5, 1, allow_subnormal=False), st.floats(0, 0.1)
        ),
        max_size=12,
    )
)
def test_the_factor_is_bounded_and_the_slope_has_the_least_absolute_deviations(known):
    found = calibrate(known)
    assert 0.25 <= found.factor <= 1.5
    assert 0 <= found.plans <= PLANS
    usable = [one for one in known if one.modelled > 0 and one.error <= 0.5 * one.modelled][-PLANS:]
    assert found.plans == len(usable)
    if found.plans and 0.25 < found.factor < 1.5:
        n = found.plans
        slope = 1 + (found.factor - 1) * (n + 4) / n

        def deviation(at):
            return sum(abs(one.delivered - at * one.modelled) for one in usable)

        least = min(deviation(one.delivered / one.modelled) for one in usable)
        assert deviation(slope) <= least * (1 + 1e-6) + 1e-9


# --- in a verdict ---------------------------------------------------------------------------------


def times(shift):
    rng = np.random.default_rng(1)
    before = 100.0 * rng.normal(1.0, 0.05, 60)
    return before, before * (1.0 - shift) + rng.normal(0.0, 2.0, 60)


@given(st.floats(0.25, 1.5), st.floats(-0.2, 0.3))
def test_the_whole_verdict_is_scaled(factor, shift):
    plain = judge(*times(shift), copy_cost=100.0)
    found = judge(*times(shift), copy_cost=100.0, calibration=Calibration(factor, 3))
    assert found.gain_modelled == pytest.approx(plain.gain)
    assert plain.gain_modelled == plain.gain
    for name in ("gain", "gain_lower", "gain_upper", "saved_per_step"):
        assert getattr(found, name) == pytest.approx(factor * getattr(plain, name)), name
    assert found.cost == plain.cost
    assert found.numbers()["calibration"] == factor
    assert found.numbers()["calibrated_on_plans"] == 3
    assert found.numbers()["gain_modelled"] == pytest.approx(plain.gain)
    assert "calibration" not in plain.numbers()


def test_a_calibrated_gain_decides_the_call():
    before, after = times(0.1)
    cost = 0.05 * 1000 * before.mean()
    assert judge(before, after, copy_cost=cost).call is Call.RECOMMEND
    found = judge(before, after, copy_cost=cost, calibration=Calibration(0.4, 8))
    assert found.call is Call.NOT_NOW


def test_no_step_takes_less_than_nothing():
    before = np.full(20, 100.0)
    found = judge(before, np.full(20, 10.0), calibration=Calibration(1.5, 8))
    assert found.gain == 1.0
