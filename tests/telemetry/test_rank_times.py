"""Steps are fitted with the placement they ran under, and tell the speeds of the ranks."""

import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT
from evenkeel_moe.telemetry import windows
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.telemetry.time_fit import NoFit, TimeFit
from tests.telemetry.reports import load_window

SPREAD = Placement(np.array([[0, 1, 2, 3, 4, 5, 0, -1]], np.int32), 4, 6)
MOVED = Placement(np.array([[0, 1, 2, 3, 4, 5, 3, -1]], np.int32), 4, 6)
PER_TOKEN, PER_REPLICA = 1e-6, 5e-5


def carried(counts, placement):
    """Return the tokens and active replicas of each rank, slot by slot: (T, R) each."""
    tokens, active = np.zeros((len(counts), 4)), np.zeros((len(counts), 4))
    copies = [int((placement.phy2log[0] == expert).sum()) for expert in range(6)]
    for slot, expert in enumerate(placement.phy2log[0]):
        if expert >= 0:
            share = counts[:, 0, expert] / copies[expert]
            tokens[:, slot // 2] += share
            active[:, slot // 2] += np.minimum(share, 1.0)
    return tokens, active


def window(steps, placement, epoch, *, seed=0, measured=True) -> LoadWindow:
    rng = np.random.default_rng(seed + steps[0])
    counts = rng.poisson(rng.lognormal(0, 1.5, (len(steps), 1, 6)) * 20).astype(np.uint32)
    tokens, active = carried(counts, placement)
    seconds = PER_TOKEN * tokens + PER_REPLICA * active
    seconds = seconds * rng.lognormal(0, 0.01, seconds.shape)
    return load_window(counts, steps, 4, epoch=epoch, seconds=seconds if measured else None)


def add(times, phases, placement=SPREAD, epoch=1, earlier=MappingProxyType({})):
    """Add parts of windows, of one phase if it is not named."""
    phases = phases if isinstance(phases, dict) else {Phase.DECODE: phases}
    times.update(phases, placement, epoch, EVEN_SPLIT, earlier)


def seen(tokens, seconds, times=None, first=0) -> RankTimes:
    """Add steps in which expert r, which only rank r holds, got tokens[:, r]."""
    times = RankTimes(512) if times is None else times
    steps, ranks = tokens.shape
    part = load_window(tokens[:, None], range(first, first + steps), ranks, seconds=seconds)
    placement = Placement(np.arange(ranks, dtype=np.int32)[None], ranks, ranks)
    times.update({Phase.MIXED: [part]}, placement, 0, EVEN_SPLIT)
    return times


def served(factors, steps=200, seed=0, noise=0.02, shares=None):
    """Return tokens and seconds of a layer that takes 1 ms up to 512 tokens and 2 us per token
    beyond."""
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0.0, 0.5, len(factors)) if shares is None else shares
    tokens = np.rint(
        rng.lognormal(6.5, 0.6, steps)[:, None]
        * shares
        * rng.lognormal(0, 0.1, (steps, len(factors)))
    )
    seconds = (1e-3 + np.maximum(0, tokens - 512) * 2e-6) * factors
    return tokens, seconds * rng.lognormal(0, noise, seconds.shape)


def fit_of(times) -> TimeFit:
    found = times.fit()
    assert isinstance(found, TimeFit), found
    return found


def test_steps_of_another_epoch_do_not_count_and_earlier_ones_outlive_a_move():
    times = RankTimes(512)
    before, after = window(range(100), SPREAD, 1), window(range(100, 130), MOVED, 2)
    add(times, [before])
    first = fit_of(times)
    late = window(range(100, 120), SPREAD, 1)
    add(times, [before, late], MOVED, 2)
    assert times.fit() is first, "steps of the epoch before are not counted under the new one"
    add(times, [before, late, after.slice(slice(20, 30))], MOVED, 2)
    assert times.fit() is first, "a fit stands until 16 more steps came"
    more = window(range(130, 140), MOVED, 2)
    add(times, [before, more], MOVED, 2)
    second = fit_of(times)
    assert second.steps == 120
    assert second.s_per_replica == pytest.approx(PER_REPLICA, rel=0.05)
    assert second.s_per_token == pytest.approx(PER_TOKEN, rel=0.05)


def test_no_step_is_lost_around_a_move():
    times = RankTimes(512)
    parts = [window(range(100), SPREAD, 1), window(range(100, 140), MOVED, 2)]
    add(times, parts)
    assert fit_of(times).steps == 100, "steps of a later epoch wait"
    parts.append(window(range(140, 160), SPREAD, 3))
    add(times, parts, SPREAD, 3, {Epoch(1): SPREAD, Epoch(2): MOVED})
    assert fit_of(times).steps == 160, "each is counted under its own placement"
    assert fit_of(times).s_per_replica == pytest.approx(PER_REPLICA, rel=0.05)
    lost = RankTimes(512)
    other = Placement(np.arange(8, dtype=np.int32)[None], 4, 8)
    add(lost, parts, SPREAD, 3, {Epoch(1): other, Epoch(2): MOVED})
    assert fit_of(lost).steps == 60, "a placement of another shape counts nothing"


def test_a_window_of_a_large_shape_is_taken_in_several_calls(monkeypatch):
    monkeypatch.setattr(windows, "_CELLS_AT_ONCE", 60 * SPREAD.num_layers * SPREAD.num_slots)
    times = RankTimes(512)
    parts = [window(range(200), SPREAD, 1)]
    for known in (60, 120, 180, 200, 200):
        add(times, parts)
        assert fit_of(times).steps == known


def test_phases_are_fitted_together_in_the_order_of_their_steps():
    times = RankTimes(64)
    slow = window(range(64, 128, 2), SPREAD, 1)
    slow.compute_s[:, 1] *= 1.3
    fast = window(range(65, 129, 2), SPREAD, 1, seed=9)
    fast.compute_s[:, 1] *= 1.3
    phases = {Phase.DECODE: [window(range(64), SPREAD, 1), slow], Phase.PREFILL: [fast]}
    add(times, phases)
    assert fit_of(times).steps == 64, "the newest steps of both phases are kept"
    assert fit_of(times).factors[1] == pytest.approx(1.3, rel=0.02)


def test_ranks_that_do_not_measure_are_no_fit_and_a_new_generation_forgets():
    times = RankTimes(512)
    silent = window(range(50), SPREAD, 1, measured=False)
    add(times, [silent])
    assert times.fit() == NoFit("no rank reports seconds")
    add(times, [window(range(50, 90), SPREAD, 1)])
    fit_of(times)
    times.clear()
    assert times.fit() == NoFit("no rank reports seconds")


def test_a_placement_without_an_expert_that_has_load_is_not_counted():
    lost = Placement(np.array([[0, 1, 2, 3, 4, -1, 0, -1]], np.int32), 4, 6)
    times = RankTimes(512)
    add(times, [window(range(50), SPREAD, 1)], lost, 1)
    assert times.fit() == NoFit("no rank reports seconds")


def test_a_fit_in_use_is_not_dropped_at_the_limit():
    rng = np.random.default_rng(8)
    first, later = window(range(64), SPREAD, 1), window(range(64, 576), SPREAD, 1)
    noise = rng.lognormal(0, 0.75, later.compute_s.shape)
    alone, after = RankTimes(512), RankTimes(512)
    noisy = replace(later, compute_s=later.compute_s * noise)
    add(alone, [noisy])
    refused = alone.fit()
    assert isinstance(refused, NoFit)
    assert "at least 50% is needed" in refused.reason
    add(after, [first])
    fit_of(after)
    add(after, [first, noisy])
    assert 0.4 <= fit_of(after).explained < 0.5


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_found_whatever_it_carries(seed):
    true = np.ones(8)
    true[3] = 1.3
    found = seen(*served(true, seed=seed)).speed_factors()
    assert np.allclose(found, true, rtol=0.06)


def test_a_rank_that_carries_little_is_not_slow():
    tokens, seconds = served(np.ones(8), shares=np.array([1.0] * 7 + [0.2]))
    per_token = np.median(seconds / np.maximum(tokens, 1), axis=0)
    assert per_token.max() / np.median(per_token) > 1.5, "seconds per token alone would name one"
    assert np.abs(seen(tokens, seconds).speed_factors() - 1).max() < 0.06


def test_outliers_move_nothing():
    true = np.array([1.0, 1.0, 1.25, 1.0])
    tokens, seconds = served(true, seed=3)
    rng = np.random.default_rng(9)
    seconds[rng.random(seconds.shape) < 0.2] *= 50
    assert np.allclose(seen(tokens, seconds).speed_factors(), true, rtol=0.1)


def test_unknown_is_not_a_speed():
    tokens, seconds = served(np.array([1.0, 1.0, 1.0, 1.3]))
    seconds[:, 1] = np.nan
    seconds[15:, 2] = np.nan
    times = seen(tokens, seconds)
    assert isinstance(times.fit(), NoFit)
    found = times.speed_factors()
    assert np.isnan(found[[1, 2]]).all()
    assert found[3] / found[0] == pytest.approx(1.3, rel=0.06), "the others are known"
    assert len(RankTimes(512).speed_factors()) == 0
    assert np.isnan(seen(tokens, np.full(seconds.shape, np.nan)).speed_factors()).all()


def test_speeds_are_known_where_no_slope_is():
    rng = np.random.default_rng(5)
    tokens = np.full((64, 4), 700.0)
    times = seen(tokens, 1e-3 * rng.lognormal(0, 0.02, tokens.shape))
    assert isinstance(times.fit(), NoFit), "nothing varies that a cost model could explain"
    assert times.speed_factors().tolist() == [1.0, 1.0, 1.0, 1.0]


def test_factors_stand_until_sixteen_more_steps_came():
    tokens, seconds = served(np.array([1.0, 1.0, 1.2, 1.0]))
    times = seen(tokens[:15], seconds[:15])
    assert np.isnan(times.speed_factors()).all()
    first = seen(tokens[15:40], seconds[15:40], times, 15).speed_factors()
    assert np.isfinite(first).all(), "unknown is no answer to keep"
    assert seen(tokens[40:55], seconds[40:55], times, 40).speed_factors() is first
    assert seen(tokens[55:56], seconds[55:56], times, 55).speed_factors() is not first
    times.clear()
    assert len(times.speed_factors()) == 0


def test_a_refused_fit_keeps_the_last_sound_one_until_its_steps_are_gone():
    times = RankTimes(128)
    add(times, [window(range(128), SPREAD, 1)])
    sound = fit_of(times)
    rng = np.random.default_rng(4)

    def noise(first, last):
        part = window(range(first, last), SPREAD, 1)
        part.compute_s[:] = rng.lognormal(-5, 0.6, part.compute_s.shape)
        add(times, [part])
        return times.fit()

    for first in range(128, 256, 16):
        kept = noise(first, first + 16)
        if kept.refused:
            break
    assert isinstance(kept, TimeFit)
    assert kept.refused
    shape = kept.s_per_replica / kept.s_per_token
    assert shape == pytest.approx(sound.s_per_replica / sound.s_per_token, rel=0.1)
    gone = noise(256, 400)
    assert isinstance(gone, NoFit), "nothing that is kept supports the fit"
    good = window(range(400, 528), SPREAD, 1)
    add(times, [good])
    assert fit_of(times).refused == ""


def test_a_rank_that_changes_its_speed_loses_its_earlier_steps_only():
    times = RankTimes(512)
    for first in range(0, 600, 8):
        part = window(range(first, first + 8), SPREAD, 1)
        part.compute_s[:, 2] *= 1.12 if 200 <= first < 400 else 1.0
        add(times, [part])
        times.fit()
        found = times.speed_factors()
        if first in (192, 392, 592):
            assert found[2] == pytest.approx(1.12 if first == 392 else 1.0, rel=0.01)
        if 232 <= first < 400:
            assert fit_of(times).drifted == (2,)
            assert fit_of(times).steps >= first, "the others keep theirs"
    assert fit_of(times).s_per_replica == pytest.approx(PER_REPLICA, rel=0.05)


@pytest.mark.parametrize("seconds", [3e-6, 0.0, 5e-324, 1e300])
def test_a_speed_is_seconds_over_tokens_and_unknown_if_no_step_takes_so_long(seconds):
    """The price of a copy is divided by it."""
    tokens = np.random.default_rng(0).integers(1, 500, (20, 2))
    found = seen(tokens, tokens * [1e-6, seconds]).seconds_per_token()
    assert np.allclose(found, [1e-6, 3e-6 if seconds == 3e-6 else np.nan], equal_nan=True)
    assert len(RankTimes(512).seconds_per_token()) == 0


@pytest.mark.parametrize("seconds", [1e308, 1e6, 5e-324, 0.0, -1.0, math.inf])
def test_seconds_that_no_step_can_take_are_not_fitted(seconds):
    """One number like these in one report ended the deployment: the fit overflowed."""
    tokens = np.random.default_rng(0).integers(1, 500, (64, 4))
    told = PER_TOKEN * tokens * [1.0, 1.0, 1.0, 1.5]
    told[40, 1] = seconds
    unmeasured = told.copy()
    unmeasured[40, 1] = np.nan
    factors = seen(tokens, told).speed_factors()
    assert np.isfinite(factors).all() and factors[3] > 1.2
    assert np.array_equal(factors, seen(tokens, unmeasured).speed_factors())
