"""The window in memory keeps the newest steps; windows handed out never change."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import Phase
from evenkeel_moe.telemetry.windows import StepRing, in_chunks, join_windows, newest_parts
from tests.telemetry.reports import SHAPE, Fleet, make_assembler, windows_of


def make_window(steps, fleet=None):
    run = (fleet or Fleet()).run(steps)
    assembler = make_assembler()
    return windows_of([assembler.take(run.report(rank)) for rank in range(3)])[Phase.DECODE]


LONG = make_window(range(24))


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
def test_parts_are_the_window_whatever_length_steps_come_in(length):
    ring, window = StepRing(SHAPE, 10), make_window(range(140))
    for first in range(0, 140 - length, length):
        ring.append(window.slice(slice(first, first + length)))
        end = first + length
        kept = slice(max(0, end - 10), end)
        parts = ring.parts()
        newest = ring.window(3)
        assert newest is not None and newest.steps.tolist() == list(range(kept.start, end))[-3:]
        for held in (join_windows(parts), ring.window()):
            assert held is not None and held.steps.tolist() == list(range(kept.start, end))
            for name in ("counts", "tokens", "epochs", "compute_s"):
                assert np.array_equal(getattr(held, name), getattr(window, name)[kept])
        assert len(ring) == sum(map(len, parts)) == min(10, end)


@given(st.lists(st.integers(0, 9), max_size=12).filter(any), st.integers(1, 12))
def test_chunks_are_full_but_the_last_and_hold_every_step_once(lengths, most):
    window = make_window(range(sum(lengths)))
    ends = np.cumsum([0, *lengths])
    parts = [window.slice(slice(*cut)) for cut in itertools.pairwise(ends)]
    chunks = list(in_chunks(parts, most))
    steps = [step for chunk in chunks for part in chunk for step in part.steps]
    assert steps == window.steps.tolist()
    assert all(len(part) for chunk in chunks for part in chunk)
    full = [sum(map(len, chunk)) for chunk in chunks]
    assert full == [most] * (len(window) // most) + [len(window) % most][: len(window) % most]


def test_parts_are_few_and_long_ones_are_not_copied():
    ring, window = StepRing(SHAPE, 128), make_window(range(200))
    most = 0
    for step in range(136):
        ring.append(window.slice(slice(step, step + 1)))
        most = max(most, len(ring.parts()))
    assert most <= 128 // 16 + 4
    for first in (136, 152):
        ring.append(window.slice(slice(first, first + 16)))
    assert [part.counts.base is window.counts for part in ring.parts()][-2:] == [True, True]


def test_a_part_keeps_no_sums_of_the_window_it_came_from():
    ring = StepRing(SHAPE, 10)
    ring.append(replace(LONG, source=np.ones((3, 2, 4), np.uint32)))
    window = ring.window()
    assert window is not None and window.source is None
    assert [part.source for part in ring.parts()] == [None]


def test_of_a_window_at_another_width_nothing_is_known_of_its_ranks():
    wide = replace(LONG, source=np.ones((3, 2, 4), np.uint32)).at_width(5)
    assert wide.tokens.shape == wide.compute_s.shape == (24, 5) and wide.source is None
    assert (wide.tokens == -1).all() and np.isnan(wide.compute_s).all()


def test_parts_after_a_step_begin_there():
    ring, window = StepRing(SHAPE, 40), make_window(range(40))
    assert ring.parts() == []
    ring.append(window.slice(slice(0, 20)))
    ring.append(window.slice(slice(20, 40)))
    assert [part.steps.tolist() for part in ring.parts(16)] == [[17, 18, 19], list(range(20, 40))]
    assert [part.steps.tolist() for part in ring.parts(19)] == [list(range(20, 40))]
    assert ring.parts(39) == []


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(-1, 25), st.none() | st.integers(0, 25))
def test_the_newest_parts_are_the_newest_steps(lengths, after, most):
    parts, first = [], 0
    for length in lengths:
        parts.append(LONG.slice(slice(first, first + length)))
        first += length
    chosen = [step for step in range(first) if step > after]
    if most is not None:
        chosen = chosen[len(chosen) - min(most, len(chosen)) :]
    found = newest_parts(parts, after, most)
    assert [step for part in found for step in part.steps.tolist()] == chosen
    assert all(len(part) for part in found)
    whole = [part for part in parts if len(part) and {*part.steps.tolist()} <= {*chosen}]
    assert all(any(part is one for one in found) for part in whole), "not made again"


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
