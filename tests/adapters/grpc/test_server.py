"""The server's own duties: bounded queues, silence, encryption."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from evenkeel_moe.adapters.grpc import encoder
from evenkeel_moe.adapters.grpc.encoder import Encoder
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.adapters.grpc.server import GrpcServer, RankStream
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.protocol.messages import Leader, Prepare
from evenkeel_moe.v1 import agent_pb2, agent_pb2_grpc
from evenkeel_moe.wire.codec import encode_controller_message, encode_rank_message
from evenkeel_moe.wire.link import (
    FlowControl,
    Heartbeat,
    NotLeader,
    ReportAck,
)
from tests.adapters.serving import Listener, RegisteringHub, ask, make_options
from tests.wire.wires import HELLO


async def drain(stream):
    messages = []
    while (message := await asyncio.wait_for(stream.next(), 5)) is not None:
        messages.append(message)
    return messages


async def test_a_stream_says_its_last_words_and_nothing_after():
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


async def test_acknowledgements_nobody_read_yet_are_joined():
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
    monkeypatch.setattr(loop, "call_at", lambda *args: timers.append(call_at(*args)) or timers[-1])
    stream = RankStream(1, "peer", capacity=4)
    stream.send(ReportAck(0))
    assert await stream.next() == ReportAck(0)
    for step in range(1, 12):
        stream.send(ReportAck(step))
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.send(ReportAck(12))
    # At once: no timer may be what answers.
    for _ in range(3):
        await asyncio.sleep(0)
    assert waiting.done()
    assert waiting.result() == ReportAck(12)
    # What was to answer these later must not answer the next ones too early.
    assert [timer.cancelled() for timer in timers] == [True]


def make_prepare(index=0, checksum=0):
    rows = np.array([[0, 1, 2, 0]], np.int32)
    wave = Wave(index, (1,), rows, ((Transfer(1, 0, 0, 3, 1000),),))
    key = WaveKey(Generation("g"), PlanId("p"), index, 1, Epoch(6))
    return Prepare(Leader("a", 1), key, Epoch(0), wave, (checksum,), 5.0)


def test_a_prepare_is_encoded_once_for_all_ranks_and_resends_and_another_anew(monkeypatch):
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


# --- over a socket --------------------------------------------------------------------------------


@pytest.mark.integration
async def test_messages_go_both_ways_and_a_rank_that_hangs_up_is_noticed(serve):
    server, hub = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        beat = encode_rank_message(Heartbeat(7, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(7)
    await asyncio.wait_for(hub.lost.wait(), 10)


@pytest.mark.integration
async def test_streams_share_the_bytes_of_one_prepare(serve, monkeypatch):
    server, hub = await serve()
    prepare, encoded = make_prepare(), []
    attach = hub.attach

    async def preparing(hello, stream):
        stream.send(prepare)
        return await attach(hello, stream)

    def counting(message):
        encoded.append(message)
        return encode_controller_message(message)

    hub.attach = preparing
    monkeypatch.setattr(encoder, "encode_controller_message", counting)
    for _ in range(3):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            told = await ask(channel, encode_rank_message(HELLO))
            assert isinstance(told, Prepare)
            assert told.body.transfers == prepare.body.transfers
    assert encoded == [prepare]


@pytest.mark.integration
async def test_what_a_stream_leads_to_is_said_under_its_trace(serve):
    server, hub = await serve()
    seen: list[dict] = []
    attach = hub.attach

    async def noting(hello, stream):
        seen.append(structlog.contextvars.get_contextvars())
        return await attach(hello, stream)

    hub.attach = noting
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for metadata in (
        None,
        (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),),
        (("traceparent", "x"),),
    ):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = agent_pb2_grpc.RankLinkStub(channel).Attach(metadata=metadata)
            await call.write(encode_rank_message(HELLO))
            await call.write(encode_rank_message(Heartbeat(7, 1, 2)))
            await asyncio.wait_for(call.read(), 10)
            call.cancel()
    ids = [context["trace_id"] for context in seen]
    assert ids[1] == trace
    assert len(set(ids)) == 3
    assert all(len(one) == 32 for one in ids)


@pytest.mark.integration
async def test_a_message_over_the_limit_ends_the_stream_and_nothing_else(serve):
    server, hub = await serve(max_message_bytes=1 << 16)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(encode_rank_message(HELLO))
        huge = agent_pb2.RankMessage()
        huge.load_report.counts = b"\0" * (1 << 17)
        await call.write(huge)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.wait_for(hub.lost.wait(), 10)
        beat = encode_rank_message(Heartbeat(8, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(8)


@pytest.mark.integration
async def test_a_port_in_use_is_refused(serve):
    server, _ = await serve()
    with pytest.raises(InvalidInput, match=f"cannot listen for ranks on 127.0.0.1:{server.port}"):
        GrpcServer(make_options(port=server.port)).bind()
    with pytest.raises(InvalidInput, match="cannot listen"):
        GrpcServer(make_options(tls_cert_file=Path("absent"), tls_key_file=Path("absent"))).bind()


@pytest.mark.integration
async def test_the_pings_of_a_link_are_no_abuse_to_the_server(serve):
    """Both sides probe; a server that counts probes as abuse cuts its ranks off every few minutes."""
    server, _ = await serve(keepalive_s=1.0, keepalive_timeout_s=5.0)
    server._hub = RegisteringHub()
    rank = Listener()
    timing = LinkTiming(keepalive_s=1.0, keepalive_timeout_s=5.0)
    link = asyncio.create_task(GrpcRankLink([f"127.0.0.1:{server.port}"], timing=timing).run(rank))
    try:
        await asyncio.sleep(8.0)
        assert rank.got and rank.lost_streams == []
    finally:
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)


# --- what the server tells of itself -----------------------------------------------------------------


async def services(channel) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    async for answer in call:
        return [service.name for service in answer.list_services_response.service]
    return []


@pytest.mark.integration
async def test_reflection_is_there_only_where_it_is_wanted(serve):
    wanted, _ = await serve(reflection=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{wanted.port}") as channel:
        found = await asyncio.wait_for(services(channel), 30)
        assert {"evenkeel.v1.RankLink", "grpc.health.v1.Health"} <= set(found)
    plain, _ = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plain.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(services(channel), 30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.integration
async def test_health_is_told_for_each_service(serve):
    server, _ = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "evenkeel.v1.RankLink"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(
                health_pb2.HealthCheckRequest(service="evenkeel.v1.Nothing"), timeout=30
            )
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
