"""A change of a rank's speed is found within 32 steps, and no factor mixes two speeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.telemetry.speed_changes import SpeedChanges, find_changes
from evenkeel_moe.telemetry.time_fit import TimeFit, fit_present_speeds
from tests.telemetry.test_time_fit import LAYERS, balanced, fitted, served, slow

CAPACITY = 256


def fit_now(tokens, active, seconds, before=None) -> tuple[TimeFit, SpeedChanges]:
    """Return the fit, which must be sound, and the rows that count."""
    found, changes = fit_present_speeds(tokens, active, seconds, LAYERS, before)
    assert isinstance(found, TimeFit)
    return found, changes


class Served:
    """Fits the newest steps as they come, as `RankTimes` does."""

    def __init__(self, tokens, active, seconds, before=None):
        self.steps = (tokens, active, seconds)
        self.first = np.zeros(tokens.shape[1], np.int64)
        self.before = before
        self.waits = False

    def until(self, end) -> TimeFit:
        """Fit the steps before `end`."""
        start = max(0, end - CAPACITY)
        tokens, active, seconds = (values[start:end] for values in self.steps)
        first = np.maximum(self.first - start, 0)
        found, changes = fit_present_speeds(tokens, active, seconds, LAYERS, self.before, first)
        self.waits = changes.waiting
        self.first = np.where(changes.first > first, changes.first + start, self.first)
        if isinstance(found, TimeFit):
            self.before = found
        assert self.before is not None
        return self.before

    def run(self, start, end, every=16):
        """Yield (steps, fit) in cycles that come every 8 steps."""
        fitted_at = start - every
        for step in range(start, end + 1, 8):
            if step - fitted_at >= every or self.waits:
                fitted_at = step
                yield step, self.until(step)


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(40, 300),
    st.sampled_from([0.01, 0.02, 0.03, 0.05]),
    st.floats(0.1, 0.4),
    st.booleans(),
    st.booleans(),
)
def test_a_change_at_any_step_is_found_within_32_steps_and_measured_to_2_percent(
    seed, at, noise, size, slower, even
):
    steps = at + 96
    change = np.exp(size if slower else -size)
    before = None
    if even:
        before = fitted(*served(np.ones(8), noise=noise))
        rng = np.random.default_rng(seed)
        tokens = 2000 * (1 + 0.01 * rng.standard_normal((steps, 8)))
        active = np.full(tokens.shape, 160.0)
        seconds = 4e-4 + 1e-6 * tokens + 2e-4 * active
        seconds *= rng.lognormal(0, noise, tokens.shape)
    else:
        tokens, active, seconds = served(np.ones(8), steps=steps, seed=seed, noise=noise)
    seconds[at:, 5] *= change
    watch, found_at = Served(tokens, active, seconds, before), None
    for step, found in watch.run(40, steps):
        if step < at:
            assert found.factors[5] == 1.0
        if watch.first[5] and found_at is None:
            found_at = step
            assert abs(watch.first[5] - at) <= 8
        if step >= at + 32:
            assert found.factors[5] == pytest.approx(change, rel=0.02)
            assert np.delete(found.factors, 5) == pytest.approx(1.0, abs=0.02)
        if found_at is None:
            # Until it is found, the factor is that of the earlier speed.
            assert found.factors[5] == pytest.approx(1.0, abs=0.03)
    assert found_at is not None
    assert found_at - at <= 32


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.03, 0.05]), st.integers(40, 200))
def test_a_recovery_is_measured_by_the_steps_after_it_alone(seed, noise, slow_steps):
    tokens, active, seconds = served(np.ones(8), steps=296 + slow_steps, seed=seed, noise=noise)
    seconds[200 : 200 + slow_steps, 2] *= 1.12
    watch = Served(tokens, active, seconds)
    for step, found in watch.run(40, len(tokens)):
        if 232 <= step <= 200 + slow_steps:
            assert found.factors[2] == pytest.approx(1.12, rel=0.02)
        if step >= 232 + slow_steps:
            assert found.factors[2] == 1.0
    assert found.s_per_replica == pytest.approx(2e-4, rel=0.05)


def test_ten_thousand_steady_steps_are_no_change():
    tokens, active, seconds = served(np.ones(8), steps=10_000, noise=0.03)
    watch = Served(tokens, active, seconds)
    for _, found in watch.run(40, 10_000):
        assert (found.factors == 1.0).all()
        assert found.drifted == ()
    assert not watch.first.any()


def test_slopes_of_an_earlier_fit_are_kept_when_a_speed_changes():
    before = fitted(*served(np.ones(8)))
    tokens, active, seconds = balanced()
    seconds[-32:, 2] *= 1.12
    found, _ = fit_now(tokens, active, seconds, before)
    assert found.drifted == (2,) and found.slopes_kept
    assert found.s_per_replica == pytest.approx(2e-4, rel=0.03)
    assert np.allclose(found.factors, slow(2), rtol=0.02)


def test_a_slower_step_on_all_ranks_is_no_drift():
    tokens, active, seconds = served(np.ones(8), seed=5)
    seconds[-32:] *= 1.2
    found, changes = fit_now(tokens, active, seconds)
    assert found.drifted == ()
    assert not changes.waiting


def test_a_change_of_few_steps_waits_and_mixes_into_no_factor():
    tokens, active, seconds = served(np.ones(8), steps=60, seed=5)
    seconds[-12:, 2] *= 1.12
    found, changes = fit_now(tokens, active, seconds)
    assert changes.waiting
    assert changes.end[2] == pytest.approx(48, abs=1)
    assert found.drifted == ()
    assert found.factors[2] == 1.0


def test_long_windows_of_many_ranks_are_thinned_out_and_keep_the_newest_steps():
    tokens, active, seconds = served(np.ones(128), steps=400, seed=1)
    found, _ = fit_now(tokens, active, seconds)
    assert found.steps <= 128
    assert found.s_per_replica == pytest.approx(2e-4, rel=0.03)
    seconds[-32:, 7] *= 1.2
    found, _ = fit_now(tokens, active, seconds)
    assert found.drifted == (7,)
    assert found.factors[7] == pytest.approx(1.2, rel=0.02)


def test_outliers_are_no_change_and_hide_none():
    tokens, active, seconds = served(np.ones(8), seed=3)
    rng = np.random.default_rng(9)
    seconds[rng.random(seconds.shape) < 0.15] *= 50
    found, _ = fit_now(tokens, active, seconds)
    assert found.drifted == ()
    seconds[-30:, 4] *= 1.15
    found, _ = fit_now(tokens, active, seconds)
    assert found.drifted == (4,)


def test_a_table_without_steps_or_values_has_no_change():
    for shape in ((0, 4), (40, 4), (40, 1)):
        changes = find_changes(np.full(shape, np.nan))
        assert changes.first.tolist() == [0] * shape[1]
        assert not changes.waiting


@pytest.mark.parametrize("alike", [0.5, 0.7])
def test_errors_that_successive_steps_share_are_seldom_taken_for_a_change(alike):
    rng = np.random.default_rng(2)
    errors = 0.05 * np.sqrt(1 - alike**2) * rng.standard_normal((4000, 8))
    for step in range(1, len(errors)):
        errors[step] += alike * errors[step - 1]
    ends = range(64, len(errors), 16)
    found = [find_changes(errors[max(0, end - CAPACITY) : end]).first.any() for end in ends]
    # Taken for independent, they would be a change in 11 and 43 % of the fits.
    assert np.mean(found) < 0.04


def test_of_two_ranks_a_change_is_found_too():
    tokens, active, seconds = served(np.ones(2), steps=200, seed=6)
    seconds[-32:, 1] *= 1.2
    found, _ = fit_now(tokens, active, seconds)
    assert found.factors[1] / found.factors[0] == pytest.approx(1.2, rel=0.02)
    _, changes = fit_present_speeds(tokens[:-20], active[:-20], seconds[:-20], LAYERS)
    assert changes.waiting, "no rank is without a change, and yet it waits"
