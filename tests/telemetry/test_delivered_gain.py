"""The measured gain of a plan: exact without noise, honest with it, unknown where it must be."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, CostSource
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT, SplitModel
from evenkeel_moe.telemetry.delivered_gain import (
    PhaseSteps,
    match_tokens,
    measure_gain,
    newest_state,
    timed_steps,
)
from tests.telemetry.reports import load_window

LAYERS, EXPERTS, RANKS = 3, 8, 4
LINEAR = Placement(np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1)), RANKS, EXPERTS)
MIXED = Placement(
    np.tile(np.array([0, 7, 1, 6, 2, 5, 3, 4], np.int32), (LAYERS, 1)), RANKS, EXPERTS
)
SPEEDS = np.array([1.0, 1.2, 0.9, 1.05])
TRUE = CostModel(CostCurves.linear(2e-6 * SPEEDS), source=CostSource.MEASURED)


def traffic(seed, steps, scale=1.0):
    """Return (T, L, E) counts: expert 0 is the hottest, and steps differ by a few percent."""
    rng = np.random.default_rng(seed)
    means = scale * 400.0 / (1.0 + np.arange(EXPERTS)) * rng.lognormal(0, 0.03, (steps, 1, 1))
    return rng.poisson(np.broadcast_to(means, (steps, LAYERS, EXPERTS))).astype(np.uint32)


def truth(counts, placement, fixed_s=0.0):
    """Return the real (T, L, R) seconds of each rank and layer."""
    return moe_time.rank_times(moe_time.rank_work(counts, placement, TRUE), TRUE) + fixed_s


def true_gain(counts, fixed_s=0.0):
    old, new = (truth(counts, one, fixed_s).max(axis=2).sum() for one in (LINEAR, MIXED))
    return 1 - new / old


def timed(counts, placement, cost, noise=1.0, fixed_s=0.0):
    seconds = truth(counts, placement, fixed_s).sum(axis=1) * noise
    window = load_window(counts, range(len(counts)), RANKS, seconds=seconds)
    return timed_steps(window, placement, cost, EVEN_SPLIT)


def around(before, after, cost=TOKENS, *, noise=(1.0, 1.0), fixed_s=0.0):
    return PhaseSteps(
        timed(before, LINEAR, cost, noise[0], fixed_s),
        timed(after, MIXED, cost, noise[1], fixed_s),
        timed(after, LINEAR, cost),
    )


def gain_of(*phases) -> Any:
    """Return the gain, which must be known."""
    found, _ = measure_gain(phases, at=5.0)
    assert found.gain is not None, found.unknown_because
    return found


def unknown(*phases) -> tuple[str, int]:
    """Return the reason that the gain is not known, and the compared steps."""
    found, enough = measure_gain(phases, at=5.0)
    assert found.gain is None and not enough
    return found.unknown_because, found.steps


@given(st.integers(0, 99), st.sampled_from([TOKENS, TRUE]))
@settings(max_examples=20, deadline=None)
def test_without_noise_the_gain_is_exact_though_the_model_knows_no_speeds(seed, cost):
    before, after = traffic(seed, 64), traffic(seed + 100, 64)
    found = gain_of(around(before, after, cost))
    assert found.gain == pytest.approx(true_gain(after), abs=1e-9)
    assert found.lower <= found.gain <= found.upper <= 1.0
    assert found.steps == 64
    if cost is TRUE:
        assert found.modelled == pytest.approx(found.gain)


@given(st.integers(0, 99), st.floats(0.92, 1.08))
@settings(max_examples=20, deadline=None)
def test_a_change_of_traffic_is_no_gain(seed, scale):
    """The same placement before and after, other tokens, and a fixed part no model knows of."""
    before, after = traffic(seed, 64), traffic(seed + 100, 64, scale)
    then, now = (timed(counts, LINEAR, TOKENS, fixed_s=3e-4) for counts in (before, after))
    found = gain_of(PhaseSteps(then, now, now))
    unmatched = abs(np.log(truth(after, LINEAR).sum() / truth(before, LINEAR).sum()))
    assert abs(found.gain) < 0.35 * unmatched + 0.01
    assert found.modelled == 0.0


@pytest.mark.parametrize("dispatch", [DispatchModel.EVEN, DispatchModel.WATERFILL])
@pytest.mark.parametrize("known", [TRUE, TOKENS, CostModel(CostCurves.linear(np.full(4, 7e-6)))])
def test_shared_experts_count_in_the_gain_though_seconds_are_of_routed_experts(known, dispatch):
    """Ranks are equally fast here: how Waterfill pours does not depend on their speed."""
    equal = replace(TRUE, curves=CostCurves.linear(np.full(RANKS, 2e-6)))
    split, cost = SplitModel(dispatch), replace(known, shared_tokens=0.5)
    cost = replace(equal, shared_tokens=0.5) if known is TRUE else cost

    def times(counts, placement, model):
        return moe_time.rank_times(moe_time.rank_work(counts, placement, model, split), model)

    def steps(counts, placement):
        seconds = times(counts, placement, equal).sum(axis=1)
        window = load_window(counts, range(len(counts)), RANKS, seconds=seconds)
        return timed_steps(window, placement, cost, split)

    before, after = traffic(1, 64), traffic(2, 64)
    phase = PhaseSteps(steps(before, LINEAR), steps(after, MIXED), steps(after, LINEAR))
    whole = replace(equal, shared_tokens=0.5)
    old, new = (times(after, one, whole).max(axis=2).sum() for one in (LINEAR, MIXED))
    assert gain_of(phase).gain == pytest.approx(1 - new / old, abs=1e-9)


def test_steps_of_other_sizes_are_not_compared():
    reason, _ = unknown(around(traffic(1, 64), traffic(2, 64, 2.0), fixed_s=3e-4))
    assert "pairs of steps alike in tokens" in reason
    half = np.concatenate([traffic(2, 40, 2.0), traffic(3, 40)])
    assert gain_of(around(traffic(1, 64), half)).steps == 40


def test_a_plan_that_makes_the_steps_slower_has_a_negative_gain():
    phase = around(traffic(1, 64), traffic(2, 64))
    slower = phase.after._replace(seconds=2 * phase.after.seconds)
    found = gain_of(replace(phase, after=slower))
    assert found.gain < found.upper + 1e-12 < 0
    assert found.modelled > 0.2


def test_phases_are_measured_by_their_own_steps():
    """Decode takes ten times as long a token; the mix of phases differs before and after."""
    prefill = around(traffic(1, 60), traffic(2, 20))
    decode = around(traffic(3, 20, 0.1), traffic(4, 60, 0.1), noise=(10.0, 10.0))
    found = gain_of(prefill, decode)
    assert 36 <= found.steps <= 40
    assert found.gain == pytest.approx(true_gain(traffic(2, 20)), abs=0.03)


def autocorrelated(rng, steps, spread, memory=0.7):
    """Return (T, R) factors: noise of each rank and of all ranks together, alike in neighbours."""
    out = np.zeros((steps, RANKS))
    state = np.zeros(RANKS)
    for step in range(steps):
        fresh = rng.normal(0, 1, RANKS) + rng.normal()
        state = memory * state + np.sqrt(1 - memory**2) * fresh / np.sqrt(2)
        out[step] = state
    return np.exp(spread * out)


def test_the_interval_covers_the_true_gain_and_the_error_is_of_the_right_size():
    rng = np.random.default_rng(7)
    inside, gains, errors = 0, [], []
    for run in range(200):
        before, after = traffic(run, 64), traffic(1000 + run, 64)
        noise = autocorrelated(rng, 64, 0.05), autocorrelated(rng, 64, 0.05)
        found = gain_of(around(before, after, noise=noise))
        wanted = true_gain(after)
        inside += found.lower <= wanted <= found.upper
        gains.append(found.gain - wanted)
        errors.append(found.error)
    assert inside >= 0.9 * 200
    assert abs(np.mean(gains)) < 0.005
    assert 0.7 < np.mean(errors) / np.std(gains) < 1.5


def wandering(rng, steps, spread, alone=0.05):
    """Return (T, R) factors: all ranks become slower and faster together for 16 steps at a time."""
    together = np.repeat(rng.normal(0, spread, -(-steps // 16)), 16)[:steps, None]
    return np.exp(together + rng.normal(0, alone, (steps, RANKS)))


def test_what_all_ranks_do_together_without_a_plan_is_no_gain():
    rng, away, inside = np.random.default_rng(3), [], 0
    for run in range(60):
        before, after = traffic(run, 64), traffic(1000 + run, 64)
        noise = wandering(rng, 64, 0.1), wandering(rng, 64, 0.1)
        found, wanted = gain_of(around(before, after, noise=noise)), true_gain(after)
        away.append(abs(found.gain - wanted))
        inside += found.lower <= wanted <= found.upper
    assert np.mean(away) < 0.025, "0.06 if all of it counts"
    assert inside >= 0.9 * 60


def test_ranks_whose_speed_drifts_together_across_the_plan_gain_nothing_by_it():
    """A random walk moves further between two sides than it does inside either."""
    rng, away, inside = np.random.default_rng(5), [], 0
    for run in range(60):
        before, after = traffic(run, 64), traffic(1000 + run, 64)
        walk = np.cumsum(rng.normal(0, 0.02, 128))[:, None] + rng.normal(0, 0.02, (128, RANKS))
        noise = np.exp(walk[:64]), np.exp(walk[64:])
        found, wanted = gain_of(around(before, after, noise=noise)), true_gain(after)
        away.append(abs(found.gain - wanted))
        inside += found.lower <= wanted <= found.upper
    assert np.mean(away) < 0.04, "0.09 if all of it counts"
    assert inside >= 0.9 * 60


def test_all_ranks_slower_since_the_plan_by_more_than_they_wander_count():
    rng = np.random.default_rng(4)
    before, after = traffic(1, 64), traffic(2, 64)
    noise = wandering(rng, 64, 0.03), 1.3 * wandering(rng, 64, 0.03)
    found = gain_of(around(before, after, noise=noise))
    assert found.gain == pytest.approx(1 - 1.3 * (1 - true_gain(after)), abs=0.06)


@pytest.mark.parametrize("slow_steps", [20, 24, 40])
def test_a_rank_that_became_slow_before_the_plan_counts_as_slow(slow_steps):
    """The plan was made for the slow rank; with its earlier speed, the gain would be too small."""
    rng, after = np.random.default_rng(1), traffic(2, 64)
    slow = np.array([1.0, 1.0, 1.0, 1.6])
    noise = rng.lognormal(0, 0.01, (64, RANKS))
    before = noise * np.where(np.arange(64)[:, None] >= 64 - slow_steps, slow, 1.0)
    found = gain_of(around(traffic(1, 64), after, noise=(before, slow)))
    old, new = ((truth(after, one) * slow).max(axis=2).sum() for one in (LINEAR, MIXED))
    assert found.gain == pytest.approx(1 - new / old, abs=0.015)
    assert 16 <= found.steps <= slow_steps


def test_steps_without_a_change_are_all_kept():
    noise = np.random.default_rng(1).lognormal(0, 0.05, (64, RANKS))
    steps = timed(traffic(1, 64), LINEAR, TOKENS, noise)
    assert len(newest_state(steps).tokens) == 64
    few = timed(traffic(1, 20), LINEAR, TOKENS)
    assert len(newest_state(few).tokens) == 20


def test_more_steps_are_wanted_only_while_they_would_add_pairs():
    assert measure_gain([around(traffic(1, 64), traffic(2, 64))], 5.0)[1]
    assert not measure_gain([around(traffic(1, 64), traffic(2, 40))], 5.0)[1]
    assert measure_gain([around(traffic(1, 30), traffic(2, 64))], 5.0)[1]


def test_more_steps_are_wanted_while_the_error_is_large_for_what_was_promised():
    def measured(steps, promised):
        """Compare steps of which 256 before the plan are kept."""
        rng = np.random.default_rng(3)
        noise = [rng.lognormal(0, 0.2, (n, RANKS)) for n in (256, steps)]
        phase = around(traffic(1, 256), traffic(2, steps), noise=(noise[0], noise[1]))
        found, enough = measure_gain([phase], 5.0, promised)
        assert found.error is not None
        return found.error, enough

    error, enough = measured(64, 1.0)
    assert error < 0.1 and enough
    error, enough = measured(64, 0.1)
    assert error > 0.01 and not enough
    assert measured(256, 0.1)[1], "as many as there are"


def test_single_slow_steps_do_not_decide():
    noise = np.ones((64, RANKS))
    noise[::10] = 8.0
    after = traffic(2, 64)
    found = gain_of(around(traffic(1, 64), after, noise=(1.0, noise)))
    assert found.gain == pytest.approx(true_gain(after), abs=0.01)


def test_seconds_that_are_missing_are_unknown_and_never_zero():
    before, after = traffic(1, 64), traffic(2, 64)
    none = ("no step under the plan has seconds of every rank with work", 0)
    silent = np.ones((64, RANKS))
    silent[:, 2] = np.nan
    for noise in (np.nan, silent):
        assert unknown(around(before, after, noise=(1.0, noise))) == none
    assert unknown() == none
    assert unknown(around(before, after[:15]))[1] == 15
    one_rank = np.ones((64, RANKS))
    one_rank[:50, 2] = np.nan
    _, steps = unknown(around(before, after, noise=(1.0, one_rank)))
    assert steps == 14, "a step counts only with the seconds of every rank"


def test_a_rank_without_tokens_needs_no_seconds():
    counts = traffic(1, 64)
    counts[:, :, 2:4] = 0  # Both experts of rank 1 under LINEAR.
    phase = around(counts, counts)
    assert (phase.before.seconds[:, 1] == 0).all()
    assert gain_of(phase).gain == pytest.approx(true_gain(counts), abs=0.02)


@given(st.lists(st.floats(1, 1000), max_size=7), st.lists(st.floats(1, 1000), max_size=7))
def test_pairs_are_as_many_as_possible_and_each_step_is_used_once(before, after):
    first, second = np.array(before), np.array(after)
    i, j = match_tokens(first, second)
    assert len(set(i)) == len(set(j)) == len(i) == len(j)
    assert (np.abs(first[i] - second[j]) <= 0.1 * np.maximum(first[i], second[j])).all()

    def most(at, used):
        if at == len(before):
            return 0
        best = most(at + 1, used)
        for other, value in enumerate(after):
            if not used >> other & 1 and abs(before[at] - value) <= 0.1 * max(before[at], value):
                best = max(best, 1 + most(at + 1, used | 1 << other))
        return best

    if len(before) * len(after) <= 25:
        assert len(i) == most(0, 0)
