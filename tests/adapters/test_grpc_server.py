"""The server's own duties: bounded queues, silence, encryption."""

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from evenkeel.adapters.grpc_link import GrpcRankLink, LinkTiming, LinkTls
from evenkeel.adapters.grpc_server import GrpcServer, RankStream, ServerOptions
from evenkeel.adapters.server_tls import Grant, read_grants
from evenkeel.errors import InvalidInput, Reason
from evenkeel.model.ids import DeploymentId, EpRank
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
from tests.waiting import until
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
async def test_what_a_stream_leads_to_is_said_under_its_trace(serve):
    server, hub = await serve()
    seen: list[dict] = []
    attach = hub.attach

    async def noting(hello, stream):
        seen.append(structlog.contextvars.get_contextvars())
        return await attach(hello, stream)

    hub.attach = noting
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for metadata in (None, (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),), (("traceparent", "x"),)):
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


class Authority:
    """A CA, and certificates of it for 127.0.0.1, as files of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-keyout", "ca.key", "-out", "ca.pem")
        self._openssl("req", "-x509", *self._key, "-days", "2", *files, "-subj", "/CN=ca")

    def _openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def issue(self, name: str, *uris: str):
        """Write NAME.key and NAME.pem."""
        names = ",".join(["IP:127.0.0.1", *(f"URI:{uri}" for uri in uris)])
        (self.folder / "names").write_text(f"subjectAltName={names}\n")
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        self._openssl("req", *self._key, *request)
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")

    def read(self, *names: str) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in names]

    def channel(self, port: int, name: str):
        """A channel with a certificate of that name."""
        credentials = grpc.ssl_channel_credentials(*self.read("ca.pem", f"{name}.key", f"{name}.pem"))
        # Of its own: a connection shared with another channel would show no handshake.
        options = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)

    def files(self, name: str, folder: Path | None = None, **changes):
        """Options of a server with that certificate that wants one of its clients."""
        folder = folder or self.folder
        return {
            "tls_cert_file": folder / f"{name}.pem",
            "tls_key_file": folder / f"{name}.key",
            "tls_client_ca_file": folder / "ca.pem",
            **changes,
        }


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    authority.issue("leaf")
    return authority


@pytest.fixture
def certificates(authority):
    return authority.folder


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


# --- who a certificate speaks for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "grants"),
    [
        ((), None),
        (("spiffe://cluster/ns/sa", "https://example.com"), None),
        (("evenkeel://demo/ranks/0-7",), (Grant("demo", 0, 7),)),
        (("evenkeel://demo/ranks/3", "spiffe://x"), (Grant("demo", 3, 3),)),
        (("evenkeel://demo", "evenkeel://a.b-c/ranks/8-15"), (Grant("demo"), Grant("a.b-c", 8, 15))),
        # Another form grants nothing, and is not the same as saying nothing.
        (("evenkeel://demo/ranks/",), ()),
        (("evenkeel://demo/ranks/0-",), ()),
        (("evenkeel://demo/ranks/-1",), ()),
        (("evenkeel://demo/ranks/0-7/x",), ()),
        (("evenkeel://demo/rank/0",), ()),
        (("evenkeel:///ranks/0",), ()),
        (("evenkeel:demo",), ()),
    ],
)
def test_names_of_a_certificate_and_what_they_grant(names, grants):
    assert read_grants(names) == grants


def test_a_grant_covers_its_ranks_of_its_deployment_and_no_other():
    some, every = Grant("demo", 2, 4), Grant("demo")
    assert [rank for rank in range(9) if some.covers("demo", rank)] == [2, 3, 4]
    assert all(every.covers("demo", rank) for rank in range(9))
    assert not some.covers("demo2", 3)
    assert not every.covers("dem", 3)


def hello_of(deployment: str, rank: int) -> agent_pb2.RankMessage:
    shape = replace(HELLO.shape, num_ranks=max(HELLO.shape.num_ranks, 16))
    identity = replace(HELLO.identity, deployment=DeploymentId(deployment), rank=EpRank(rank))
    return encode_rank_message(replace(HELLO, identity=identity, shape=shape))


@pytest.mark.integration
async def test_a_certificate_for_some_ranks_cannot_speak_as_another(serve, authority):
    authority.issue("eight", "evenkeel://demo/ranks/0-7")
    authority.issue("misprint", "evenkeel://demo/ranks/zero")
    server, hub = await serve(**authority.files("leaf"))
    beat = encode_rank_message(Heartbeat(7, 1, 2))
    async with authority.channel(server.port, "eight") as channel:
        for rank in (0, 7):
            assert await ask(channel, hello_of("demo", rank), beat) == ReportAck(7)
        assert hub.refused == []
        for deployment, rank in (("demo", 9), ("demo", 8), ("other", 0)):
            answer = await ask(channel, hello_of(deployment, rank))
            assert isinstance(answer, NotLeader)
            assert hub.refused[-1].reason is Reason.IDENTITY_REFUSED
            assert f"rank {rank} of {deployment}" in str(hub.refused[-1])
            assert "evenkeel://demo/ranks/0-7" in str(hub.refused[-1])
    assert len(hub.refused) == 3
    async with authority.channel(server.port, "misprint") as channel:
        await ask(channel, hello_of("demo", 0))
    assert len(hub.refused) == 4


@pytest.mark.integration
@pytest.mark.parametrize("required", [False, True])
async def test_a_certificate_that_names_no_ranks_gets_in_unless_names_are_required(
    serve, authority, required
):
    server, hub = await serve(**authority.files("leaf", tls_require_identity=required))
    async with authority.channel(server.port, "leaf") as channel:
        answer = await ask(channel, hello_of("demo", 9), encode_rank_message(Heartbeat(7, 1, 2)))
    assert [violation.reason for violation in hub.refused] == [Reason.IDENTITY_REFUSED] * required
    assert isinstance(answer, NotLeader if required else ReportAck)


# --- certificates that change -----------------------------------------------------------------------


@pytest.mark.integration
async def test_a_server_takes_new_certificates_without_a_restart(serve, tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    mounted = tmp_path / "mounted"
    for authority in (old, new):
        authority.issue("leaf")
    shutil.copytree(old.folder, mounted)
    server, _ = await serve(**old.files("leaf", mounted))

    async def gets_in(authority) -> bool:
        try:
            async with authority.channel(server.port, "leaf") as channel:
                beat = encode_rank_message(Heartbeat(7, 1, 2))
                return await ask(channel, encode_rank_message(HELLO), beat) == ReportAck(7)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False

    def put(name):
        shutil.copy(new.folder / name, tmp_path / "fresh")
        (tmp_path / "fresh").replace(mounted / name)

    before = old.channel(server.port, "leaf")
    messages = encode_rank_message(HELLO), encode_rank_message(Heartbeat(7, 1, 2))
    assert await ask(before, *messages) == ReportAck(7)
    assert (await gets_in(old), await gets_in(new)) == (True, False)
    put("leaf.pem")
    # A certificate whose key is not there yet: the one in use stays.
    assert (await gets_in(old), await gets_in(new)) == (True, False)
    put("leaf.key")
    put("ca.pem")
    assert (await gets_in(old), await gets_in(new)) == (False, True)
    # A connection that was there goes on.
    assert await ask(before, *messages) == ReportAck(7)
    await before.close()
    (mounted / "leaf.pem").unlink()
    assert await gets_in(new)


@pytest.mark.integration
async def test_a_rank_follows_its_certificates_with_the_next_connection(serve, tmp_path):
    """The agent's own link, cut by age: both ends change to another CA under it, and it comes back by itself."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    for authority in (old, new):
        authority.issue("leaf")
        authority.issue("rank")
    mounted = tmp_path / "mounted"
    shutil.copytree(old.folder, mounted)
    server, _ = await serve(
        **old.files("leaf", mounted), max_connection_age_s=0.5, max_connection_age_grace_s=0.2
    )
    streams: list[int] = []

    class Listener:
        def hello(self):
            return HELLO

        def heartbeat(self):
            return Heartbeat(7, 1, 2)

        def received(self, stream, message):
            if isinstance(message, Registration):
                streams.append(stream)

        def lost(self, stream):
            pass

    class Registering(Hub):
        async def attach(self, hello, stream):
            stream.send(Registration(RegistrationOutcome.ACCEPTED, 600.0, 600.0, FlowControl(1.0)))
            return await super().attach(hello, stream)

    server._hub = Registering()
    tls = LinkTls(mounted / "ca.pem", mounted / "rank.pem", mounted / "rank.key")
    timing = LinkTiming(backoff_min_s=0.02, backoff_max_s=0.1)
    link = GrpcRankLink([f"127.0.0.1:{server.port}"], timing=timing, tls=tls)
    running = asyncio.create_task(link.run(Listener()))
    try:
        await until(lambda: len(streams) >= 2)
        for name in ("ca.pem", "leaf.pem", "leaf.key", "rank.pem", "rank.key"):
            shutil.copy(new.folder / name, tmp_path / "fresh")
            (tmp_path / "fresh").replace(mounted / name)
        before = len(streams)
        await until(lambda: len(streams) >= before + 2)
        # The server speaks for the new CA only: it was the new certificate that came in.
        with pytest.raises(grpc.aio.AioRpcError):
            async with old.channel(server.port, "rank") as channel:
                await ask(channel, encode_rank_message(HELLO))
        # A file that is gone for a moment is waited for.
        (mounted / "rank.key").unlink()
        seen = len(streams)
        await asyncio.sleep(1.5)
        assert len(streams) <= seen + 1
        shutil.copy(new.folder / "rank.key", mounted / "rank.key")
        await until(lambda: len(streams) >= seen + 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.integration
async def test_a_key_of_another_certificate_is_refused_at_the_start(authority):
    authority.issue("other")
    with pytest.raises(InvalidInput, match="cannot listen"):
        GrpcServer(
            make_options(**authority.files("leaf", tls_key_file=authority.folder / "other.key"))
        ).bind()


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
            await stub.Check(health_pb2.HealthCheckRequest(service="evenkeel.v1.Nothing"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
