"""GEM's profile: its measuring points, a known staircase, and its time budget."""

import numpy as np
import pytest
import torch

from evenkeel_moe.agent import profiler
from evenkeel_moe.agent.profiler import (
    ExpertShape,
    Profile,
    curve_of,
    load_profile,
    measure,
    save_curve,
    token_counts,
)
from evenkeel_moe.errors import InvalidInput


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
    found = measure(device.run, counts, 64, budget_s=60, rounds=15, clock=device.clock)
    curve = curve_of(found)
    want = [device.seconds(64 * tile) for tile in range(1, 129)]
    assert len(curve.tile_seconds) == 128
    assert np.allclose(curve.tile_seconds, want, rtol=1e-6)
    assert curve.slope_s_per_token == pytest.approx(1e-4 / 64, rel=1e-6)


def test_the_budget_ends_the_rounds():
    device = Device(base=1.0)
    found = measure(device.run, [64, 128], 64, budget_s=10.0, rounds=1000, clock=device.clock)
    assert 1 <= found.rounds < 10
    assert device.asked[:4] == [64, 128, 64, 128], "one round to warm up"
    assert device.asked[4:6] == [128, 64], "then rounds in alternating order"


def test_a_curve_never_falls():
    curve = curve_of(Profile(32, (32, 64, 96), (2e-3, 1e-3, 3e-3), 5, 0.0))
    assert curve.tile_seconds == (2e-3, 2e-3, 3e-3)


def test_curves_are_kept_by_device(tmp_path):
    profile = Profile(32, (32, 64), (1e-3, 2e-3), 5, 0.1)
    save_curve(tmp_path / "curves", "GPU-1", profile, {"d_model": 8})
    saved = load_profile(tmp_path / "curves", "GPU-1")
    assert saved is not None
    assert saved.curve == curve_of(profile)
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


def test_a_real_layer_is_measured_on_this_machine():
    run = profiler.moe_layer(ExpertShape(32, 16, 4, "float32"), torch.device("cpu"))
    found = measure(run, token_counts(8, 32, 64), 8, budget_s=5, rounds=3)
    assert found.rounds == 3
    assert all(seconds > 0 for seconds in found.seconds)


def test_impossible_shapes_are_refused():
    with pytest.raises(InvalidInput, match="d_ffn is 0"):
        ExpertShape(8, 0, 1)
    with pytest.raises(InvalidInput, match="no number type"):
        ExpertShape(8, 8, 1, "float3")
