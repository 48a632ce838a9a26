"""Hostile peers: ranks that contradict each other, and strangers at the ports of a controller."""

import asyncio
import socket

import grpc
import psutil
import pytest

from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.terms import MAX_TERM
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire import link
from tests.adapters.serving import Authority
from tests.contracts.conftest import connected
from tests.integration.controller_rig import Controller, Group
from tests.waiting import deadline, slowness, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ONE_RANK = ModelShape(2, 8, 1, 8, 2, 64)


async def test_one_rank_that_names_the_highest_term_locks_nobody_out(tmp_path):
    async with Controller(tmp_path) as controller, Group() as honest, Group() as liar:
        await honest.join(controller)
        before = await controller.status()
        liar.ranks[0].term = MAX_TERM
        answer = await liar.ranks[0].connect(controller.address)
        assert answer.outcome is link.RegistrationOutcome.REFUSED
        assert answer.reason == "limit_exceeded"
        await honest.serve(8)
        await until(lambda: controller.counted(8))
        after = await controller.status()
        assert (after["term"], after["state"], after["held"]) == (before["term"], "ready", False)
        assert all(not rank.call.done() for rank in honest.ranks)


async def test_a_second_group_waits_while_the_first_is_whole_and_gives_its_place_back(tmp_path):
    lease = {"INGEST__RANK_LEASE_S": "3", "INGEST__HEARTBEAT_S": "1"}
    async with (
        Controller(tmp_path, **lease) as controller,
        Group(generation="first") as first,
        Group(generation="second") as second,
    ):
        for rank in first.ranks:
            rank.epoch = Epoch(5)
        await first.join(controller)
        first.serve_on(every_s=0.3)
        answer = await second.ranks[0].connect(controller.address)
        assert (answer.outcome, answer.reason) == (
            link.RegistrationOutcome.REFUSED,
            "deployment_in_use",
        )
        assert (await controller.status())["generation"] == "first"
        await first.ranks[0].close()
        await until(lambda: _is_taken(second, controller), within_s=30)
        assert (await controller.status())["generation"] == "second"
        # The ranks of the first that still have their streams are told, and their streams end.
        await until(lambda: all(rank.reader.done() for rank in first.ranks))
        assert len(controller.events("rank_displaced")) == 3
        name = 'evenkeel_ranks_displaced_total{deployment="demo"}'
        assert (await controller.metrics())[name] == 3
        await until(lambda: controller.state("ready"))
        # What is recorded of the first stays, for a rollback by hand.
        assert await _epochs(controller) == [(0, False), (5, True)]
        for rank in second.ranks:
            await rank.close()
        await until(lambda: _is_taken(first, controller), within_s=30)
        await until(lambda: controller.state("ready"))
        assert (await controller.status())["generation"] == "first"
        assert await _epochs(controller) == [(5, False), (0, True), (5, True)]


async def _epochs(controller: Controller) -> list[tuple[int, bool]]:
    rows = (await controller.http.get("/v1/deployments/demo/epochs")).json()["items"]
    return [(row["epoch"], row["replaced"]) for row in rows]


async def _is_taken(group: Group, controller: Controller) -> bool:
    """Let every rank of a group that has no stream say hello; True once all are taken."""
    accepted = link.RegistrationOutcome.ACCEPTED
    for rank in group.ranks:
        if not hasattr(rank, "reader") or rank.reader.done():
            await rank.close()
            await rank.connect(controller.address)
    return all(rank.answer.outcome is accepted for rank in group.ranks)


def socket_of(data_dir) -> str:
    """The URL of a controller's own store."""
    folder = (data_dir / "valkey" / "socket-folder").read_text()
    return f"unix://{folder}/valkey.sock"


async def test_names_of_which_one_rank_says_hello_leave_nothing_in_the_store(tmp_path):
    settings = {"INGEST__MAX_NEW_DEPLOYMENTS": "20", "INGEST__FORGET_AFTER_S": "4"}
    async with Controller(tmp_path, **settings) as controller, Group("honest") as honest:
        await honest.join(controller)

        async def is_only_honest() -> bool:
            return not await client.keys("evenkeel:{name-*")

        async def has_epoch() -> bool:
            return bool(await client.exists("evenkeel:{honest}:epochs"))

        async with connected(socket_of(tmp_path)) as client:
            await until(has_epoch)
            reasons = await _invent_names(controller, 300)
            # Besides the lease each has its term, and where its leader is.
            assert len(await client.keys("evenkeel:{name-*")) <= 20 * 4
            await until(is_only_honest, within_s=30)
            assert await client.zrange("evenkeel:seen", 0, -1) == [b"honest"]
            assert reasons == [None] * 20 + ["limit_exceeded"] * 280
        name = 'evenkeel_deployments_refused_total{limit="max_new_deployments"}'
        assert (await controller.metrics())[name] == 280
        assert await controller.state("ready", "honest")


async def _invent_names(controller: Controller, count: int) -> list[str | None]:
    """Say hello as one rank of each of so many deployments, then hang up; the answers' reasons."""
    ranks = []
    for number in range(count):
        # A term that ranks know of makes a deployment look like one whose records were lost.
        group = Group(f"name-{number}")
        ranks.append(group.ranks[0])
        ranks[-1].term = number % 3
        await ranks[-1].connect(controller.address)
    for rank in ranks:
        await rank.close()
    return [rank.answer.reason for rank in ranks]


