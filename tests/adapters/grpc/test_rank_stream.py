"""The send queue of a stream: its bound, its last message, and joined answers to reports."""

import asyncio

import pytest

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.errors import Reason
from evenkeel_moe.wire.link import FlowControl, NotLeader, ReportAck
from tests.waiting import deadline


async def drain(stream):
    messages = []
    while (message := await asyncio.wait_for(stream.next(), deadline(5))) is not None:
        messages.append(message)
    return messages


async def test_a_closed_stream_sends_its_last_message_and_nothing_after():
    stream = RankStream(1, "peer", capacity=4)
    stream.send(FlowControl(1.0))
    stream.close(NotLeader("a", "b:1", 1.0))
    stream.send(FlowControl(2.0))
    assert await drain(stream) == [FlowControl(1.0), NotLeader("a", "b:1", 1.0)]
    assert stream.closed


async def test_a_rank_too_slow_for_its_messages_is_cut_off():
    stream = RankStream(1, "peer", capacity=4)
    for _ in range(5):
        stream.send(FlowControl(1.0))
    assert stream.closed
    assert await drain(stream) == []


async def test_acknowledgements_that_nobody_has_read_are_joined():
    stream = RankStream(1, "peer", capacity=4)
    for step in range(50):
        stream.send(ReportAck(step, 1 if step == 3 else 0, Reason.LATE_STEP if step == 3 else None))
    stream.send(ReportAck(None))
    stream.close()
    assert await drain(stream) == [ReportAck(49, 1, Reason.LATE_STEP)]


@pytest.mark.parametrize("acks", [(ReportAck(None), ReportAck(5)), (ReportAck(5), ReportAck(None))])
async def test_a_joined_acknowledgement_names_the_step_that_either_knows(acks):
    stream = RankStream(1, "peer", capacity=4)
    for ack in acks:
        stream.send(ack)
    stream.close()
    assert await drain(stream) == [ReportAck(5)]


async def test_a_rank_that_reports_often_is_answered_before_it_must_wait(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def recording(*arguments):
        timers.append(call_at(*arguments))
        return timers[-1]

    monkeypatch.setattr(loop, "call_at", recording)
    stream = RankStream(1, "peer", capacity=4)
    stream.send(ReportAck(0))
    assert await stream.next() == ReportAck(0)
    for step in range(1, 12):
        stream.send(ReportAck(step))
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.send(ReportAck(12))
    # The answer comes at once, not from a timer.
    for _ in range(3):
        await asyncio.sleep(0)
    assert waiting.done()
    assert waiting.result() == ReportAck(12)
    # The timer of these answers must not send the next ones too early.
    assert [timer.cancelled() for timer in timers] == [True]
