"""Both slopes and the speeds of ranks are found in reported seconds, or it is said why not."""

import numpy as np
import pytest

from evenkeel_moe.telemetry.time_fit import NoFit, TimeFit, fit_present_speeds

LAYERS = 4


def served(
    factors,
    *,
    steps=256,
    seed=0,
    noise=0.03,
    fixed=1e-4,
    per_token=1e-6,
    per_replica=2e-4,
    mean=60.0,
    shares=None,
):
    """Return tokens, active replicas and seconds of ranks with 40 replicas in each layer."""
    rng = np.random.default_rng(seed)
    factors = np.asarray(factors)
    popular = rng.lognormal(0, 1.2, (len(factors), 40))
    popular /= popular.sum()
    if shares is not None:
        popular *= (np.array(shares) / popular.sum(axis=1))[:, None] / sum(shares)
    total = rng.lognormal(np.log(mean * len(factors)), 0.7, steps)
    drawn = rng.lognormal(0, 0.3, (steps, *popular.shape))
    replicas = rng.poisson(total[:, None, None] * popular * drawn)
    tokens = LAYERS * replicas.sum(axis=2).astype(float)
    active = LAYERS * (replicas > 0).sum(axis=2).astype(float)
    seconds = (fixed * LAYERS + per_token * tokens + per_replica * active) * factors
    return tokens, active, seconds * rng.lognormal(0, noise, tokens.shape)


def slow(rank=3, by=1.12, ranks=8):
    factors = np.ones(ranks)
    factors[rank] = by
    return factors


def fit_times(tokens, active, seconds, before=None) -> TimeFit | NoFit:
    return fit_present_speeds(tokens, active, seconds, LAYERS, before)[0]


def fitted(tokens, active, seconds) -> TimeFit:
    found = fit_times(tokens, active, seconds)
    assert isinstance(found, TimeFit), found
    return found


@pytest.mark.parametrize("seed", range(4))
def test_both_slopes_and_a_slow_rank_are_found(seed):
    found = fitted(*served(slow(), seed=seed))
    assert found.s_per_replica == pytest.approx(2e-4, rel=0.03)
    assert found.s_per_token == pytest.approx(1e-6, rel=0.15)
    assert found.fixed_s == pytest.approx(1e-4, rel=0.15)
    assert np.allclose(found.factors, slow(), rtol=0.01)
    assert np.array_equal(found.factors == 1.0, slow() == 1.0), "an unclear difference is none"
    assert found.error == pytest.approx(0.024, abs=0.004)
    assert (found.note, found.drifted) == ("", ())


def test_seconds_that_follow_tokens_get_no_slope_by_replicas():
    found = fitted(*served(slow(), per_token=4e-6, per_replica=0.0))
    assert found.s_per_token == pytest.approx(4e-6, rel=0.02)
    assert found.s_per_replica < 2e-6


def test_a_rank_with_few_tokens_is_not_slow():
    found = fitted(*served(slow(), shares=[1, 1, 1, 1, 1, 1, 1, 0.15]))
    assert np.allclose(found.factors, slow(), rtol=0.01)
    assert found.factors[7] == 1.0


def test_outliers_have_a_bounded_influence():
    tokens, active, seconds = served(slow())
    rng = np.random.default_rng(9)
    seconds[rng.random(seconds.shape) < 0.15] *= 50
    found = fitted(tokens, active, seconds)
    assert np.allclose(found.factors, slow(), rtol=0.02)
    assert found.s_per_replica == pytest.approx(2e-4, rel=0.05)


def test_where_every_replica_is_active_only_tokens_have_a_slope():
    found = fitted(*served(slow(), mean=100_000, per_token=2e-6))
    assert found.s_per_replica == 0.0
    assert found.s_per_token == pytest.approx(2e-6, rel=0.02)
    assert "rise together" in found.note


