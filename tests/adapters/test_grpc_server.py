"""The server's own duties: bounded queues, silence, encryption."""

import asyncio
import subprocess
from pathlib import Path

import grpc
import pytest

from evenkeel.adapters.grpc_server import GrpcServer, RankStream, ServerOptions
from evenkeel.errors import InvalidInput, Reason
from evenkeel.v1 import agent_pb2, agent_pb2_grpc
from evenkeel.wire.codec import decode_controller_message, encode_rank_message
from evenkeel.wire.link import (
    FlowControl,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ReportAck,
)
from tests.wire.test_codec import HELLO


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


# --- over a socket --------------------------------------------------------------------------------


class Hub:
    """Takes every rank and answers each heartbeat."""

    def __init__(self):
        self.refused = []
        self.lost = asyncio.Event()

    async def attach(self, hello, stream):
        hub = self

        class Session:
            def received(self, message):
                assert isinstance(message, Heartbeat)
                stream.send(ReportAck(message.step))

            def malformed(self, violation, steps):
                stream.send(ReportAck(max(steps), len(steps), violation.reason))

            def lost(self):
                hub.lost.set()

        return Session()

    def refuse(self, violation, stream):
        self.refused.append(violation)
        stream.close(NotLeader("", "", 1.0))


def make_options(**changes) -> ServerOptions:
    values = {
        "host": "127.0.0.1",
        "port": 0,
        "max_message_bytes": 1 << 20,
        "send_queue": 16,
        "keepalive_s": 20.0,
        "keepalive_timeout_s": 10.0,
    }
    return ServerOptions(**{**values, **changes})


@pytest.fixture
async def serve():
    servers = []

    async def start(**changes):
        server = GrpcServer(make_options(**changes))
        server.bind()
        hub = Hub()
        await server.start(hub)
        servers.append(server)
        return server, hub

    yield start
    for server in servers:
        await server.stop(0.1)
        await server.stop(0.1)


async def ask(channel, *messages):
    """The answers to some messages on one stream, until the server ends it or all are answered."""
    call = agent_pb2_grpc.RankLinkStub(channel).Attach()
    for message in messages:
        await call.write(message)
    answer = await asyncio.wait_for(call.read(), 10)
    call.cancel()
    return answer if answer is grpc.aio.EOF else decode_controller_message(answer)


@pytest.mark.integration
async def test_messages_go_both_ways_and_a_rank_that_hangs_up_is_noticed(serve):
    server, hub = await serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        beat = encode_rank_message(Heartbeat(7, 1, 2))
        assert await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(7)
    await asyncio.wait_for(hub.lost.wait(), 10)


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


@pytest.fixture
def certificates(tmp_path):
    """A CA, and a certificate of it for 127.0.0.1, as files."""

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl("req", *key[:-2], "-keyout", "leaf.key", "-out", "leaf.csr", "-subj", "/CN=leaf")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    openssl("x509", "-req", "-in", "leaf.csr", *signed, "-out", "leaf.pem")
    return tmp_path


@pytest.mark.integration
async def test_with_a_client_ca_only_ranks_with_a_certificate_get_in(serve, certificates):
    server, _ = await serve(
        tls_cert_file=certificates / "leaf.pem",
        tls_key_file=certificates / "leaf.key",
        tls_client_ca_file=certificates / "ca.pem",
    )
    ca, key, leaf = ((certificates / name).read_bytes() for name in ("ca.pem", "leaf.key", "leaf.pem"))
    target = f"127.0.0.1:{server.port}"
    messages = encode_rank_message(HELLO), encode_rank_message(Heartbeat(7, 1, 2))
    known = grpc.ssl_channel_credentials(ca, key, leaf)
    async with grpc.aio.secure_channel(target, known) as channel:
        assert await ask(channel, *messages) == ReportAck(7)
    for stranger in (
        grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca)),
        grpc.aio.insecure_channel(target),
    ):
        async with stranger as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, *messages)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.integration
async def test_the_pings_of_a_link_are_no_abuse_to_the_server(serve):
    """Both sides probe; a server that counts probes as abuse cuts its ranks off every few minutes."""
    from evenkeel.adapters.grpc_link import GrpcRankLink, LinkTiming

    server, _ = await serve(keepalive_s=1.0, keepalive_timeout_s=5.0)
    lost: list[int] = []
    got: list[object] = []

    class Quiet:
        def hello(self):
            return HELLO

        def heartbeat(self):
            return Heartbeat(7, 1, 2)

        def received(self, stream, message):
            got.append(message)

        def lost(self, stream):
            lost.append(stream)

    class Registering(Hub):
        async def attach(self, hello, stream):
            # No heartbeat and no lease within the test: probes are all there is.
            stream.send(Registration(RegistrationOutcome.ACCEPTED, 600.0, 600.0, FlowControl(1.0)))
            return await super().attach(hello, stream)

    server._hub = Registering()
    timing = LinkTiming(keepalive_s=1.0, keepalive_timeout_s=5.0)
    link = asyncio.create_task(GrpcRankLink([f"127.0.0.1:{server.port}"], timing=timing).run(Quiet()))
    try:
        await asyncio.sleep(8.0)
        assert got and lost == []
    finally:
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)
