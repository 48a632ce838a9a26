"""The link that records to a folder in place of a controller."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.engines.guest.record_link import RecordLink
from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.wire.link import Heartbeat, Registration, RegistrationOutcome, ReportAck

SHAPE = ModelShape(2, 3, 1, 3, 2, 0)


class Listener:
    def __init__(self):
        self.heard = []

    def hello(self):
        return SimpleNamespace(shape=SHAPE)

    def received(self, stream, message):
        self.heard.append(message)


class Recorded:
    """A link that records to a folder; the test sets its clock."""

    def __init__(self, folder, keep_steps=2048):
        self.now_s = 0.0
        self.link = RecordLink(folder, keep_steps, clock=lambda: self.now_s)
        self.listener: Any = Listener()

    async def begin(self):
        self.task = asyncio.create_task(self.link.run(self.listener))
        await asyncio.sleep(0)

    def report(self, first, steps):
        table = step_table(
            StepMeta(step, 0, Phase.DECODE, 3) for step in range(first, first + steps)
        )
        counts = np.full((steps, 2, 3), 2, np.int64)
        names = DeploymentId("toy"), Generation("a1b2c3d4"), EpRank(0)
        self.link.send(LoadReport(*names, 1, CountingSide.SOURCE, table, counts))


@pytest.fixture
def recorded(tmp_path):
    return Recorded(tmp_path / "made" / "here")


async def test_the_rank_is_accepted_without_plans_and_every_report_acknowledged(recorded):
    await recorded.begin()
    registration, *_ = recorded.listener.heard
    assert isinstance(registration, Registration)
    assert registration.outcome is RegistrationOutcome.OBSERVE_ONLY
    recorded.report(0, 3)
    recorded.link.send(Heartbeat(3, 0, 0))
    assert recorded.listener.heard[1:] == [ReportAck(2)]
    recorded.task.cancel()


async def test_a_file_is_written_when_it_is_full_or_late(recorded, tmp_path):
    folder = tmp_path / "made" / "here"
    await recorded.begin()
    recorded.report(0, 100)
    assert list(folder.iterdir()) == []
    recorded.report(100, 412)
    assert read_trace(folder).num_steps == 512
    recorded.report(512, 5)
    assert len(list(folder.iterdir())) == 1
    recorded.now_s = 6.0
    recorded.report(517, 1)
    trace = read_trace(folder, first_moe_layer=3)
    assert trace.counts.shape == (518, 2, 3) and (trace.counts == 2).all()
    assert (trace.layer_ids, trace.top_k) == ((3, 4), 2)
    recorded.task.cancel()


async def test_what_waits_is_written_when_the_rank_stops(recorded, tmp_path):
    await recorded.begin()
    recorded.report(0, 7)
    await recorded.link.finish(Heartbeat(7, 0, 0))
    assert read_trace(tmp_path / "made" / "here").num_steps == 7
    await recorded.link.finish(Heartbeat(7, 0, 0))
    recorded.task.cancel()


async def test_the_oldest_files_go_when_the_folder_is_full(tmp_path):
    recorded = Recorded(tmp_path, keep_steps=1024)
    await recorded.begin()
    for first in range(0, 5 * 512, 512):
        recorded.report(first, 512)
    assert sorted(path.name[-16:] for path in tmp_path.iterdir()) == [
        "000000001536.npz",
        "000000002048.npz",
    ]
    recorded.task.cancel()


async def test_a_folder_that_cannot_be_written_costs_the_recording_only(recorded, tmp_path):
    await recorded.begin()
    (tmp_path / "made" / "here").rmdir()
    recorded.report(0, 512)
    assert recorded.listener.heard[-1] == ReportAck(511)
    recorded.task.cancel()
