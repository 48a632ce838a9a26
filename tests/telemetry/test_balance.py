"""The balance of the windows, kept up to date step by step."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.telemetry import windows
from evenkeel_moe.telemetry.balance import Balance
from tests.telemetry.reports import load_window

SHAPE = ModelShape(2, 4, 2, 3, 2, 1000)


PLACEMENT = Placement.initial(SHAPE)


def make_window(steps, seed=0, *, source=False) -> LoadWindow:
    rng = np.random.default_rng(seed)
    window = load_window(rng.integers(0, 50, (len(steps), 2, 4)), steps, 2)
    sums = rng.integers(0, 9, (2, 2, 4)).astype(np.uint32)
    return replace(window, source=sums) if source else window


def test_a_map_that_lost_an_expert_with_load_leaves_the_balance_unknown():
    lost = PLACEMENT.phy2log.copy()
    lost[0][lost[0] == 3] = -1
    balance = Balance(8)
    balance.update({Phase.DECODE: [make_window(range(4))]}, PLACEMENT)
    assert balance.summary() != (None, None)
    balance.update({Phase.DECODE: [make_window(range(4))]}, Placement(lost, 2, 4))
    assert balance.summary() == (None, None)
    balance.update({Phase.DECODE: [make_window(range(5))]}, PLACEMENT)
    assert balance.summary() != (None, None)


def test_balance_kept_step_by_step_equals_balance_of_the_whole_window():
    window = make_window(range(60))
    window.counts[5] = 0
    balance = Balance(40)
    for end in (7, 8, 30, 60):
        parts = [window.slice(slice(0, end // 3)), window.slice(slice(end // 3, end))]
        balance.update({Phase.DECODE: parts}, PLACEMENT)
    by_rank = metrics.rank_load(window.last(40).counts, PLACEMENT)
    mean, worst = balance.summary()
    assert mean == pytest.approx(metrics.balancedness_mean(by_rank))
    assert worst == pytest.approx(metrics.balancedness_worst(by_rank))
    shares = balance.load_shares()
    assert shares is not None
    assert np.allclose(shares, by_rank.sum(axis=(0, 1)) / by_rank.sum())


def test_a_window_of_a_large_shape_is_taken_in_several_calls(monkeypatch):
    monkeypatch.setattr(windows, "_CELLS_AT_ONCE", 7 * PLACEMENT.num_layers * PLACEMENT.num_slots)
    window, balance = make_window(range(20)), Balance(100)
    for known in (7, 14, 20, 20):
        parts = [window.slice(slice(0, 5)), window.slice(slice(5, 20))]
        balance.update({Phase.DECODE: parts}, PLACEMENT)
        expected = metrics.rank_load(window.counts[:known], PLACEMENT)
        assert balance.summary()[0] == pytest.approx(metrics.balancedness_mean(expected))


def test_balance_of_phases_is_told_apart_and_together():
    decode, prefill = make_window(range(10)), make_window(range(10, 20), seed=1)
    balance = Balance(100)
    balance.update({Phase.DECODE: [decode], Phase.PREFILL: [prefill]}, PLACEMENT)
    for phase, window in ((Phase.DECODE, decode), (Phase.PREFILL, prefill)):
        expected = metrics.balancedness_mean(metrics.rank_load(window.counts, PLACEMENT))
        assert balance.summary(phase)[0] == pytest.approx(expected)
    assert balance.summary(Phase.MIXED) == (None, None)
    both = np.concatenate([decode.counts, prefill.counts])
    expected = metrics.balancedness_mean(metrics.rank_load(both, PLACEMENT))
    assert balance.summary()[0] == pytest.approx(expected)


def test_a_new_placement_is_judged_on_the_same_steps():
    window, balance = make_window(range(20)), Balance(100)
    balance.update({Phase.DECODE: [window]}, PLACEMENT)
    other = Placement(PLACEMENT.phy2log[:, ::-1].copy(), 2, 4)
    moved = Placement(np.array([[0, 1, 2, 3, 0, 1], [3, 2, 0, 1, 0, 2]], np.int32), 2, 4)
    for placement in (other, moved):
        balance.update({Phase.DECODE: [window]}, placement)
        expected = metrics.balancedness_mean(metrics.rank_load(window.counts, placement))
        assert balance.summary()[0] == pytest.approx(expected)


@pytest.mark.parametrize("dispatch", DispatchModel)
def test_balance_splits_tokens_as_the_gates_do(dispatch):
    rng = np.random.default_rng(4)
    counts = rng.integers(0, 90, (20, 2, 4)).astype(np.uint32)
    rows = [[0, 1, 0, 2, 0, 3, 1, 2], [3, 1, 2, 3, 0, 3, 1, 2]]
    placement = Placement(np.array(rows, np.int32), 4, 4)
    window = load_window(counts, range(20), 4)
    now = [Topology((0, 0, 1, 1))]
    balance = Balance(100, lambda: SplitModel(dispatch, now[0]))
    for topology in (now[0], Topology((0, 1, 1, 1)), Topology((0, 0, 0, 0))):
        now[0] = topology  # Also a balance that knows the steps takes a new topology up.
        balance.update({Phase.DECODE: [window]}, placement)
        by_rank = metrics.rank_load(counts, placement, SplitModel(dispatch, topology))
        mean, worst = balance.summary()
        assert mean == pytest.approx(metrics.balancedness_mean(by_rank))
        assert worst == pytest.approx(metrics.balancedness_worst(by_rank))


def test_what_is_not_known_is_none_and_not_zero():
    balance = Balance(10)
    assert balance.summary() == (None, None)
    assert balance.load_shares() is None
    silent = make_window(range(3))
    silent.counts[:] = 0
    balance.update({Phase.DECODE: [silent]}, PLACEMENT)
    assert balance.summary() == (None, None)
    assert balance.load_shares() is None
    balance.clear()
    assert balance.load_shares() is None
