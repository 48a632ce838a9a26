import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evenkeel_moe.planning.decision import verdict
from evenkeel_moe.planning.decision.verdict import (
    Call,
    Verdict,
    held_out_steps,
    judge,
)


def times(steps: int = 60, shift: float = 0.0, noise: float = 0.02, seed: int = 0):
    """(before, after) around 100 and 100 * (1 - shift)."""
    rng = np.random.default_rng(seed)
    before = 100.0 * rng.normal(1.0, 0.05, steps)
    return before, np.maximum(before * (1.0 - shift) + 100.0 * rng.normal(0.0, noise, steps), 0.0)


@pytest.mark.parametrize(
    ("shift", "call"),
    [(0.2, Call.RECOMMEND), (0.0, Call.INSUFFICIENT_EVIDENCE), (-0.2, Call.NOT_NOW)],
)
def test_the_call_knows_the_sign_of_the_gain(shift, call):
    judged = judge(*times(shift=shift))
    assert judged.call is call
    assert judged.gain == pytest.approx(shift, abs=0.01)
    assert judged.gain_lower < judged.gain < judged.gain_upper
    assert judged.steps == 60


def test_the_copies_are_counted_in_the_unit_of_the_saving():
    before, after = times(shift=0.1)
    free = judge(before, after)
    assert (free.cost, free.payback_steps) == (0.0, 0.0)
    # 10 of 100 are saved per step, so 4000 are paid back after about 400 steps. They are 4 % of the
    # time of 1000 steps.
    paid = judge(before, after, copy_cost=4000.0, lifetime_steps=1000, step_s=0.02)
    assert paid.cost == pytest.approx(4000.0 / (1000 * before.mean()))
    assert paid.payback_steps == pytest.approx(4000.0 / (before - after).mean())
    assert paid.payback_s == pytest.approx(0.02 * paid.payback_steps)
    assert paid.net_gain == pytest.approx(free.gain - paid.cost)
    assert paid.call is Call.RECOMMEND
    assert judge(before, after, copy_cost=20_000.0, lifetime_steps=1000).call is Call.NOT_NOW
    assert judge(before, after, copy_cost=20_000.0, lifetime_steps=100_000).call is Call.RECOMMEND
    assert (free.gain_lower, free.gain_upper) == (paid.gain_lower, paid.gain_upper)


def test_no_saving_exceeds_the_whole_time():
    judged = judge(np.full(16, 100.0), np.append(np.zeros(15), 400.0))
    assert judged.gain == pytest.approx(0.75) and judged.gain_upper == 1.0


def test_steps_without_load_are_no_evidence():
    def idle_between(values):
        return np.stack([values, *np.zeros((9, 60))], axis=1).ravel()

    before, after = times(shift=0.2)
    alone, among = judge(before, after), judge(idle_between(before), idle_between(after))
    assert (among.call, among.steps) == (alone.call, 60)
    for name in ("gain", "gain_lower", "gain_upper"):
        assert getattr(among, name) == pytest.approx(getattr(alone, name))
    assert among.saved_per_step == pytest.approx(alone.saved_per_step / 10)
    few = judge(np.append(np.zeros(65), 100.0), np.append(np.zeros(65), 80.0))
    assert (few.call, few.steps) == (Call.INSUFFICIENT_EVIDENCE, 1)
    none = judge(np.zeros(66), np.zeros(66))
    assert none.steps == 0 and math.isnan(none.gain)


def test_a_plan_must_pay_even_if_the_placement_lasts_two_thirds_of_its_lifetime():
    before, after = times(shift=0.1)
    lower = judge(before, after).gain_lower
    price = lower * 1000 * before.mean()  # The lower bound, as the time of a lifetime.
    dear, cheap = (
        judge(before, after, copy_cost=share * price, lifetime_steps=1000) for share in (0.7, 0.6)
    )
    assert dear.cost < lower
    assert (dear.call, cheap.call) == (Call.INSUFFICIENT_EVIDENCE, Call.RECOMMEND)


def test_unknown_is_never_zero():
    before, after = times(shift=0.1)
    assert judge(before, after, copy_cost=1.0).payback_s is None
    worse = judge(before, before * 1.1, copy_cost=1.0, step_s=0.02)
    assert math.isinf(worse.payback_steps)
    assert worse.payback_s is None
    for steps in (0, 5):
        silent = judge(np.zeros(steps), np.zeros(steps), copy_cost=1.0, step_s=0.02)
        assert silent.call is Call.INSUFFICIENT_EVIDENCE
        assert math.isnan(silent.gain)
        assert math.isnan(silent.payback_steps)
        assert silent.payback_s is None
        assert silent.numbers() == {"held_out_steps": 0.0}
    single = judge(before[:1], after[:1])
    assert math.isnan(single.gain_lower)
    assert single.call is Call.INSUFFICIENT_EVIDENCE


def test_a_large_gain_on_few_steps_is_no_evidence_yet():
    before, after = times(steps=16, shift=0.3)
    assert judge(before, after).call is Call.RECOMMEND
    short = judge(before[:15], after[:15])
    assert short.call is Call.INSUFFICIENT_EVIDENCE
    assert short.gain > 0.2


def test_a_plan_that_changes_nothing_is_not_for_now():
    before, _ = times()
    assert judge(before, before.copy()).call is Call.NOT_NOW


