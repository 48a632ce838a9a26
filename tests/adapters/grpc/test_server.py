"""The server over a socket: its limits, its errors, and its services."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from evenkeel_moe.adapters.grpc import encoder
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.adapters.grpc.server import GrpcServer
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.peer_budget import PeerLimits
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.v1 import agent_pb2, agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.limits import most_message_bytes
from evenkeel_moe.wire.link import (
    Heartbeat,
    NotLeader,
    Registration,
    ReportAck,
)
from evenkeel_moe.wire.to_rank import encode_controller_message
from tests.adapters.serving import Listener, RegisteringHub, ask, make_options, make_prepare
from tests.protocol.machines import state_of
from tests.waiting import deadline, until
from tests.wire.wires import HELLO


@pytest.mark.integration
async def test_messages_go_both_ways_and_a_rank_that_hangs_up_is_noticed(serve):
    server, hub = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        beat = encode_rank_message(Heartbeat(7, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(7)
    await asyncio.wait_for(hub.lost.wait(), deadline(10))


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
async def test_a_stream_is_served_under_its_trace_id(serve):
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
            await asyncio.wait_for(call.read(), deadline(10))
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
            await asyncio.wait_for(call.read(), deadline(10))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.wait_for(hub.lost.wait(), deadline(10))
        beat = encode_rank_message(Heartbeat(8, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(8)


@pytest.mark.integration
async def test_compressed_message_is_refused(serve):
    """It may be a thousand times larger than what arrived: eleven of them took 2 GiB."""
    server, hub = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach(compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.write(encode_rank_message(replace(HELLO, node="n" * 200)))
            await asyncio.wait_for(call.read(), deadline(10))
        # INTERNAL: on a busy machine the stream has ended before the message is written out.
        assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert hub.attached == 0
        beat = encode_rank_message(Heartbeat(8, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(8)


@pytest.mark.integration
async def test_message_larger_than_any_of_its_shape_ends_the_stream(serve):
    server, hub = await serve(max_message_bytes=64 << 20)
    most = most_message_bytes(HELLO.shape)
    huge = agent_pb2.RankMessage()
    huge.load_report.counts = b"\0" * most
    first = encode_rank_message(HELLO)
    first.hello.capabilities.extend(["c" * 60] * 2000)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(encode_rank_message(HELLO))
        await call.write(huge)
        while await asyncio.wait_for(call.read(), deadline(10)) is not grpc.aio.EOF:
            pass
        await asyncio.wait_for(hub.lost.wait(), deadline(10))
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(first)
        while await asyncio.wait_for(call.read(), deadline(10)) is not grpc.aio.EOF:
            pass
        (violation,) = hub.refused
        assert violation.reason is Reason.LIMIT_EXCEEDED and "at most 65536" in str(violation)


@pytest.mark.integration
async def test_a_port_in_use_is_refused(serve):
    server, _ = await serve()
    with pytest.raises(InvalidInput, match=f"cannot listen for ranks on 127.0.0.1:{server.port}"):
        GrpcServer(make_options(port=server.port)).bind()
    with pytest.raises(InvalidInput, match="cannot listen"):
        GrpcServer(make_options(tls_cert_file=Path("absent"), tls_key_file=Path("absent"))).bind()


@pytest.mark.integration
async def test_the_pings_of_a_link_are_no_abuse_to_the_server(serve):
    """Both sides send pings; a server that counts them as abuse disconnects its ranks."""
    server, _ = await serve(keepalive_s=1.0, keepalive_timeout_s=5.0)
    server._hub = RegisteringHub()
    rank = Listener()
    timing = LinkTiming(keepalive_s=1.0, keepalive_timeout_s=5.0)
    link = asyncio.create_task(GrpcRankLink([f"127.0.0.1:{server.port}"], timing=timing).run(rank))
    try:
        # Pings have no visible effect but a lost stream. Each side sends eight in this time.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rank.lost_one.wait(), 8.0)
        assert rank.got
    finally:
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)


# --- reflection and health ------------------------------------------------------------------------


async def services(channel) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    async for answer in call:
        return [service.name for service in answer.list_services_response.service]
    return []


@pytest.mark.integration
async def test_reflection_is_served_only_if_enabled(serve):
    wanted, _ = await serve(reflection=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{wanted.port}") as channel:
        found = await asyncio.wait_for(services(channel), deadline(30))
        assert {"evenkeel.v1.RankLink", "grpc.health.v1.Health"} <= set(found)
    plain, _ = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plain.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(services(channel), deadline(30))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.integration
async def test_health_is_reported_for_each_service(serve):
    server, _ = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "evenkeel.v1.RankLink"):
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=deadline(30)
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(
                health_pb2.HealthCheckRequest(service="evenkeel.v1.Nothing"), timeout=deadline(30)
            )
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.integration
async def test_silent_streams_do_not_keep_a_rank_out(serve):
    server, _ = await serve(max_streams=4, waiting_streams=20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = agent_pb2_grpc.RankLinkStub(channel)
        silent = [stub.Attach() for _ in range(60)]
        await until(lambda: sum(call.done() for call in silent) >= 40)
        beat = encode_rank_message(Heartbeat(7, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(7)
        for call in silent:
            call.cancel()


@pytest.mark.integration
async def test_a_stream_without_a_hello_ends_after_a_time(serve):
    server, hub = await serve(first_message_s=0.2)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        assert await asyncio.wait_for(call.read(), deadline(10)) is grpc.aio.EOF
        assert not hub.lost.is_set()
        assert len(server._waiting) == server.open_streams == 0


@pytest.mark.integration
async def test_a_stream_that_is_silent_after_its_hello_ends_and_one_that_beats_does_not(serve):
    server, hub = await serve(silent_s=deadline(0.5))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = agent_pb2_grpc.RankLinkStub(channel)
        silent, beating = stub.Attach(), stub.Attach()
        for call in (silent, beating):
            await call.write(encode_rank_message(HELLO))
        await until(lambda: server.open_streams == 2)

        async def has_ended():
            await beating.write(encode_rank_message(Heartbeat(7, 1, 2)))
            return silent.done()

        await until(has_ended, every_s=0.1)
        assert await silent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "nothing was heard" in await silent.details()
        await until(lambda: server.open_streams == 1)
        # The other is open for as long again.
        ends = asyncio.get_running_loop().time() + deadline(0.75)

        async def is_over():
            await beating.write(encode_rank_message(Heartbeat(7, 1, 2)))
            return asyncio.get_running_loop().time() > ends

        await until(is_over, every_s=0.1)
        assert not beating.done() and server.open_streams == 1
        beating.cancel()


@pytest.mark.parametrize("exhausted", ["", "a limit"])
@pytest.mark.integration
async def test_a_closed_stream_ends_although_its_rank_reads_nothing(serve, exhausted):
    server, hub = await serve(send_queue=100_000)
    streams = []
    attach = hub.attach

    async def telling(hello, stream):
        streams.append(stream)
        for number in range(100_000):
            stream.send(NotLeader("a" * 1000, str(number), 1.0))
        return await attach(hello, stream)

    hub.attach = telling
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(encode_rank_message(HELLO))
        left = []

        async def waits():
            left.append(len(streams[0]._queue) if streams else 0)
            return left[-1] > 0 and left[-3:-2] == left[-1:]

        await until(waits, every_s=0.2)
        streams[0].exhausted = exhausted
        streams[0].close()
        await asyncio.wait_for(hub.lost.wait(), deadline(10))
        await until(lambda: server.open_streams == 0)
        call.cancel()


LARGE = ModelShape(128, 512, 2, 512, 1, 10)
"""A map of 512 kB."""


def large_state(hello):
    """The answer of a rank with its whole map."""
    placement = Placement.initial(hello.shape)
    checksums = (5,) * (hello.shape.num_layers * hello.shape.num_logical_experts)
    return state_of(identity=hello.identity, placement=placement, checksums=checksums)


class Keeping(RegisteringHub):
    """Keeps what it receives, as a machine whose store does not answer."""

    def __init__(self):
        super().__init__()
        self.kept, self.ends = [], []

    async def attach(self, hello, stream):
        session, hub = await super().attach(hello, stream), self

        class Kept:
            malformed, lost = session.malformed, session.lost

            def received(self, message):
                if isinstance(message, Heartbeat):
                    session.received(message)
                else:
                    hub.kept.append(message)
                    hub.ends.append(stream.hold())

        return Kept()


@pytest.mark.integration
async def test_a_flood_that_is_not_processed_stops_its_own_stream_alone(serve):
    server, _ = await serve(max_message_bytes=64 << 20, silent_s=deadline(0.5))
    server._hub = hub = Keeping()
    hello = replace(HELLO, shape=LARGE)
    state = encode_rank_message(large_state(hello))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(encode_rank_message(hello))

        async def flood():
            for _ in range(60):
                await call.write(state)

        flooding = asyncio.create_task(flood())
        most = PeerLimits().stream_bytes // state.ByteSize() + 1
        await until(lambda: len(hub.kept) == most)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as other:
            beat = encode_rank_message(Heartbeat(7, 1, 2))
            for _ in range(3):
                answer = await ask(other, encode_rank_message(HELLO), beat)
                assert isinstance(answer, Registration)
        assert len(hub.kept) == most and not flooding.done()
        assert all("digest" in vars(message.placement) for message in hub.kept), (
            "computed by the thread that decoded the map"
        )
        # It sends nothing more because it is not read: it is not silent.
        await asyncio.sleep(deadline(0.75))
        assert not call.done()
        # Once they are processed, the sender goes on.
        while len(hub.kept) < 60:
            for end in hub.ends:
                end()
            await asyncio.sleep(0.01)
        await flooding
        call.cancel()


CHECK = "/grpc.health.v1.Health/Check"
REFLECT = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"


@pytest.mark.fault(
    "a stranger at a controller with reflection", "it held as many streams as it wanted, for ever"
)
@pytest.mark.integration
@pytest.mark.parametrize("method", [CHECK, REFLECT])
async def test_calls_of_strangers_that_ask_nothing_are_ended(serve, method):
    server, _ = await serve(waiting_streams=20, first_message_s=3600.0, reflection=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        calls = [channel.stream_stream(method)() for _ in range(100)]
        # Twenty may wait; the others are ended although no request is overdue.
        await until(lambda: sum(call.done() for call in calls) == 80)
        codes = {await call.code() for call in calls if call.done()}
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert "evenkeel.v1.RankLink" in await asyncio.wait_for(services(channel), deadline(30))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            unparsed: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            await unparsed(b"\xff\xff", timeout=deadline(30))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=deadline(30)
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.integration
@pytest.mark.parametrize("method", [CHECK, REFLECT])
async def test_a_call_of_a_stranger_whose_request_is_overdue_is_ended(serve, method):
    server, _ = await serve(first_message_s=0.2, reflection=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(method)()
        code = await asyncio.wait_for(call.code(), deadline(30))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.integration
async def test_nobody_can_watch_the_health_and_so_open_streams_without_a_limit(serve):
    server, _ = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=deadline(30)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
