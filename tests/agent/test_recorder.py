"""The queue between the engine's steps and the reports."""

import asyncio
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.agent import DeviceRecorder
from evenkeel_moe.agent.recorder import Recorded, Recorder
from evenkeel_moe.agent.reporter import Reporter
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.wire.link import FlowControl
from tests.agent.fleet import Fleet
from tests.agent.ranks import identity_of, two_rank_placements
from tests.waiting import deadline


def put(recorder, step, value=None, **meta):
    counts = np.full((2, 3), step if value is None else value, np.int64)
    recorder.record(step, counts, **{"epoch": 0, "tokens": step, "phase": Phase.DECODE, **meta})


def take(recorder, *arguments, **named) -> Recorded:
    taken = recorder.take(*arguments, **named)
    assert taken is not None
    return taken


def test_what_was_recorded_is_taken_in_order_with_its_metadata():
    recorder = Recorder(8, 2, 3)
    put(recorder, 4, epoch=2, phase=Phase.PREFILL, dummy=True, compute_s=0.5)
    put(recorder, 5)
    assert recorder.last_step == 5 and recorder.waiting == 2
    taken = take(recorder, 10)
    assert (
        step_table(
            [
                StepMeta(4, 2, Phase.PREFILL, 4, True, 0.5),
                StepMeta(5, 0, Phase.DECODE, 5, False, None),
            ]
        ).tobytes()
        == taken.steps.tobytes()
    )
    assert taken.counts.shape == (2, 2, 3) and (taken.counts[:, 0, 0] == [4, 5]).all()
    assert taken.dropped_steps == 0 and recorder.take(10) is None


def test_the_recorder_keeps_the_array_and_refuses_later_writes():
    """An array that the engine wrote to again would silently be counted twice."""
    recorder, counts = Recorder(4, 2, 3), np.ones((2, 3), np.int64)
    recorder.record(0, counts, epoch=0, tokens=1, phase=Phase.DECODE)
    assert (take(recorder, 1).counts == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        counts[:] = 7


def test_a_refusal_is_logged_with_its_shape_and_rarely():
    """Assignment would broadcast a row to every layer; an error must not end the engine."""
    recorder = Recorder(16, 2, 3)
    for step, shape in enumerate([(3, 2), (3,), (2, 3, 1), (2, 0)], 1):
        recorder.record(step, np.zeros(shape, np.int64), epoch=0, tokens=1, phase=Phase.DECODE)
    with structlog.testing.capture_logs() as logs:
        assert take(recorder, 16).dropped_steps == 4
    assert [(log["step"], log["shape"], log["wanted"]) for log in logs] == [
        (1, (3, 2), (2, 3)),
        (2, (3,), (2, 3)),
        (4, (2, 0), (2, 3)),
    ]


def test_counts_of_any_integer_type_are_taken_as_int64():
    recorder = Recorder(4, 1, 2)
    for step, kind in enumerate((np.int32, np.uint16, np.int64)):
        recorder.record(step, np.array([[step, 7]], kind), epoch=0, tokens=1, phase=Phase.DECODE)
    taken = take(recorder, 3)
    assert taken.counts.dtype == np.int64 and taken.counts[:, 0].tolist() == [
        [0, 7],
        [1, 7],
        [2, 7],
    ]


def test_a_full_ring_drops_the_oldest_and_counts_them():
    recorder = Recorder(4, 2, 3)
    for step in range(10):
        put(recorder, step)
    taken = take(recorder, 100)
    assert taken.steps["step"].tolist() == [6, 7, 8, 9]
    assert taken.dropped_steps == 6 == recorder.dropped_total and recorder.last_step == 9
    assert recorder.waiting == 0 and recorder.take(1) is None


def test_a_stride_skips_steps_from_where_it_begins():
    recorder = Recorder(32, 2, 3)
    for step in range(12):
        put(recorder, step)
    taken = take(recorder, 100, stride=4, from_step=3)
    assert taken.steps["step"].tolist() == [0, 1, 2, 4, 8]
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
            seen += taken.steps["step"].tolist()
            assert taken.steps["step"].tolist() == taken.counts[:, 0, 0].tolist()
            dropped += taken.dropped_steps
    while (taken := recorder.take(most)) is not None:
        seen += taken.steps["step"].tolist()
        dropped += taken.dropped_steps
    assert len(seen) + dropped == step
    assert seen == sorted(set(seen))


def test_a_reader_beside_the_writer_takes_each_step_once_or_counts_it():
    """Counts and metadata of a step stay together, however the two threads interleave."""
    recorder, steps = Recorder(8, 4, 64), 20_000
    torn, seen, done = [], 0, threading.Event()

    def write():
        for step in range(steps):
            recorder.record(
                step, np.full((4, 64), step), epoch=step, tokens=step, phase=Phase.DECODE
            )
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
            meta["step"]
            for meta, counts in zip(taken.steps, taken.counts, strict=True)
            if not (counts == meta["step"]).all() or meta["epoch"] != meta["step"]
        ]
    writer.join()
    assert not torn
    assert seen + dropped == steps


