"""Speed factors from serving do not depend on load or outliers, and slow ranks are logged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.moe_time import rank_times
from evenkeel_moe.telemetry.balance import Balance
from evenkeel_moe.telemetry.rank_speeds import Device, SlowRanks, join_curves, speed_factors
from evenkeel_moe.wire.link import CostCurve


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


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_found_whatever_it_carries(seed):
    true = np.ones(8)
    true[3] = 1.3
    found = speed_factors(*served(true, seed=seed))
    assert np.allclose(found, true, rtol=0.06)


def test_a_rank_that_carries_little_is_not_slow():
    tokens, seconds = served(np.ones(8), shares=np.array([1.0] * 7 + [0.2]))
    per_token = np.median(seconds / np.maximum(tokens, 1), axis=0)
    assert per_token.max() / np.median(per_token) > 1.5, "seconds per token alone would name one"
    assert np.abs(speed_factors(tokens, seconds) - 1).max() < 0.06


def test_outliers_move_nothing():
    true = np.array([1.0, 1.0, 1.25, 1.0])
    tokens, seconds = served(true, seed=3)
    rng = np.random.default_rng(9)
    seconds[rng.random(seconds.shape) < 0.2] *= 50
    assert np.allclose(speed_factors(tokens, seconds), true, rtol=0.1)


def plain_factors(tokens, seconds):
    """Compute the same factors naively, every pass from scratch."""
    known = (tokens > 0) & (seconds > 0) & np.isfinite(seconds)
    enough = known.sum(axis=0) >= 16
    if not enough.any():
        return np.full(tokens.shape[1], np.nan)
    known &= enough
    factors = np.where(enough, 1.0, np.nan)
    for _ in range(12):
        x, y = tokens[known], (seconds / factors)[known]
        order = np.argsort(x, kind="stable")
        bins = np.array_split(order, min(12, len(order)))
        at = np.array([np.median(x[one]) for one in bins])
        level = np.maximum.accumulate([np.median(y[one]) for one in bins])
        keep = np.concatenate([[True], np.diff(at) > 0])
        expected = np.interp(tokens, at[keep], level[keep])
        factors = np.array(
            [
                np.median((seconds / expected)[known[:, rank], rank])
                if known[:, rank].any()
                else np.nan
                for rank in range(tokens.shape[1])
            ]
        )
        factors /= np.median(factors[enough])
    return factors


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 70),
    st.integers(1, 9),
    st.sampled_from([2, 30, 100_000]),
    st.sampled_from([0.0, 0.2, 0.7]),
    st.booleans(),
)
def test_factors_are_those_of_plain_passes_to_the_bit(seed, steps, ranks, most, missing, coarse):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, most, (steps, ranks)).astype(float)
    seconds = rng.lognormal(-6, 1, tokens.shape)
    if coarse:
        seconds = np.ceil(seconds * 500) / 500
    seconds[rng.random(seconds.shape) < missing] = np.nan
    seconds[rng.random(seconds.shape) < 0.03] = 0.0
    assert np.array_equal(
        speed_factors(tokens, seconds), plain_factors(tokens, seconds), equal_nan=True
    )


def test_unknown_is_not_a_speed():
    tokens, seconds = served(np.ones(4))
    seconds[:, 1] = np.nan
    seconds[15:, 2] = np.nan
    found = speed_factors(tokens, seconds)
    assert np.isnan(found[[1, 2]]).all()
    assert np.isfinite(found[[0, 3]]).all()
    assert speed_factors(np.zeros((0, 4)), np.zeros((0, 4))).shape == (4,)


def test_a_slow_rank_is_named_once_with_its_device_and_once_when_it_recovers():
    watch = SlowRanks(checks=2)
    devices = {1: Device("node-b", "GPU-1234")}
    slow, well = np.array([1.0, 1.3]), np.array([1.0, 1.01])
    with capture_logs() as said:
        for factors in (slow, well, slow, slow, slow, np.array([1.0, 1.1]), well, well, well):
            watch.update("demo", factors, devices)
    assert [row["event"] for row in said] == ["rank_slow", "rank_no_longer_slow"]
    assert {key: said[0][key] for key in ("rank", "node", "gpu_uuid", "factor")} == {
        "rank": 1,
        "node": "node-b",
        "gpu_uuid": "GPU-1234",
        "factor": 1.3,
    }
    assert watch.slow == {}


def test_measured_curves_are_what_the_planner_scores_with():
    fast = CostCurve(64, (1e-3, 1e-3, 2e-3), 1e-5)
    slow = CostCurve(64, (2e-3, 4e-3), 5e-5)
    joined = join_curves([fast, slow])
    assert joined is not None
    assert np.allclose(rank_times(np.array([[65.0, 64.0]]), CostModel(joined)), [[1e-3, 2e-3]])
    times = rank_times(np.array([[192.0, 192.0]]), CostModel(joined))
    assert np.allclose(times, [[2e-3, 4e-3 + 64 * 5e-5]])
    assert join_curves([fast, None]) is None
    assert join_curves([fast, CostCurve(32, (1e-3,), 0.0)]) is None
    assert join_curves([]) is None


PLACEMENT = Placement(np.arange(4, dtype=np.int32)[None], 4, 4)


def seen(balance, tokens, seconds, placement=PLACEMENT):
    """Add steps to a balance in which expert r, which only rank r holds, got tokens[:, r]."""
    counts, steps = tokens[:, None].astype(np.uint32), len(tokens)
    window = LoadWindow(
        counts, np.arange(steps), np.zeros(steps, int), np.ones(tokens.shape, np.int64), seconds
    )
    balance.update({Phase.MIXED: [window]}, placement)
    return balance


def test_factors_stand_until_sixteen_more_steps_came():
    tokens, seconds = served(np.array([1.0, 1.0, 1.2, 1.0]))
    balance = seen(Balance(512), tokens[:15], seconds[:15])
    assert np.isnan(balance.speed_factors()).all()
    first = seen(balance, tokens[:16], seconds[:16]).speed_factors()
    assert np.array_equal(first, speed_factors(tokens[:16], seconds[:16])), (
        "unknown is no answer to keep"
    )
    assert seen(balance, tokens[:31], seconds[:31]).speed_factors() is first
    later = seen(balance, tokens[:32], seconds[:32]).speed_factors()
    assert np.array_equal(later, speed_factors(tokens[:32], seconds[:32]))
    balance.clear()
    assert len(balance.speed_factors()) == 0
    later = seen(balance, tokens[:20], seconds[:20]).speed_factors()
    assert np.array_equal(later, speed_factors(tokens[:20], seconds[:20]))
    other = Placement(np.array([[1, 0, 2, 3]], np.int32), 4, 4)
    assert np.isnan(seen(balance, tokens[:10], seconds[:10], other).speed_factors()).all()
    moved = seen(balance, tokens[:20], seconds[:20], other).speed_factors()
    assert np.array_equal(moved, speed_factors(tokens[:20, [1, 0, 2, 3]], seconds[:20]))
