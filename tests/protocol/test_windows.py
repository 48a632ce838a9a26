"""The window in memory keeps the newest steps, and what it handed out."""

import numpy as np
import pytest

from evenkeel.errors import InvalidInput
from evenkeel.model.ids import EpRank
from evenkeel.model.load import Phase
from evenkeel.protocol.windows import StepRing
from tests.protocol.telemetry import SHAPE, Fleet, make_assembler, windows_of


def make_window(steps, fleet=None):
    run = (fleet or Fleet()).run(steps)
    assembler = make_assembler()
    return windows_of([assembler.take(run.report(rank)) for rank in range(3)])[Phase.DECODE]


def test_ring_keeps_the_newest_steps():
    ring, window = StepRing(SHAPE, 10), make_window(range(25))
    assert ring.window() is None
    assert ring.newest_step is None
    for first in range(0, 25, 4):
        ring.append(window.slice(slice(first, first + 4)))
    held = ring.window()
    assert held is not None
    assert len(ring) == 10
    assert held.steps.tolist() == list(range(15, 25))
    assert np.array_equal(held.counts, window.counts[15:])


def test_a_window_handed_out_never_changes():
    ring, window = StepRing(SHAPE, 10), make_window(range(100))
    handed_out = []
    for first in range(0, 100, 3):
        ring.append(window.slice(slice(first, first + 3)))
        held = ring.window()
        assert held is not None
        handed_out.append((held, held.counts.copy(), held.steps.tolist()))
    for held, counts, steps in handed_out:
        assert np.array_equal(held.counts, counts)
        assert held.steps.tolist() == steps


@pytest.mark.parametrize("length", (1, 3, 10, 17))
def test_steps_move_within_one_buffer_while_nobody_holds_a_window(length):
    ring, window = StepRing(SHAPE, 10), make_window(range(140))
    buffers = []
    for first in range(0, 140 - length, length):
        ring.append(window.slice(slice(first, first + length)))
        held = ring.peek()
        assert held is not None
        end = first + length
        assert held.steps.tolist() == list(range(max(0, end - 10), end))
        assert np.array_equal(held.counts, window.counts[max(0, end - 10) : end])
        assert np.array_equal(held.tokens, window.tokens[max(0, end - 10) : end])
        buffers.append(held.counts.base)
    assert all(buffer is buffers[0] for buffer in buffers)


def test_a_window_looked_at_is_moved_over_and_one_handed_out_is_not():
    ring, window = StepRing(SHAPE, 10), make_window(range(51))
    ring.append(window.slice(slice(0, 10)))
    ring.append(window.slice(slice(10, 20)))
    looked_at = ring.peek()
    ring.append(window.slice(slice(20, 30)))
    assert looked_at is not None and looked_at.steps.base is ring.peek().steps.base
    handed_out = ring.window()
    assert handed_out is not None
    for first in (30, 40):
        ring.append(window.slice(slice(first, first + 10)))
    assert handed_out.steps.tolist() == list(range(20, 30))
    assert handed_out.steps.base is not ring.peek().steps.base


def test_steps_newer_than_one_are_a_copy_and_cost_no_sums(monkeypatch):
    ring, window = StepRing(SHAPE, 10), make_window(range(40))
    assert ring.newer_than(-1) is None
    ring.append(window.slice(slice(0, 20)))
    ring.add_source(EpRank(1), np.ones((SHAPE.num_layers, SHAPE.num_logical_experts), np.int64))
    monkeypatch.setattr(ring, "_source_sums", None)
    newer = ring.newer_than(16)
    assert newer is not None and newer.steps.tolist() == [17, 18, 19]
    assert ring.newer_than(3).steps.tolist() == list(range(10, 20))
    assert ring.newer_than(19) is None
    ring.append(window.slice(slice(20, 40)))
    assert np.array_equal(newer.counts, window.counts[17:20])


def test_ring_takes_a_burst_longer_than_itself():
    ring, window = StepRing(SHAPE, 4), make_window(range(11))
    assert ring.append(window).steps.tolist() == [7, 8, 9, 10]
    assert len(ring) == 4


def test_ring_takes_no_step_twice():
    ring, window = StepRing(SHAPE, 10), make_window(range(8))
    ring.append(window.slice(slice(0, 6)))
    assert ring.append(window.slice(slice(4, 8))).steps.tolist() == [6, 7]
    assert len(ring.append(window)) == 0
    assert ring.newest_step == 7
    assert len(ring) == 8
    with pytest.raises(InvalidInput, match="capacity is 0"):
        StepRing(SHAPE, 0)


def test_ring_source_sums_forget_the_oldest_steps():
    ring, window = StepRing(SHAPE, 8), make_window(range(64))
    one = np.ones((SHAPE.num_layers, SHAPE.num_logical_experts), np.int64)
    for step in range(64):
        ring.append(window.slice(slice(step, step + 1)))
        ring.add_source(EpRank(1), one)
    held = ring.window()
    assert held is not None and held.source is not None
    assert held.source.dtype == np.uint32
    assert 6 <= held.source[1].max() == held.source[1].min() <= 8
    assert held.source[0].max() == 0