class Raced(list):
    """Rows that the other thread takes as soon as somebody has read their number."""

    then: Callable[[], None] | None = None

    def __len__(self):
        count, then, self.then = super().__len__(), self.then, None
        if then is not None:
            then()
        return count


def test_the_writer_tolerates_a_reader_that_took_everything():
    recorder = Recorder(2, 2, 3)
    taken: list[Recorded] = []
    recorder._rows = Raced()
    for step in range(2):
        put(recorder, step)
    recorder._rows.then = lambda: taken.append(take(recorder, 9))
    put(recorder, 2)
    assert taken[0].steps["step"].tolist() == [0, 1, 2]
    assert recorder.dropped_total == 0 and recorder.last_step == 2 and recorder.take(9) is None


def test_numbers_of_numpy_are_converted():
    """Engines count with arrays; a message holds plain numbers."""
    recorder = Recorder(4, 2, 3)
    put(
        recorder,
        np.int64(3),
        tokens=np.int32(7),
        epoch=np.int64(1),
        dummy=np.bool_(True),
        compute_s=np.float32(0.5),
    )
    steps = take(recorder, 1).steps
    assert steps.tobytes() == step_table([StepMeta(3, 1, Phase.DECODE, 7, True, 0.5)]).tobytes()


@pytest.mark.parametrize(
    "numbers",
    [
        {"tokens": math.nan},
        {"tokens": math.inf},
        {"tokens": None},
        {"tokens": 1 << 31},
        {"tokens": -1},
        {"epoch": math.nan},
        {"epoch": 1 << 62},
        {"epoch": -(1 << 70)},
        {"step": 1 << 62},
        {"step": math.nan},
        {"step": -math.inf},
        {"step": torch.zeros(2)},
        {"compute_s": math.inf},
        {"compute_s": -0.5},
        {"phase": "lunch"},
        {"counts": torch.zeros((2, 3), dtype=torch.int64)},
        {"counts": [[0, 0, 0], [0, 0, 0]]},
    ],
    ids=repr,
)
@pytest.mark.parametrize("stride", [1, 2])
def test_an_invalid_step_is_refused_counted_and_logged_and_the_next_is_taken(numbers, stride):
    """A step consists of numbers and an array; anything else must not end the reporter."""
    assert_refused(numbers, stride)


@pytest.mark.fault(
    "an engine that recorded counts that are no numbers",
    "all steps taken with them were lost, or the controller refused their report",
)
@pytest.mark.parametrize(
    "counts",
    [
        np.full((2, 3), "1 token"),
        np.full((2, 3), b"\xff"),
        np.full((2, 3), None),
        np.zeros((2, 3), "M8[s]"),
        np.zeros((2, 3), [("count", "i8")]),
        np.zeros((2, 3), complex),
        np.full((2, 3), math.nan),
        np.full((2, 3), -1),
        np.full((2, 3), 1 << 31),
    ],
    ids=lambda counts: f"{counts.dtype} {counts.flat[0]!r}",
)
def test_counts_that_no_report_can_carry_cost_their_step_alone(counts):
    assert_refused({"counts": counts}, 1)


def assert_refused(numbers, stride):
    """Assert that a step with these values is left out, counted and logged, and no other step."""
    recorder = Recorder(16, 2, 3)
    put(recorder, 2)
    recorder.record(
        **{
            "step": 3,
            "counts": np.zeros((2, 3), np.int64),
            "epoch": 0,
            "tokens": 1,
            "phase": Phase.DECODE,
            **numbers,
        }
    )
    step = numbers.get("step", 3)
    assert recorder.last_step in (-1, step), "read on the engine's thread, at each swap"
    put(recorder, 4)
    with structlog.testing.capture_logs() as logs:
        taken = take(recorder, 16, stride)
    assert taken.steps["step"].tolist() == [2, 4]
    assert taken.dropped_steps == 1 == recorder.dropped_total
    [log] = logs
    assert log["event"] == "step_refused"
    json.dumps(log, allow_nan=False)


def test_seconds_that_are_not_measured_may_be_nan():
    recorder = Recorder(4, 2, 3)
    put(recorder, 0, compute_s=math.nan)
    assert math.isnan(take(recorder, 1).steps["compute_s"][0])


