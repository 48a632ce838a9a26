"""The send queue of a stream: its bound, its last message, and joined answers to reports."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from evenkeel_moe.adapters.grpc import encoder
from evenkeel_moe.adapters.grpc import server as server_module
from evenkeel_moe.adapters.grpc.encoder import Encoder
from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.link import FlowControl, Heartbeat, NotLeader, ReportAck
from evenkeel_moe.wire.to_rank import encode_controller_message
from tests.adapters.serving import Hub, ask, make_prepare
from tests.protocol.machines import state_of
from tests.waiting import deadline, until
from tests.wire.wires import HELLO


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


async def test_a_rank_that_reports_often_is_answered_before_it_must_wait():
    stream = RankStream(1, "peer", capacity=4)
    stream.send(ReportAck(0))
    assert await stream.next() == ReportAck(0)
    for step in range(1, 12):
        stream.send(ReportAck(step))
    for last in (12, 13):
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0.01)
        assert not waiting.done(), "the time of the answer before is not that of this one"
        stream.send(ReportAck(last))
        if last == 12:  # The twelfth: its answer comes at once, not when its time has come.
            assert await asyncio.wait_for(waiting, 1.0) == ReportAck(12)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stream.send(ReportAck(14, 1, Reason.LATE_STEP))
    assert await asyncio.wait_for(waiting, 1.0) == ReportAck(14, 1, Reason.LATE_STEP)


async def test_an_answer_comes_before_the_messages_that_end_a_stream():
    stream = RankStream(1, "peer", capacity=4)
    for step in range(2):
        stream.send(ReportAck(step))
        assert step or await stream.next() == ReportAck(0)
    stream.close(NotLeader("a", "b:1", 1.0))
    assert await drain(stream) == [ReportAck(1), NotLeader("a", "b:1", 1.0)]


# --- Large messages are decoded on a thread, one after another over all streams -------------------


HELLO_OF_LARGE = replace(HELLO, shape=ModelShape(48, 512, 2, 512, 1, 10))


class Noting(Hub):
    """Keeps the streams, and counts the messages that are no heartbeats."""

    def __init__(self):
        super().__init__()
        self.streams, self.states = [], 0

    async def attach(self, hello, stream):
        session, hub = await super().attach(hello, stream), self
        self.streams.append(stream)

        class Noted:
            malformed, lost = session.malformed, session.lost

            def received(self, message):
                if isinstance(message, Heartbeat):
                    session.received(message)
                else:
                    hub.states += 1

        return Noted()


@pytest.mark.integration
async def test_large_messages_are_decoded_one_at_a_time_and_small_ones_meanwhile(
    serve, monkeypatch
):
    server, _ = await serve(max_message_bytes=64 << 20)
    server._hub = hub = Noting()
    shape = HELLO_OF_LARGE.shape
    checksums = (5,) * (shape.num_layers * shape.num_logical_experts)
    placement = Placement.initial(shape)
    state = encode_rank_message(
        state_of(identity=HELLO.identity, placement=placement, checksums=checksums)
    )
    assert state.ByteSize() > server_module._LARGE_BYTES
    begun, first_may_end = [], threading.Event()
    decode = server_module._decode

    def held(data, hello):
        if threading.current_thread() is not threading.main_thread():
            begun.append(len(data))
            if len(begun) == 1:
                first_may_end.wait()
        return decode(data, hello)

    monkeypatch.setattr(server_module, "_decode", held)
    # Two threads: the first message keeps one, and the other takes what is given to it in order.
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        try:
            calls = [agent_pb2_grpc.RankLinkStub(channel).Attach() for _ in range(3)]
            for call in calls:
                await call.write(encode_rank_message(HELLO_OF_LARGE))
                await call.write(state)
            size = state.ByteSize()
            await until(lambda: [s.message_bytes for s in hub.streams] == [size] * 3)
            await asyncio.to_thread(lambda: None)
            assert len(begun) == 1, "a second large message was decoded beside the first"
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as other:
                beat = encode_rank_message(Heartbeat(7, 1, 2))
                assert await ask(other, encode_rank_message(HELLO), beat) == ReportAck(7)
            assert hub.states == 0
        finally:
            first_may_end.set()
        await until(lambda: hub.states == 3)
        for call in calls:
            call.cancel()


# --- Encoding: a Prepare is encoded once, and a message without an encoding is refused ------------


def test_a_prepare_is_encoded_once_for_all_ranks_and_resends(monkeypatch):
    encoded = []

    def counting(message):
        encoded.append(message)
        return encode_controller_message(message)

    monkeypatch.setattr(encoder, "encode_controller_message", counting)
    one, equal, other = make_prepare(), make_prepare(), make_prepare(1, checksum=7)
    encode = Encoder().encode
    for _ in range(5):  # Ranks, and resends with other messages between them.
        assert encode(one) == encode_controller_message(one).SerializeToString()
        assert (
            encode(FlowControl(2.0))
            == encode_controller_message(FlowControl(2.0)).SerializeToString()
        )
    assert [type(message) for message in encoded] == [Prepare, *[FlowControl] * 5]
    assert encode(other) == encode_controller_message(other).SerializeToString() != encode(one)
    encode(equal)
    sent = [message for message in encoded if isinstance(message, Prepare)]
    assert [id(message) for message in sent] == [id(one), id(other), id(one), id(equal)]


def test_a_message_that_cannot_be_said_is_refused_each_time_and_keeps_nothing():
    encode, good, bad = Encoder().encode, make_prepare(), make_prepare(checksum=-1)
    data = encode(good)
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            encode(bad)
        assert encode(good) == data
