"""TLS of the server: which certificates it accepts, the ranks they name, and files that change."""

import asyncio
import shutil
from dataclasses import replace

import grpc
import pytest
import structlog

from evenkeel_moe.adapters.grpc import rank_port
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming, LinkTls
from evenkeel_moe.adapters.grpc.server import GrpcServer
from evenkeel_moe.adapters.grpc.server_tls import Grant, read_grants
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import DeploymentId, EpRank
from evenkeel_moe.v1 import agent_pb2, agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.link import Heartbeat, NotLeader, ReportAck
from tests.adapters.serving import Authority, Listener, RegisteringHub, ask, make_options
from tests.waiting import deadline, until
from tests.wire.wires import HELLO


@pytest.mark.integration
async def test_with_a_client_ca_only_ranks_with_a_certificate_are_accepted(serve, authority):
    server, _ = await serve(**authority.files("leaf"))
    ca, key, leaf = authority.read("ca.pem", "leaf.key", "leaf.pem")
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


# --- the ranks a certificate names ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "grants"),
    [
        ((), None),
        (("spiffe://cluster/ns/sa", "https://example.com"), None),
        (("evenkeel://demo/ranks/0-7",), (Grant("demo", 0, 7),)),
        (("evenkeel://demo/ranks/3", "spiffe://x"), (Grant("demo", 3, 3),)),
        (
            ("evenkeel://demo", "evenkeel://a.b-c/ranks/8-15"),
            (Grant("demo"), Grant("a.b-c", 8, 15)),
        ),
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
async def test_a_certificate_without_ranks_is_accepted_unless_names_are_required(
    serve, authority, required
):
    server, hub = await serve(**authority.files("leaf", tls_require_identity=required))
    async with authority.channel(server.port, "leaf") as channel:
        answer = await ask(channel, hello_of("demo", 9), encode_rank_message(Heartbeat(7, 1, 2)))
    assert [violation.reason for violation in hub.refused] == [Reason.IDENTITY_REFUSED] * required
    assert isinstance(answer, NotLeader if required else ReportAck)


# --- certificates that change ---------------------------------------------------------------------


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
    # A connection that was there goes on until the next look at the CAs.
    assert await ask(before, *messages) == ReportAck(7)
    await before.close()
    (mounted / "leaf.pem").unlink()
    assert await gets_in(new)


@pytest.mark.integration
async def test_a_ca_that_is_taken_away_ends_the_streams_of_its_ranks(serve, tmp_path, monkeypatch):
    """One that is added ends none, and an unusable file changes nothing."""
    monkeypatch.setattr(rank_port, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(rank_port, "_RETRY_S", 0.05)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    for authority in (old, new):
        authority.issue("leaf")
    mounted = tmp_path / "ca.pem"

    def trust(*authorities, more=b""):
        whole = b"".join(one.read("ca.pem")[0] for one in authorities) + more
        (tmp_path / "fresh").write_bytes(whole)
        (tmp_path / "fresh").replace(mounted)

    trust(old)
    server, _ = await serve(**{**old.files("leaf"), "tls_client_ca_file": mounted})
    hello, beat = encode_rank_message(HELLO), encode_rank_message(Heartbeat(7, 1, 2))
    async with old.channel(server.port, "leaf") as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(hello)

        async def answers() -> bool:
            await call.write(beat)
            return await asyncio.wait_for(call.read(), deadline(10)) is not grpc.aio.EOF

        assert await answers()
        with structlog.testing.capture_logs() as logs:
            trust(old, new)
            await until(lambda: any(log["event"] == "certificate_changed" for log in logs))
            trust(more=b"no certificate")
            await until(lambda: any(log["event"] == "certificate_not_taken" for log in logs))
            assert await answers()
            trust(new)
            await until(lambda: any(log["event"] == "client_ca_removed" for log in logs))
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            for _ in range(1000):
                await answers()
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, hello, beat)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    ca, key, leaf = old.read("ca.pem")[0], *new.read("leaf.key", "leaf.pem")
    known = grpc.ssl_channel_credentials(ca, key, leaf)
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", known) as channel:
        assert await ask(channel, hello, beat) == ReportAck(7)


@pytest.mark.integration
async def test_a_rank_follows_its_certificates_with_the_next_connection(serve, tmp_path):
    """Both ends change to another CA; the agent's link, cut by age, reconnects by itself."""
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
    server._hub = RegisteringHub()
    rank = Listener()
    tls = LinkTls(mounted / "ca.pem", mounted / "rank.pem", mounted / "rank.key")
    timing = LinkTiming(backoff_min_s=0.02, backoff_max_s=0.1)
    link = GrpcRankLink([f"127.0.0.1:{server.port}"], timing=timing, tls=tls)
    running = asyncio.create_task(link.run(rank))
    try:
        await until(lambda: len(rank.registrations) >= 2)
        for name in ("ca.pem", "leaf.pem", "leaf.key", "rank.pem", "rank.key"):
            shutil.copy(new.folder / name, tmp_path / "fresh")
            (tmp_path / "fresh").replace(mounted / name)
        before = len(rank.registrations)
        await until(lambda: len(rank.registrations) >= before + 2)
        # The server speaks for the new CA only: it was the new certificate that came in.
        with pytest.raises(grpc.aio.AioRpcError):
            async with old.channel(server.port, "rank") as channel:
                await ask(channel, encode_rank_message(HELLO))
        # While a file is missing, the link tries again and again.
        with structlog.testing.capture_logs() as logs:
            (mounted / "rank.key").unlink()
            seen = len(rank.registrations)
            await until(lambda: sum("No such file" in log.get("detail", "") for log in logs) > 2)
        assert len(rank.registrations) <= seen + 1
        shutil.copy(new.folder / "rank.key", mounted / "rank.key")
        await until(lambda: len(rank.registrations) >= seen + 2)
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
