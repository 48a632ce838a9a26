"""Files of profiles: read back, kept by device, refused if damaged."""

import pytest

from evenkeel_moe.agent.profile.expert_layer import ExpertShape
from evenkeel_moe.agent.profile.files import load_profile, save_curve
from evenkeel_moe.agent.profile.timing import Timing
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import ReplicaCost

COST = ReplicaCost(1e-5, 1e-7, 2e-6, 0.0, 0.02, 1.8e9)
PROFILE = TokenProfile(32, (32, 64), Timing((1e-3, 2e-3), 5, 0.1))
SHAPE = ExpertShape(256, 512, 6, "float32")
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
        ('"tile_tokens": 32', '"tile_tokens": 0', "2 tiles of 0 tokens"),
        ('"slope_s_per_token": ', '"slope_s_per_token": -', "slope_s_per_token is -"),
        ('"s_per_token": 1e-07', '"s_per_token": 0.0', "s_per_token is 0"),
        ('"s_per_replica": 2e-06', '"s_per_replica": -1e-6', "s_per_replica is -1e-06"),
        ('"fixed_s": 1e-05', '"fixed_s": NaN', "fixed_s field"),
        ('"s_per_replica"', '"seconds"', "no curve"),
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