def test_where_nothing_varies_only_seconds_per_token_are_told():
    tokens, active = np.full((64, 4), 800.0), np.full((64, 4), 160.0)
    rng = np.random.default_rng(2)
    found = fitted(tokens, active, 0.02 * slow(1, 1.3, 4) * rng.lognormal(0, 0.01, tokens.shape))
    assert found.s_per_token == pytest.approx(0.02 / 800, rel=0.01)
    assert found.factors == pytest.approx(slow(1, 1.3, 4), rel=0.01)
    assert "hardly vary" in found.note


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_fit(seed):
    tokens, active, seconds = served(np.ones(8), seed=seed)
    noise = np.random.default_rng(seed).lognormal(-5, 0.4, seconds.shape)
    found = fit_times(tokens, active, noise)
    assert isinstance(found, NoFit)
    assert "explain" in found.reason or "do not rise" in found.reason


def test_seconds_that_fall_with_tokens_are_no_fit():
    tokens, active, _ = served(np.ones(8))
    found = fit_times(tokens, active, 1.0 / tokens)
    assert isinstance(found, NoFit)


def test_a_rank_without_seconds_is_named():
    tokens, active, seconds = served(np.ones(4))
    seconds[10:, 2] = np.nan
    assert fit_times(tokens, active, seconds) == NoFit(
        "rank 2 reported seconds for 10 steps, 16 are needed"
    )
    seconds[:] = np.nan
    assert fit_times(tokens, active, seconds) == NoFit("no rank reports seconds")
    empty = np.zeros((0, 4))
    assert fit_times(empty, empty, empty) == NoFit("no rank reports seconds")


def test_reading_without_computing_still_gives_work_in_tokens():
    found = fitted(*served(np.ones(8), per_token=0.0))
    assert found.s_per_token == pytest.approx(1e-3 * found.s_per_replica, rel=0.5)
    assert found.s_per_replica == pytest.approx(2e-4, rel=0.03)


def balanced(share=1.0, seed=1):
    """Return tokens, active replicas and seconds of 8 ranks whose tokens vary by 1 %.

    Args:
        share: tokens of rank 2 relative to the others'.
        seed: of the noise, 2 % of the seconds.
    """
    rng = np.random.default_rng(seed)
    tokens = 2000 * (1 + 0.01 * rng.standard_normal((512, 8)))
    tokens[:, 2] *= share
    active = np.full(tokens.shape, 160.0)
    seconds = 4e-4 + 1e-6 * tokens + 2e-4 * active
    return tokens, active, seconds * rng.lognormal(0, 0.02, tokens.shape)


def test_slopes_of_an_earlier_fit_are_kept_where_tokens_hardly_vary():
    before = fitted(*served(np.ones(8)))
    tokens, active, seconds = balanced()
    assert isinstance(fit_times(tokens, active, seconds), NoFit)
    kept = fit_times(tokens, active, seconds, before)
    assert isinstance(kept, TimeFit) and kept.slopes_kept
    assert kept.s_per_replica == pytest.approx(2e-4, rel=0.03)
    assert (kept.factors == 1.0).all()


def test_a_rank_that_got_fewer_tokens_because_it_is_slow_stays_known_as_slow():
    before = fitted(*served(slow(2), per_replica=2e-5, per_token=2e-5))
    tokens, active, _ = balanced(share=0.9)
    noise = np.random.default_rng(3).lognormal(0, 0.02, tokens.shape)
    seconds = (4e-4 + 2e-5 * tokens + 2e-5 * active) * slow(2) * noise
    assert isinstance(fit_times(tokens, active, seconds), NoFit)
    kept = fit_times(tokens, active, seconds, before)
    assert isinstance(kept, TimeFit) and kept.slopes_kept
    assert np.allclose(kept.factors, slow(2), rtol=0.02)


def test_slopes_that_describe_the_steps_worse_than_new_ones_are_not_kept():
    before = fitted(*served(np.ones(8)))
    tokens, active, seconds = served(np.ones(8), seed=4)
    noise = np.random.default_rng(4).lognormal(-5, 0.2, seconds.shape)
    assert isinstance(fit_times(tokens, active, noise, before), NoFit)
