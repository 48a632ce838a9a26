"""The agent's network thread: an error costs the current message, not all reports or the stream."""

import asyncio
import threading
from typing import Any

import numpy as np
import structlog

from evenkeel_moe.agent import network_thread
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.model.ids import DeploymentId, EpRank
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import FlowControl
from tests.adapters.serving import Listener
from tests.agent.fleet import PortLink
from tests.agent.ranks import GENERATION
from tests.waiting import deadline


class OnceUnreadable(Recorder):
    """Its first take fails."""

    failed = False

    def take(self, *arguments):
        if self.waiting and not self.failed:
            self.failed = True
            raise RuntimeError("a step like no other")
        return super().take(*arguments)


def test_a_last_message_that_nobody_takes_does_not_hold_the_engine_up(monkeypatch):
    class Stuck(PortLink):
        async def finish(self, message):
            await asyncio.Event().wait()

    monkeypatch.setattr(network_thread, "_LAST_MESSAGE_S", 0.01)
    identity = RankIdentity(DeploymentId("toy"), EpRank(0), GENERATION, 5)
    link, side = Stuck(), CountingSide.DESTINATION
    thread = network_thread.NetworkThread(link, Recorder(8, 1, 1), identity, side)
    thread.start(Listener(None))
    assert link.ready.wait(deadline(10))
    thread.close(planned=True, timeout_s=deadline(10))
    assert not any(one.name == "evenkeel-link" for one in threading.enumerate())


def test_a_report_that_fails_does_not_end_the_reporter(monkeypatch):
    monkeypatch.setattr(network_thread, "_RESTART_AFTER_S", 0.01)
    recorder, link = OnceUnreadable(8, 1, 1), PortLink()
    identity = RankIdentity(DeploymentId("toy"), EpRank(0), GENERATION, 5)
    thread = network_thread.NetworkThread(link, recorder, identity, CountingSide.DESTINATION)
    listener: Any = None
    with structlog.testing.capture_logs() as logs:
        thread.start(listener)
        try:
            assert link.ready.wait(deadline(10))
            recorder.record(0, np.array([[1]]), 0, 1, Phase.DECODE)
            thread._loop.call_soon_threadsafe(thread.reporter.registered, FlowControl(0.01), None)
            assert link.expect(LoadReport).steps["step"].tolist() == [0]
        finally:
            thread.close()
    assert [log["event"] for log in logs] == ["reporter_failed"]