@pytest.mark.fault(
    "a fleet beside a stranger", "220 groups of one rank took its lease: the store's pool was full"
)
async def test_many_groups_of_a_stranger_cost_no_lease(tmp_path):
    # 220 leases at once take a busy machine longer.
    settings = {"INGEST__MAX_NEW_DEPLOYMENTS": "256", "LEADER__LEASE_S": f"{deadline(2.0):.1f}"}
    async with Controller(tmp_path, **settings) as controller, Group(seed=1) as honest:
        await honest.join(controller)
        before = await controller.status()
        strangers = [Group(f"stranger-{number}", ONE_RANK) for number in range(220)]

        async def all_led() -> bool:
            rows = (await controller.http.get("/v1/deployments?page_size=1000")).json()["items"]
            return sum(row["state"] == "ready" for row in rows) == 221

        async with connected(socket_of(tmp_path), timeout_s=deadline(5)) as client:
            await asyncio.gather(*(stranger.connect(controller.address) for stranger in strangers))
            await until(all_led, within_s=60)
            # A store that is slow for a moment: every lease is renewed at the same time.
            await client.client_pause(1500, all=True)
            await client.ping()
            await until(lambda: controller.state("ready"))
            after = await controller.status()
        await asyncio.gather(*(stranger.ranks[0].close() for stranger in strangers))
        assert after["term"] == before["term"]
    for event in ("store_lost", "lease_lost", "lease_not_acquired", "lease_not_released"):
        assert not controller.events(event)


# --- requests of strangers, who have no token, to the REST API and to the metrics -----------------


BODY_BYTES = 8 << 20


async def answer_to(port: int, request: bytes) -> bytes:
    """Return the first line of the answer, while the connection is still open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        line = await asyncio.wait_for(reader.readline(), deadline(20))
        return line.rstrip()
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("asked", "answered"),
    [("POST /healthz", b"HTTP/1.1 401 Unauthorized"), ("GET /healthz", b"HTTP/1.1 200 OK")],
)
async def test_bodies_of_strangers_are_not_waited_for(tmp_path, asked, answered):
    """A hundred that lacked their last byte took 830 MiB."""
    head = f"{asked} HTTP/1.1\r\nHost: a\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()
    request = head + b"x" * (BODY_BYTES - 1)
    async with Controller(tmp_path) as controller:
        port = controller.ports["rest"]
        found = await asyncio.gather(*(answer_to(port, request) for _ in range(10)))
        assert found == [answered] * 10


@pytest.mark.fault(
    "a controller with a crowd at its port", "480 clients that never read made its probes fail"
)
@pytest.mark.parametrize(
    ("path", "address"),
    [("/", "127.0.0.2"), ("/healthz", "127.0.0.2"), ("/", "127.0.0.1"), ("/readyz", "127.0.0.1")],
)
async def test_probes_are_answered_beside_a_crowd_that_does_not_read(tmp_path, path, address):
    """Also where a network puts its own address in the place of all others.

    Measured is the processor's time until all are answered, which no other process changes.
    """
    async with Controller(tmp_path) as controller:
        port, process = controller.ports["rest"], psutil.Process(controller.process.pid)
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(480)]
        try:
            began = sum(process.cpu_times()[:2])
            for one in opened:
                one.setblocking(False)
                one.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() * 500)
            for probe in ["/healthz", "/readyz"] * 3:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, local_addr=(address, 0)
                )
                writer.write(f"GET {probe} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
                line = await asyncio.wait_for(reader.readline(), deadline(20))
                writer.close()
                assert line.startswith(b"HTTP/1.1 200")
            used_s = sum(process.cpu_times()[:2]) - began
        finally:
            for one in opened:
                one.close()
        # The chart's probes wait 3 s.
        assert used_s < 2 * max(1.0, slowness())


# --- connections that gRPC's core refuses by itself -----------------------------------------------


MANY = 300


async def send_gzip(port: int, count: int) -> None:
    """Begin streams whose messages are compressed."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options, grpc.Compression.Gzip
    ) as channel:
        stub = agent_pb2_grpc.RankLinkStub(channel)
        calls = [stub.Attach() for _ in range(count)]
        assert {await call.code() for call in calls} == {grpc.StatusCode.UNIMPLEMENTED}


async def send_clear_text(port: int, count: int) -> None:
    """Speak HTTP without TLS, until the connection ends."""
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        try:
            await asyncio.wait_for(reader.read(), deadline(20))
        except ConnectionError:
            pass
        writer.close()


@pytest.mark.fault(
    "an operator who reads the log", "refused connections wrote 1,000 lines past it, not counted"
)
@pytest.mark.parametrize(
    ("send", "words"), [(send_gzip, "'gzip' is disabled"), (send_clear_text, "HTTP_REQUEST")]
)
async def test_what_the_core_refuses_is_counted_and_logged_once_a_second(tmp_path, send, words):
    tls = {}
    if send is send_clear_text:
        authority = Authority(tmp_path)
        authority.issue("server")
        tls = {
            f"GRPC__{name.upper()}": str(path)
            for name, path in authority.files("server").items()
            if name != "tls_client_ca_file"
        }
    async with Controller(tmp_path / "data", **tls) as controller:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await send(controller.ports["grpc"], MANY)
        sent = MANY
        assert not controller.noise, "lines that are no JSON"

        def rows() -> list[dict]:
            return [row for row in controller.events("grpc_core") if words in row["detail"]]

        def told() -> int:
            return len(rows()) + sum(row.get("left_out", 0) for row in rows())

        async def counted() -> bool:
            nonlocal sent
            await send(controller.ports["grpc"], 1)
            sent += 1
            return told() > 0.9 * sent

        await until(counted, every_s=0.2)
        assert told() <= sent
        assert len(rows()) <= loop.time() - began + 1
        assert not controller.noise
