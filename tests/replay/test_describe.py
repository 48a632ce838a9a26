from pathlib import Path

import numpy as np
import pytest

from evenkeel_moe.formats import Trace, read_trace
from evenkeel_moe.replay.describe import describe

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def _steady(steps=200, experts=16):
    counts = np.full((steps, 1, experts), 10, np.int64)
    return counts + np.random.default_rng(0).integers(0, 3, counts.shape)


def _describe(counts, **more):
    return describe(Trace(counts, tuple(range(counts.shape[1]))), **more)


def test_layers_are_high_skew_above_ten_times_the_mean():
    counts = np.ones((5, 2, 20), np.int64)
    counts[:, 0, 3] = 20 * 19
    layers = _describe(counts).layers
    assert layers[0].skew == pytest.approx(380 * 20 / 399)
    assert [layer.skew_class for layer in layers] == ["high", "low"]
    assert layers[1].skew == 1.0


def test_consistent_and_temporal_experts_are_told_apart_by_how_often_they_are_hot():
    counts = _steady()
    counts[:, 0, 2] = 30
    counts[::20, 0, [5, 9]] = 60
    counts[::2, 0, 7] = 30
    layer = _describe(counts).layers[0]
    assert layer.consistent == (2,)
    assert layer.temporal == (5, 9)


def test_temporal_experts_show_in_steps_but_not_in_the_mean():
    counts = _steady()
    counts[::20, 0, 5] = 100
    layer = _describe(counts).layers[0]
    assert layer.skew < 1.5
    assert _describe(counts).temporal_load == pytest.approx(100 * 16 / (100 + 15 * 11), rel=0.05)


def test_pairs_are_selected_on_the_first_half_and_scored_on_the_second():
    counts = _steady(experts=64)
    rng = np.random.default_rng(3)
    busy = np.nonzero(rng.random(200) < 0.2)[0]
    counts[busy[:, None], 0, [4, 11]] += 40
    lost = busy[busy < 100]
    counts[lost[:, None], 0, [1, 2]] += 40
    described = _describe(counts)
    by_experts = {pair.experts: pair for pair in described.pairs}
    assert described.pairs[0].experts == (4, 11)
    assert by_experts[4, 11].r_second_half > 0.9
    assert by_experts[1, 2].r_first_half > 0.9
    assert by_experts[1, 2].r_second_half < 0.3


def test_drift_shows_where_traffic_changed():
    counts = _steady()
    counts[100:, 0] = np.roll(np.arange(16) * 4, 3)
    drift = _describe(counts, window_steps=50).drift
    assert drift.window_steps == 50
    assert drift.by_window[1] == max(drift.by_window) > 0.2
    assert drift.by_window[0] < 0.03
    still = _describe(_steady(), window_steps=50).drift
    assert still.between_windows < 3 * still.within_windows
    assert abs(still.autocorrelation[10]) < 0.1 < drift.autocorrelation[10]


def test_short_and_empty_traces_have_no_value_rather_than_a_wrong_one():
    counts = np.zeros((2, 1, 3), np.int64)
    described = _describe(counts, num_ranks=2)
    assert described.layers[0].skew != described.layers[0].skew
    assert described.layers[0].skew_class == "none"
    assert described.pairs == ()
    assert list(described.drift.autocorrelation) == [1, 10, 50]
    assert np.isnan(list(described.drift.autocorrelation.values())).all()


def test_idle_steps_change_no_share_and_no_skew():
    counts = np.repeat(_steady(), 2, axis=1)
    counts[:, 0, 3] = 40
    described = _describe(counts, num_ranks=4)
    idle = np.zeros((400, *counts.shape[1:]), np.int64)
    idle[::2] = counts
    again = _describe(idle, num_ranks=4)
    for name in ("layers", "pairs", "drift"):
        assert getattr(again, name) == getattr(described, name)
    assert 2 * again.tokens_per_step == described.tokens_per_step
    # A layer that is idle in some steps has its own mean.
    counts[::2, 1] = 0
    part = _describe(counts).layers[1]
    assert part.skew_step == pytest.approx(described.layers[1].skew_step, rel=0.02)
    assert np.isnan(_describe(_steady()).temporal_load)


@pytest.mark.traces
@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
@pytest.mark.parametrize(
    ("name", "skew_step", "balance", "autocorrelation", "temporal", "pair_r"),
    [
        ("A_decode_abrupt", 2.80, 0.775, {1: 0.59, 10: 0.55, 50: 0.35}, 0.8, 0.57),
        ("A_decode_py", 4.22, 0.681, {1: 0.09, 10: 0.01, 50: -0.03}, 0.0, 0.27),
        ("dsv2lite_prefill_phased", 4.02, 0.702, {1: 0.72, 10: 0.28}, 1.9, 0.21),
    ],
)
def test_the_published_numbers_of_the_traces_are_reproduced(
    name, skew_step, balance, autocorrelation, temporal, pair_r
):
    described = describe(read_trace(TRACES / f"{name}.npz"), num_ranks=8)
    assert np.mean([layer.skew_step for layer in described.layers]) == pytest.approx(
        skew_step, abs=0.006
    )
    assert np.mean([layer.balancedness for layer in described.layers]) == pytest.approx(
        balance, abs=0.0006
    )
    for lag, value in autocorrelation.items():
        assert described.drift.autocorrelation[lag] == pytest.approx(value, abs=0.011)
    assert 100 * described.temporal_share == pytest.approx(temporal, abs=0.1)
    assert described.pair_r == pytest.approx(pair_r, abs=0.006)
