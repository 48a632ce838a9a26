"""The ring between the engine's steps and the reports."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.agent.recorder import Recorder
from evenkeel.model.load import Phase, StepMeta


def put(recorder, step, value=None, **meta):
    counts = np.full((2, 3), step if value is None else value, np.int64)
    recorder.record(step, counts, **{"epoch": 0, "tokens": step, "phase": Phase.DECODE, **meta})


def test_what_was_recorded_is_taken_in_order_with_its_words():
    recorder = Recorder(8, 2, 3)
    put(recorder, 4, epoch=2, phase=Phase.PREFILL, dummy=True, compute_s=0.5)
    put(recorder, 5)
    assert recorder.last_step == 5 and recorder.waiting == 2
    taken = recorder.take(10)
    assert taken.steps == (
        StepMeta(4, 2, Phase.PREFILL, 4, True, 0.5),
        StepMeta(5, 0, Phase.DECODE, 5, False, None),
    )
    assert taken.counts.shape == (2, 2, 3) and (taken.counts[:, 0, 0] == [4, 5]).all()
    assert taken.dropped_steps == 0 and recorder.take(10) is None


def test_the_recorder_keeps_its_own_copy_of_the_counts():
    recorder, counts = Recorder(4, 2, 3), np.ones((2, 3), np.int64)
    recorder.record(0, counts, epoch=0, tokens=1, phase=Phase.DECODE)
    counts[:] = 7
    assert (recorder.take(1).counts == 1).all()


def test_a_full_ring_drops_the_oldest_and_counts_them():
    recorder = Recorder(4, 2, 3)
    for step in range(10):
        put(recorder, step)
    taken = recorder.take(100)
    # One row is left out beside the writer, who may be filling it.
    assert [meta.step for meta in taken.steps] == [7, 8, 9]
    assert taken.dropped_steps == 7 == recorder.dropped_total


def test_a_stride_passes_over_steps_from_where_it_begins():
    recorder = Recorder(32, 2, 3)
    for step in range(12):
        put(recorder, step)
    taken = recorder.take(100, stride=4, from_step=3)
    assert [meta.step for meta in taken.steps] == [0, 1, 2, 4, 8]
    assert taken.dropped_steps == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(2, 8), st.integers(1, 9))
def test_every_step_is_taken_once_or_counted_as_dropped(bursts, capacity, most):
    recorder = Recorder(capacity, 1, 1)
    step, seen, dropped = 0, [], 0
    for burst in bursts:
        for _ in range(burst):
            recorder.record(step, np.array([[step]]), epoch=0, tokens=0, phase=Phase.MIXED)
            step += 1
        taken = recorder.take(most)
        if taken is not None:
            seen += [meta.step for meta in taken.steps]
            assert [meta.step for meta in taken.steps] == taken.counts[:, 0, 0].tolist()
            dropped += taken.dropped_steps
    while (taken := recorder.take(most)) is not None:
        seen += [meta.step for meta in taken.steps]
        dropped += taken.dropped_steps
    assert len(seen) + dropped == step
    assert seen == sorted(set(seen))


class Overtaken(Recorder):
    """The writer comes round once while the reader copies: before it looked, or after."""

    before = after = 0

    def _copy(self, rows):
        for _ in range(self.before):
            put(self, self.last_step + 1)
        copied = super()._copy(rows)
        for _ in range(self.after):
            put(self, self.last_step + 1)
        self.before = self.after = 0
        return copied


@pytest.mark.parametrize("before, after", [(6, 0), (0, 6), (3, 3)])
def test_rows_the_writer_came_round_to_are_thrown_away_and_counted(before, after):
    recorder = Overtaken(8, 2, 3)
    for step in range(7):
        put(recorder, step)
    recorder.before, recorder.after = before, after
    taken = recorder.take(7)
    # Six more steps fill rows 7 and 0..4, and the writer may be at row 5: only step 6 is surely whole.
    assert [meta.step for meta in taken.steps] == [6] and taken.dropped_steps == 6
    assert (taken.counts == 6).all()
    assert [meta.step for meta in recorder.take(9).steps] == list(range(7, 13))


def test_a_reader_never_sees_a_row_the_writer_came_round_to():
    """Counts and words of a step belong together, however the two threads meet."""
    recorder, steps = Recorder(8, 4, 64), 20_000
    torn, seen, done = [], 0, threading.Event()

    def write():
        for step in range(steps):
            recorder.record(step, np.full((4, 64), step), epoch=step, tokens=step, phase=Phase.DECODE)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    dropped = 0
    while not done.is_set() or recorder.waiting:
        taken = recorder.take(5)
        if taken is None:
            continue
        dropped += taken.dropped_steps
        seen += len(taken.steps)
        torn += [
            meta.step
            for meta, counts in zip(taken.steps, taken.counts, strict=True)
            if not (counts == meta.step).all() or meta.epoch != meta.step
        ]
    writer.join()
    assert not torn
    assert seen + dropped == steps


def test_numbers_of_numpy_are_made_plain():
    """Engines count with arrays; a message takes plain numbers."""
    recorder = Recorder(4, 2, 3)
    put(
        recorder,
        np.int64(3),
        tokens=np.int32(7),
        epoch=np.int64(1),
        dummy=np.bool_(True),
        compute_s=np.float32(0.5),
    )
    (meta,) = recorder.take(1).steps
    assert meta == StepMeta(3, 1, Phase.DECODE, 7, True, 0.5)
    assert [type(value) for value in (meta.step, meta.tokens, meta.dummy, meta.compute_s)] == [
        int,
        int,
        bool,
        float,
    ]