def test_neighbouring_steps_that_are_alike_count_less(monkeypatch):
    """The same values carry less information if each repeats for 8 steps."""
    rng = np.random.default_rng(3)
    gains = np.repeat(rng.normal(0.02, 0.06, 8), 8)
    before = np.full(64, 100.0)
    monkeypatch.setattr(verdict, "_DRIFT", 0.0)
    together = judge(before, before * (1 - gains))
    mixed = judge(before, before * (1 - rng.permutation(gains)))
    assert together.gain == pytest.approx(mixed.gain)
    width = mixed.gain_upper - mixed.gain_lower
    assert together.gain_upper - together.gain_lower > 1.5 * width


def test_a_gain_that_fades_is_less_sure_than_one_that_stays(monkeypatch):
    rng = np.random.default_rng(1)
    noise = rng.normal(0.0, 0.01, 64)
    before = np.full(64, 100.0)
    level = judge(before, before * (1 - 0.06 - noise))
    fading = judge(before, before * (1 - np.linspace(0.12, 0.0, 64) - noise))
    monkeypatch.setattr(verdict, "_DRIFT", 0.0)
    trusting = judge(before, before * (1 - np.linspace(0.12, 0.0, 64) - noise))
    assert level.call is Call.RECOMMEND
    assert fading.gain == pytest.approx(level.gain, abs=0.005)
    assert fading.gain_lower < trusting.gain_lower < level.gain_lower


@pytest.mark.parametrize("true_gain", [0.0, 0.004, -0.004])
def test_calls_on_noise_are_wrong_as_rarely_as_they_say(true_gain):
    """Each bound leaves 5 % outside: at most 8 % of 400 verdicts may have the wrong sign."""
    rng = np.random.default_rng(5)
    wrong = 0
    for seed in range(400):
        gains = rng.normal(true_gain, 0.05, 128)
        before = np.full(64, 100.0)
        call = judge(before, before * (1 - gains[:64]), seed=seed).call
        realised = gains[64:].mean() > 0
        called = call is not Call.INSUFFICIENT_EVIDENCE
        wrong += called and (call is Call.RECOMMEND) != realised
    assert wrong <= 32


@given(
    st.integers(2, 40),
    st.floats(-0.5, 0.9),
    st.floats(0, 1e5),
    st.integers(0, 1000),
)
def test_what_always_holds(steps, shift, copy_cost, seed):
    before, after = times(steps=steps, shift=shift, seed=seed)
    judged = judge(before, after, copy_cost=copy_cost, seed=seed)
    assert judged == judge(before, after, copy_cost=copy_cost, seed=seed)
    assert judged.gain_lower <= judged.gain <= judged.gain_upper
    assert judged.gain_upper <= 1.0
    assert judged.payback_steps >= 0
    if judged.call is Call.RECOMMEND:
        assert judged.net_gain > 0
        assert judged.payback_steps < judged.lifetime_steps
    if judged.call is Call.NOT_NOW:
        assert judged.net_gain <= 0
    scaled = judge(8 * before, 8 * after, copy_cost=8 * copy_cost, seed=seed)
    assert scaled.call == judged.call
    assert scaled.gain == pytest.approx(judged.gain)


def test_a_verdict_lists_what_it_knows_by_name():
    known: Verdict = judge(*times(shift=0.1), copy_cost=100.0)
    assert set(known.numbers()) == {
        "gain",
        "gain_lower",
        "gain_upper",
        "copy_cost_share",
        "net_gain",
        "held_out_steps",
        "payback_steps",
    }


@given(st.integers(0, 2000), st.integers(0, 64))
def test_some_steps_are_kept_to_judge_on_and_most_to_plan_on(steps, least):
    later = held_out_steps(steps, least)
    if steps < 2:
        assert later == 0
        return
    assert 1 <= later <= steps // 2
    if steps >= 2 * least:
        assert later >= least
    assert later <= max(1, steps // 4, least)


def test_a_long_window_gives_a_sixth_and_a_short_one_what_a_verdict_needs():
    assert [held_out_steps(steps, 16) for steps in (15, 31, 32, 96, 256)] == [3, 7, 16, 16, 42]


def test_few_steps_are_judged_by_the_interval_of_student():
    before = np.full(4, 100.0)
    after = np.array([80.0, 84.0, 78.0, 82.0])
    few = judge(before, after, min_steps=4, few_steps=16)
    excess = (81.0 - after) / 100.0
    reach = stats.t.ppf(0.97, 3) * excess.std(ddof=1) * (2 / 4) ** 0.5
    assert few.gain_lower == pytest.approx(few.gain - reach)
    assert few.gain_upper == pytest.approx(few.gain + reach)
    assert few.call is Call.RECOMMEND
    bootstrap = judge(before, after, min_steps=4)
    assert bootstrap.gain_lower > few.gain_lower


def test_two_steps_are_certain_of_nothing_but_a_large_gain():
    before, rules = np.full(2, 100.0), cast("dict[str, Any]", {"min_steps": 2, "few_steps": 16})
    assert judge(before, np.array([95.0, 93.0]), **rules).call is Call.INSUFFICIENT_EVIDENCE
    assert judge(before, np.array([60.0, 61.0]), **rules).call is Call.RECOMMEND


def test_calls_on_few_steps_of_noise_are_wrong_as_rarely_as_they_say():
    rng = np.random.default_rng(11)
    wrong = 0
    for _ in range(400):
        before, after = rng.normal(100.0, 3.0, (2, 4))
        call = judge(before, after, min_steps=4, few_steps=16).call
        wrong += call is not Call.INSUFFICIENT_EVIDENCE
    assert wrong <= 0.06 * 400
