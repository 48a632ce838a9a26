"""The compute time of the reference engine: by tokens and replicas, and slower on one rank."""

import time

import pytest

from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
from evenkeel_moe.engines.reference.pace import Pace
from evenkeel_moe.errors import InvalidInput


def pace(rank=0, **changes):
    values = {
        "pace_s_per_token": 1e-4,
        "pace_s_per_replica": 2e-3,
        "slow_rank": 1,
        "slow_factor": 1.5,
        "slow_from": 10,
        "slow_until": 20,
    }
    return Pace(RankConfig(run_folder="unused", rank=rank, **{**values, **changes}))


def waited(one, step, tokens):
    one.enter(step)
    began = time.perf_counter()
    one.wait(began, tokens)
    return time.perf_counter() - began


def test_a_layer_takes_its_tokens_and_its_active_replicas():
    assert waited(pace(), 0, [40, 0, 20]) >= 60e-4 + 2 * 2e-3
    assert waited(pace(), 0, [60, 0, 0]) >= 60e-4 + 2e-3


@pytest.mark.parametrize(
    ("rank", "step", "factor"), [(1, 9, 1.0), (1, 10, 1.5), (1, 19, 1.5), (1, 20, 1.0), (0, 15, 1)]
)
def test_one_rank_is_slow_between_two_steps(rank, step, factor):
    one = pace(rank)
    assert waited(one, step, [40]) >= factor * (40e-4 + 2e-3)
    config = RankConfig(run_folder="x", rank=rank, slow_rank=1, slow_factor=1.5, slow_from=10)
    assert config.replace(slow_until=20).slowdown(step) == factor


def test_a_slow_rank_without_a_pace_takes_longer_than_its_own_compute():
    one = pace(1, pace_s_per_token=0.0, pace_s_per_replica=0.0)
    one.enter(10)
    computed_s = 0.02
    began = time.perf_counter() - computed_s
    one.wait(began, [1])
    assert time.perf_counter() - began >= 1.5 * computed_s
    assert one.cost(1.0) is None


def test_a_rank_tells_the_time_that_it_takes_at_the_start():
    slow, usual = pace(1, slow_from=0).cost(7.0), pace(0, slow_from=0).cost(7.0)
    assert (slow.s_per_token, slow.s_per_replica) == pytest.approx((1.5e-4, 3e-3))
    assert (usual.s_per_token, usual.s_per_replica, usual.measured_unix_s) == (1e-4, 2e-3, 7.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pace_s_per_token": -1.0}, "pace_s_per_token is -1"),
        ({"pace_s_per_replica": float("nan")}, "pace_s_per_replica is nan"),
        ({"slow_factor": 0.9}, "slow_factor is 0.9"),
        ({"slow_rank": 4}, "slow_rank 4 is outside 0..3"),
        ({"slow_until": 10}, "slow_from 10 and slow_until 10"),
        ({"dispatch": DispatchRule.LIBRA}, "libra has no pace"),
        ({"tell_cost": True, "pace_s_per_token": 0.0}, "tell_cost needs"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(changes, words):
    with pytest.raises(InvalidInput, match=words):
        pace(**changes)
