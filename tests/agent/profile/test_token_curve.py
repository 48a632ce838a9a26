"""GEM's profile: its measuring points and a known staircase."""

import numpy as np
import pytest

from evenkeel_moe.agent.profile.timing import Timing, time_points
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of, token_counts
from evenkeel_moe.errors import InvalidInput
from tests.agent.profile.test_timing import Device


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
