"""The profile by tokens and replicas: its grid, known coefficients, and a real layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evenkeel_moe.agent.profile.expert_layer import (
    ExpertShape,
    GroupedLayer,
    Point,
    even_point,
)
from evenkeel_moe.agent.profile.replica_cost import (
    ReplicaProfile,
    compared_curve,
    fit_replica_cost,
    grid,
    remeasure,
)
from evenkeel_moe.agent.profile.timing import Timing, time_points
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of, token_counts
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


def staircase(tokens):
    """Seconds of a kernel that computes whole tiles of 512 tokens of a rank."""
    return 1e-4 * np.ceil(np.asarray(tokens) / 512)


@pytest.mark.parametrize("stairs", [True, False])
def test_the_curve_and_the_line_are_compared_on_all_points_of_the_profile(stairs):
    counts = token_counts(64, 2048, 4096)
    spread = [even_point(count, 16) for count in counts]
    law = staircase if stairs else lambda tokens: 2e-5 + 6e-8 * np.asarray(tokens)
    per_replica = 0.0 if stairs else 3e-6
    by_tokens = [float(law(n * k) + per_replica * k) for n, k in spread]
    by_replicas = profile(float(law(n * k) + per_replica * k) for n, k in POINTS)
    cost = fit_replica_cost(by_replicas, 0.0)
    told = TokenProfile(64, tuple(counts), Timing(tuple(by_tokens), 5, 1.0))
    curve = compared_curve(told, cost, by_replicas)
    assert curve.fit_error is not None and curve.line_error is not None
    assert replace(curve, fit_error=None, line_error=None) == curve_of(told)
    if stairs:
        assert curve.fit_error == pytest.approx(0.0, abs=1e-9)
        assert curve.line_error > 0.05
    else:
        assert curve.line_error == pytest.approx(0.0, abs=1e-6)
        assert curve.fit_error > 0.05, "a curve does not know how many replicas are active"


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