# --- Counts that an engine leaves on its device arrive as `Agent.record` would take them ----------


def recorder_of(width, capacity=16):
    kept = Recorder(capacity, 1, width)

    def record(step, counts, *, epoch, tokens, phase, dummy=False, compute_s=None):
        kept.record(step, counts, epoch, tokens, phase, dummy, compute_s)

    return kept, DeviceRecorder(record, 3)


def test_a_step_arrives_with_all_that_was_said_of_it():
    kept, device = recorder_of(4)
    counts = torch.tensor([[0, 5, 1, 2, 4]])[:, 1:]
    device.record(7, counts, epoch=2, tokens=12, phase=Phase.DECODE, compute_s=0.25)
    counts.zero_()  # The engine fills its counters again at once.
    device.record(8, counts, epoch=2, tokens=0, phase=Phase.PREFILL, dummy=True)
    device.finish()
    taken = kept.take(10)
    assert taken is not None and taken.counts.tolist() == [[[5, 1, 2, 4]], [[0, 0, 0, 0]]]
    first, second = taken.steps
    assert (first["step"], first["epoch"], first["tokens"], first["compute_s"]) == (7, 2, 12, 0.25)
    assert (second["step"], bool(second["dummy"])) == (8, True)


def test_counts_by_slot_are_summed_by_expert_with_the_map_of_their_step():
    kept, device = recorder_of(3)
    by_slot = torch.tensor([[5, 1, 2, 4]])
    for step, phy2log in enumerate(([[0, 1, 2, 0]], [[2, 1, -1, 0]])):
        device.record(
            step, by_slot, epoch=step, tokens=12, phase=Phase.DECODE, phy2log=torch.tensor(phy2log)
        )
    taken = kept.take(10)
    assert taken is not None and taken.counts.tolist() == [[[9, 1, 2]], [[4, 1, 5]]]


def test_a_step_that_cannot_be_counted_is_logged_and_ends_nothing():
    kept, device = recorder_of(3)
    with structlog.testing.capture_logs() as said:
        for step in range(4):
            wrong = torch.zeros((2, 5), dtype=torch.int64)
            device.record(
                step, torch.ones(1, 4), epoch=0, tokens=1, phase=Phase.DECODE, phy2log=wrong
            )
    assert [line["event"] for line in said] == ["counting_failed"] * 3
    assert kept.waiting == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_copies_from_a_device_arrive_in_order_while_the_device_is_busy():
    """More steps than copies may be pending: the oldest is waited for, and none is lost."""
    kept, device = recorder_of(3, capacity=64)
    matrix = torch.randn(4096, 4096, device="cuda")
    counts = torch.zeros((1, 3), dtype=torch.int64, device="cuda")
    for step in range(40):
        matrix @ matrix
        counts.fill_(step)
        device.record(step, counts, epoch=0, tokens=1, phase=Phase.DECODE)
    device.finish()
    taken = kept.take(64)
    assert taken is not None
    assert taken.counts[:, 0, 0].tolist() == taken.steps["step"].tolist() == list(range(40))


# --- Reports are kept until acknowledged, sent again after a reconnect, and never pile up ---------


FLOW = FlowControl(report_interval_s=60.0, max_steps_per_report=2)


class ListLink:
    def __init__(self):
        self.sent = []
        self.rang = asyncio.Event()

    async def run(self, listener):
        raise NotImplementedError

    def send(self, message, stream=None):
        self.sent.append(message)
        self.rang.set()

    async def finish(self, message):
        self.send(message)

    def steps(self):
        return [report.steps["step"].tolist() for report in self.sent]


def make(capacity=64, layers=1, width=1):
    recorder, link = Recorder(capacity, layers, width), ListLink()
    return recorder, link, Reporter(recorder, identity_of(1), CountingSide.DESTINATION, link)


def record(recorder, *steps):
    for step in steps:
        recorder.record(step, np.array([[step]]), epoch=0, tokens=1, phase=Phase.DECODE)


def test_nothing_is_sent_before_a_stream_is_open():
    recorder, link, reporter = make()
    record(recorder, 0, 1, 2)
    reporter.report()
    assert link.sent == [] and recorder.waiting == 3
    reporter.registered(FLOW, None)
    reporter.report()
    assert link.steps() == [[0, 1], [2]]
    assert isinstance(link.sent[0], LoadReport) and link.sent[0].rank == 1


def test_steps_that_a_long_stride_leaves_out_do_not_stay_in_the_recorder():
    recorder, link, reporter = make()
    record(recorder, *range(1, 9))
    reporter.registered(replace(FLOW, stride=8), None)
    reporter.report()
    assert link.steps() == [[8]] and recorder.waiting == 0


