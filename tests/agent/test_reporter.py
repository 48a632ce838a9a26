"""Reports are kept until acknowledged, sent again after a reconnect, and never pile up."""

import asyncio
import threading

import numpy as np

from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.agent.reporter import Reporter
from evenkeel_moe.model.ids import DeploymentId, EpRank
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import FlowControl
from tests.agent.fleet import Fleet
from tests.agent.ranks import GENERATION, two_rank_placements
from tests.waiting import deadline

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
    identity = RankIdentity(DeploymentId("toy"), EpRank(1), GENERATION, 5)
    return recorder, link, Reporter(recorder, identity, CountingSide.DESTINATION, link)


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


def test_unacknowledged_reports_are_sent_again_on_the_next_stream():
    recorder, link, reporter = make()
    reporter.registered(FLOW, None)
    record(recorder, 0, 1, 2, 3)
    reporter.report()
    reporter.acknowledged(1)
    reporter.lost()
    record(recorder, 4)
    reporter.report()
    assert link.steps() == [[0, 1], [2, 3]]
    link.sent.clear()
    reporter.registered(FLOW, None)
    reporter.report()
    assert link.steps() == [[2, 3], [4]]


def test_a_report_is_kept_until_its_last_step_is_acknowledged():
    recorder, link, reporter = make()
    reporter.registered(FLOW, None)
    record(recorder, 0, 1)
    reporter.report()
    reporter.acknowledged(0)
    reporter.registered(FLOW, None)
    assert link.steps() == [[0, 1], [0, 1]]


def test_what_the_controller_already_has_is_not_sent_again():
    recorder, link, reporter = make()
    reporter.registered(FLOW, None)
    record(recorder, 0, 1, 2, 3)
    reporter.report()
    link.sent.clear()
    reporter.registered(FLOW, 3)
    assert link.sent == []


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
