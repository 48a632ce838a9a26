"""Rounds alternate and end with the budget."""

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
from evenkeel_moe.agent.profile.files import load_profile, save_curve
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
from evenkeel_moe.wire.link import ReplicaCost


class Device:
    """A clock, and a layer whose time follows a known staircase; every tenth call is an outlier."""

    def __init__(self, tile=64, base=1e-3, per_tile=1e-4):
        self.now, self.calls = 0.0, 0
        self.tile, self.base, self.per_tile = tile, base, per_tile
        self.asked: list[int] = []

    def seconds(self, tokens):
        return self.base + self.per_tile * -(-tokens // self.tile)

    def run(self, tokens):
        self.calls += 1
        self.asked.append(tokens)
        self.now += self.seconds(tokens) * (30 if self.calls % 10 == 0 else 1)

    def clock(self):
        return self.now


def test_the_budget_ends_the_rounds():
    device = Device(base=1.0)
    found = time_points(device.run, [64, 128], budget_s=10.0, rounds=1000, clock=device.clock)
    assert 1 <= found.rounds < 10
    assert device.asked[:4] == [64, 128, 64, 128], "one round to warm up"
    assert device.asked[4:6] == [128, 64], "then rounds in alternating order"


# --- GEM's profile: its measuring points and a known staircase ------------------------------------


def test_every_tile_is_measured_where_stairs_matter_and_few_beyond():
    counts = token_counts(64, 2048, 16384)
    assert counts[:32] == [64 * n for n in range(1, 33)]
    assert counts[-1] == 16384
    assert all(later > earlier for earlier, later in zip(counts, counts[1:], strict=False))
    assert all(count % 64 == 0 for count in counts)
    assert len(counts) <= 62, "as few as the paper takes for its largest layer"


@pytest.mark.parametrize("asked", [(0, 64, 64), (64, 64, 32), (64, 64, 1 << 20, 1.0), (1, 1, 5000)])
def test_impossible_counts_are_refused(asked):
    with pytest.raises(InvalidInput):
        token_counts(*asked)


def test_a_known_staircase_is_recovered_despite_outliers():
    device = Device()
    counts = token_counts(64, 1024, 8192)
    timing = time_points(device.run, counts, budget_s=60, rounds=15, clock=device.clock)
    curve = curve_of(TokenProfile(64, tuple(counts), timing))
    want = [device.seconds(64 * tile) for tile in range(1, 129)]
    assert len(curve.tile_seconds) == 128
    assert np.allclose(curve.tile_seconds, want, rtol=1e-6)
    assert curve.slope_s_per_token == pytest.approx(1e-4 / 64, rel=1e-6)


def test_a_curve_never_falls():
    curve = curve_of(TokenProfile(32, (32, 64, 96), Timing((2e-3, 1e-3, 3e-3), 5, 0.0)))
    assert curve.tile_seconds == (2e-3, 2e-3, 3e-3)


# --- The profile by tokens and replicas: its grid, known coefficients, and a real layer -----------


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


# --- The layer that a profile measures ------------------------------------------------------------


def test_a_layer_is_one_batched_call_per_matrix():
    calls: list[tuple[int, ...]] = []
    real = torch.bmm

    def watched(left, right):
        calls.append(tuple(left.shape))
        return real(left, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", watched)
        run = GroupedLayer(SHAPE, torch.device("cpu"))
        calls.clear()
        run(Point(8, 4))
    assert calls == [(4, 8, 256), (4, 8, 512)]


def test_a_number_type_that_torch_cannot_multiply_is_refused():
    with pytest.raises(InvalidInput, match="no layer of float8_e4m3fn on cpu"):
        GroupedLayer(replace(SHAPE, dtype="float8_e4m3fn"), torch.device("cpu"))


def test_impossible_shapes_are_refused():
    with pytest.raises(InvalidInput, match="d_ffn is 0"):
        ExpertShape(8, 0, 1)
    with pytest.raises(InvalidInput, match="no number type"):
        ExpertShape(8, 8, 1, "float3")


# --- Files of profiles: read back, kept by device, refused if damaged -----------------------------


COST = ReplicaCost(1e-5, 1e-7, 2e-6, 0.0, 0.02, 1.8e9)
PROFILE = TokenProfile(32, (32, 64), Timing((1e-3, 2e-3), 5, 0.1))
ABOUT = {"d_model": 256, "d_ffn": 512, "experts": 6, "dtype": "float32"}


def test_a_saved_profile_is_read_back(tmp_path):
    save_curve(tmp_path, "GPU-1", PROFILE, ABOUT, COST)
    saved = load_profile(tmp_path, "GPU-1")
    assert saved is not None
    assert (saved.replica_cost, saved.shape, saved.max_tokens) == (COST, SHAPE, 64)
    save_curve(tmp_path, "GPU-1", PROFILE, {"d_model": 8})
    earlier = load_profile(tmp_path, "GPU-1")
    assert earlier is not None
    assert (earlier.replica_cost, earlier.shape) == (None, None)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"tile_seconds": [0.001, 0.002]', '"tile_seconds": [0.001, NaN]', r"tile_seconds\[1\]"),
        ('"tile_seconds": [0.001, 0.002]', '"tile_seconds": []', "0 tiles"),
        ('"tile_seconds": [0.001, 0.002]', '"tile_seconds": [0.002, 0.001]', "tile_seconds fall"),
        ('"tile_seconds": [0.001, 0.002]', '"tile_seconds": 3', "no curve"),
        ('"tile_tokens": 32', '"tile_tokens": 0', "tile_tokens is 0, 1 to "),
        ('"slope_s_per_token": ', '"slope_s_per_token": -', "slope_s_per_token is -"),
        ('"s_per_token": 1e-07', '"s_per_token": 0.0', "s_per_token is 0"),
        ('"s_per_replica": 2e-06', '"s_per_replica": -1e-6', "s_per_replica is -1e-06"),
        ('"fixed_s": 1e-05', '"fixed_s": NaN', "fixed_s field"),
        ('"s_per_replica"', '"seconds"', "no curve"),
        ('"d_model": 256', '"d_model": null', "'d_model': None, 'd_ffn': 512, 'experts': 6}, not"),
        ('"experts": 6', '"experts": Infinity', "'experts': inf}, not whole numbers"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, old, new, words):
    path = save_curve(tmp_path, "GPU-1", PROFILE, ABOUT, COST)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InvalidInput, match=words):
        load_profile(tmp_path, "GPU-1")


def test_curves_are_kept_by_device(tmp_path):
    save_curve(tmp_path / "curves", "GPU-1", PROFILE, {"d_model": 8})
    saved = load_profile(tmp_path / "curves", "GPU-1")
    assert saved is not None
    assert saved.curve == curve_of(PROFILE)
    assert load_profile(tmp_path / "curves", "GPU-2") is None
    (tmp_path / "curves" / "curve-GPU-2.json").write_text(
        (tmp_path / "curves" / "curve-GPU-1.json").read_text()
    )
    with pytest.raises(InvalidInput, match="not of"):
        load_profile(tmp_path / "curves", "GPU-2")
    endless = '{"curve": {"tile_tokens": Infinity, "tile_seconds": [1], "slope_s_per_token": 0}}'
    for text in ("{", endless):
        (tmp_path / "curves" / "curve-GPU-2.json").write_text(text)
        with pytest.raises(InvalidInput, match="no curve"):
            load_profile(tmp_path / "curves", "GPU-2")
