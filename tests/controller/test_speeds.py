"""How fast ranks are, from serving alone: what a load must not change, what outliers must not change, who is named."""

from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from evenkeel.controller.balance import Balance, _PhaseBalance
from evenkeel.controller.cycle import CycleSettings, price
from evenkeel.controller.speeds import Device, SlowRanks, join_curves, speed_factors
from evenkeel.model.load import Phase
from evenkeel.model.placement import Placement
from evenkeel.planning.metrics import rank_seconds
from evenkeel.planning.problem import DispatchModel
from evenkeel.wire.link import CostCurve


def served(factors, steps=200, seed=0, noise=0.02, shares=None):
    """Tokens and seconds of ranks under a layer with a floor: 1 ms up to 512 tokens, 2 us a token beyond."""
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0.0, 0.5, len(factors)) if shares is None else shares
    tokens = np.rint(
        rng.lognormal(6.5, 0.6, steps)[:, None] * shares * rng.lognormal(0, 0.1, (steps, len(factors)))
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
            watch.look("demo", factors, devices)
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
    assert np.allclose(rank_seconds(np.array([[65.0, 64.0]]), joined), [[1e-3, 2e-3]])
    assert np.allclose(rank_seconds(np.array([[192.0, 192.0]]), joined), [[2e-3, 4e-3 + 64 * 5e-5]])
    assert join_curves([fast, None]) is None
    assert join_curves([fast, CostCurve(32, (1e-3,), 0.0)]) is None
    assert join_curves([]) is None
    settings = CycleSettings(
        plan_steps=64,
        recent_steps=16,
        lifetime_steps=1000,
        copy_bytes_per_s=1e9,
        copy_cost_tokens=1.0,
        rank_speeds=True,
        dispatch=DispatchModel.EVEN,
    )
    assert price(np.zeros(0), 1_000_000, settings, joined) == (joined, 1e-3)
    assert price(np.zeros(0), 1_000_000, replace(settings, rank_speeds=False), joined) == (None, 1.0)


def test_the_planner_compares_ranks_at_the_same_tokens():
    tokens, seconds = served(np.array([1.0, 1.0, 1.2, 1.0]), shares=np.array([1.0, 1.0, 1.0, 0.2]))
    balance = Balance(512)
    balance._phases[Phase.MIXED] = phase = _PhaseBalance(Placement(np.arange(4)[None], 4, 4))
    phase.tokens, phase.compute_s = tokens, seconds
    paces = balance.paces()
    assert np.allclose(paces / paces[0], [1.0, 1.0, 1.2, 1.0], rtol=0.06)
    phase.compute_s = seconds.copy()
    phase.compute_s[:, 1] = np.nan
    assert np.isnan(balance.paces()[1]), "unknown is never a speed"