@pytest.mark.parametrize(
    ("acknowledged", "known", "again"),
    [
        (None, None, [[0, 1], [2, 3]]),
        (0, None, [[0, 1], [2, 3]]),
        (1, None, [[2, 3]]),
        (None, 3, []),
    ],
    ids=["nothing", "not its last step", "a whole report", "told at the registration"],
)
def test_reports_are_sent_again_until_their_last_step_is_acknowledged(acknowledged, known, again):
    recorder, link, reporter = make()
    reporter.registered(FLOW, None)
    record(recorder, 0, 1, 2, 3)
    reporter.report()
    reporter.acknowledged(acknowledged)
    reporter.lost()
    record(recorder, 4)
    reporter.report()
    assert link.steps() == [[0, 1], [2, 3]]
    link.sent.clear()
    reporter.registered(FLOW, known)
    reporter.report()
    assert link.steps() == [*again, [4]]


def test_a_slow_controller_leaves_steps_in_the_ring_where_the_oldest_fall_out():
    recorder, link, reporter = make(capacity=16)
    reporter.registered(FLOW, None)
    for step in range(100):
        record(recorder, step)
        reporter.report()
    sent = len(link.sent)
    assert sent == 16
    reporter.acknowledged(99)
    reporter.report()
    first = link.sent[sent]
    assert first.dropped_steps > 0
    total = sum(len(report.steps) + report.dropped_steps for report in link.sent)
    assert total == 100


def test_a_slower_rate_and_a_stride_take_hold():
    recorder, link, reporter = make()
    reporter.registered(FLOW, None)
    reporter.paced(FlowControl(60.0, stride=5, from_step=0, max_steps_per_report=100))
    record(recorder, *range(11))
    reporter.report()
    assert link.steps() == [[0, 5, 10]]


async def test_a_registration_wakes_the_reporter_at_once():
    recorder, link, reporter = make()
    record(recorder, 0)
    task = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    reporter.registered(FlowControl(60.0), None)
    async with asyncio.timeout(deadline(5)):
        await link.rang.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert link.steps() == [[0]]


async def test_a_cancellation_that_comes_with_the_wake_is_not_lost():
    """Tried at each of the first turns of the loop after the wake: the reporter must end."""
    for turns in range(6):
        _, _, reporter = make()
        task = asyncio.create_task(reporter.run())
        await asyncio.sleep(0)
        reporter.paced(FlowControl(0.2))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=deadline(5))
        assert task.cancelled(), turns


def test_without_a_stream_an_agent_keeps_its_newest_steps_and_counts_those_it_drops():
    def make(fleet, rank):
        return fleet.config(rank, ring_steps=2)

    with Fleet(two_rank_placements()[0], make_config=make, steps=False) as fleet:
        agent, link, over = fleet.agents[0], fleet.links[0], threading.Event()

        def record(step):
            counts = np.ones((2, 3), np.int64)
            agent.record(step, counts, epoch=0, tokens=1, phase=Phase.DECODE)

        fleet.register()
        record(0)
        assert link.expect(LoadReport).steps["step"].tolist() == [0]
        agent._network._loop.call_soon_threadsafe(link.listener.lost, 1)
        agent._network._loop.call_soon_threadsafe(over.set)
        assert over.wait(deadline(20))
        for step in range(1, 6):
            record(step)
        agent._network.reporter.report()
        assert link.nothing(LoadReport) and agent.dropped_steps == 3
        fleet.register()
        newest = link.expect(LoadReport, lambda report: 0 not in report.steps["step"])
        assert newest.steps["step"].tolist() == [4, 5]


def test_a_report_stays_within_what_the_link_carries_whatever_the_controller_asks_for():
    """A report that it cannot carry would end every stream on which it is sent."""
    layers, width = 512, 2048
    recorder, link, reporter = make(layers=layers, width=width)
    reporter.registered(FlowControl(60.0, max_steps_per_report=2**32 - 1), None)
    counts = np.zeros((layers, width), np.int64)
    for step in range(5):
        recorder.record(step, counts, epoch=0, tokens=0, phase=Phase.DECODE)
    reporter.report()
    assert link.steps() == [[0, 1, 2, 3], [4]]


async def test_reports_keep_a_pause_whatever_the_interval(monkeypatch):
    _, _, reporter = make()
    times = []
    monkeypatch.setattr(reporter, "report", lambda: times.append(0))
    reporter.registered(FlowControl(1e-9), None)
    task = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 1 <= len(times) <= 2 + 0.3 / 0.01 + 20
