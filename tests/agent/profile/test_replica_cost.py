"""The profile by tokens and replicas: its grid, known coefficients, and a real layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evenkeel_moe.agent.profile.expert_layer import ExpertShape, GroupedLayer, Point
from evenkeel_moe.agent.profile.replica_cost import (
    ReplicaProfile,
    fit_replica_cost,
    grid,
    remeasure,
)
from evenkeel_moe.agent.profile.timing import Timing, time_points
from evenkeel_moe.errors import InvalidInput

POINTS = grid(16, 4096)


def told(fixed=2e-5, per_token=6e-8, per_replica=3e-6, read=0.0, noise=0.0, points=POINTS):
    rng = np.random.default_rng(4)
    seconds = [
        fixed + active * (per_replica + max(read, per_token * tokens)) for tokens, active in points
    ]
    return profile(np.array(seconds) * rng.lognormal(0, noise, len(points)), points)


def profile(seconds, points=POINTS):
    return ReplicaProfile(tuple(points), Timing(tuple(seconds), 5, 1.0))


def test_the_grid_spans_both_axes_within_the_tokens_of_a_rank():
    assert {point.active for point in POINTS} == {1, 2, 4, 8, 16}
    assert {point.tokens for point in POINTS if point.active == 1} == {2**n for n in range(13)}
    assert all(point.tokens * point.active <= 4096 for point in POINTS)
    assert grid(9, 100)[-1] == Point(8, 9), "limits that are no power of two are measured too"
    assert max(point.active for point in grid(9, 100)) == 9


@pytest.mark.parametrize(("experts", "tokens"), [(1, 64), (8, 1)])
def test_one_axis_is_no_grid(experts, tokens):
    with pytest.raises(InvalidInput, match="both slopes"):
        grid(experts, tokens)


def test_both_slopes_of_an_additive_layer_are_found():
    cost = fit_replica_cost(told(noise=0.02), 1.8e9)
    assert cost.fixed_s == pytest.approx(2e-5, rel=0.1)
    assert cost.s_per_token == pytest.approx(6e-8, rel=0.05)
    assert cost.s_per_replica == pytest.approx(3e-6, rel=0.1)
    assert cost.read_s == 0.0
    assert cost.fit_error == pytest.approx(0.015, abs=0.01)
    assert cost.measured_unix_s == 1.8e9


def test_the_limit_by_reading_of_a_roofline_is_found():
    cost = fit_replica_cost(told(per_replica=1e-6, read=1.2e-5, noise=0.01), 0.0)
    assert cost.read_s == pytest.approx(1.2e-5, rel=0.25)
    assert cost.read_s + cost.s_per_replica == pytest.approx(1.3e-5, rel=0.1)
    assert cost.s_per_token == pytest.approx(6e-8, rel=0.1)
    assert cost.fit_error < 0.05


def test_seconds_that_do_not_rise_with_tokens_are_refused():
    flat = profile((1e-3,) * len(POINTS))
    with pytest.raises(InvalidInput, match="do not rise"):
        fit_replica_cost(flat, 0.0)
    falling = profile(1e-3 / (1 + n * k) for n, k in POINTS)
    with pytest.raises(InvalidInput, match="do not rise"):
        fit_replica_cost(falling, 0.0)
    with pytest.raises(InvalidInput, match="took time"):
        fit_replica_cost(profile((float("nan"),) * len(POINTS)), 0.0)


SHAPE = ExpertShape(256, 512, 6, "float32")


def test_a_real_layer_is_measured_in_batched_calls_on_this_machine():
    points = grid(SHAPE.experts, 512)
    run = GroupedLayer(SHAPE, torch.device("cpu"))
    timing = time_points(run, points, budget_s=2, rounds=2)
    assert len(timing.seconds) == len(points)
    assert fit_replica_cost(profile(timing.seconds, points), 0.0).s_per_token > 0


def test_a_profile_is_measured_again_with_its_age():
    cost = remeasure(SHAPE, torch.device("cpu"), budget_s=0.5, max_tokens=256, now_unix_s=1.8e9)
    assert cost.measured_unix_s == 1.8e9
    with pytest.raises(InvalidInput, match="two experts"):
        remeasure(
            replace(SHAPE, experts=1),
            torch.device("cpu"),
            budget_s=0.1,
            max_tokens=64,
            now_unix_s=0.0,
        )
