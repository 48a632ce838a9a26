"""The addresses a controller listens on: in use, invalid, and IPv6; and hostile connections."""

import asyncio
import contextlib
import socket
import threading

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.adapters.grpc.server import GrpcServer
from evenkeel_moe.adapters.http_connections import PeerRates
from evenkeel_moe.adapters.http_servers import MetricsServer, RestServer
from evenkeel_moe.controller.process.options import server_options
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.peer_budget import PeerLimits
from evenkeel_moe.settings_sources import load_settings
from tests.adapters.serving import make_options
from tests.waiting import deadline, until


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


def listen(kind: str, host: str, port: int = 0):
    """A bound server; `close` frees the port."""
    if kind == "rest":
        return RestServer(host, port)
    if kind == "metrics":
        return MetricsServer(CollectorRegistry(), host, port)
    server = GrpcServer(make_options(host=host, port=port))
    server.bind()
    return server


async def close(server) -> None:
    if isinstance(server, GrpcServer):
        await server.stop(0)
    else:
        server.close()


def test_an_ipv6_address_is_distinguished_from_its_port():
    assert host_port("::1", 5) == "[::1]:5"
    assert host_port("node-1", 5) == "node-1:5"


@pytest.mark.integration
@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_one_form_of_an_ipv6_address_serves_for_all_three(host):
    servers = [listen(kind, host) for kind in ("grpc", "rest", "metrics")]
    try:
        await servers[0]._port.start()
        async with grpc.aio.insecure_channel(f"[::1]:{servers[0].port}") as channel:
            await channel.channel_ready()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://[::1]:{servers[2].port}/metrics")).status_code == 200
        with socket.socket(socket.AF_INET6) as second, pytest.raises(OSError, match="in use"):
            second.bind(("::1", servers[1].port))
    finally:
        for server in servers:
            await close(server)


@pytest.mark.integration
async def test_grpc_accepts_the_largest_values_of_settings(monkeypatch):
    for name in (
        "KEEPALIVE_S",
        "KEEPALIVE_TIMEOUT_S",
        "MAX_CONNECTION_AGE_S",
        "MAX_CONNECTION_AGE_GRACE_S",
    ):
        monkeypatch.setenv(f"EVENKEEL_GRPC__{name}", "2000000")
    monkeypatch.setenv("EVENKEEL_GRPC__MAX_MESSAGE_BYTES", str(2**31 - 1))
    monkeypatch.setenv("EVENKEEL_GRPC__PORT", "0")
    server = GrpcServer(server_options(load_settings()))
    server.bind()
    await close(server)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["rest", "metrics", "grpc"])
async def test_an_unusable_address_is_named(kind):
    server = listen(kind, "127.0.0.1")
    try:
        with pytest.raises(
            InvalidInput, match=rf"cannot listen for \w+ on 127.0.0.1:{server.port}: "
        ):
            listen(kind, "127.0.0.1", server.port)
    finally:
        await close(server)
    # Too long for a name: the lookup fails before it asks anyone.
    with pytest.raises(InvalidInput, match="cannot listen"):
        listen(kind, "a" * 64)


async def answer(scope, receive, send):
    """Read the body, then answer."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    size = scope["path"].strip("/")
    await send({"type": "http.response.body", "body": b"x" * (int(size) if size.isdigit() else 0)})


@contextlib.asynccontextmanager
async def serving_rest(most: int, app=answer, probes=(), **limits):
    limited = PeerLimits(connections=most, **limits)
    server = RestServer("127.0.0.1", 0, limits=limited, probes=probes)
    running = asyncio.create_task(server.run(app))
    try:
        yield server
    finally:
        server.stop()
        await running
        server.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), deadline(20)) == b""
    except ConnectionError:
        return True


HALF = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx"


@pytest.mark.integration
@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n"])
async def test_connections_without_a_request_do_not_keep_others_out(half):
    async with serving_rest(most=20) as server:
        opened = []
        for _ in range(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(half)
            opened.append((reader, writer))
        await until(lambda: len(server.connections) == 20)
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(3):
                url = f"http://127.0.0.1:{server.port}/"
                assert (await client.get(url, timeout=deadline(5))).status_code == 200
        assert await is_closed(opened[0][0]), "the oldest gave way"
        for _, writer in opened:
            writer.close()


@pytest.mark.integration
@pytest.mark.parametrize("part", [b"", b"GET / HTTP/1.1\r\n", HALF])
async def test_a_request_that_does_not_arrive_in_time_ends_its_connection(part):
    async with serving_rest(most=20, request_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(part)
        assert await is_closed(reader)
        writer.close()


@pytest.mark.fault("a controller with a client that sends half a request", "waited for ever")
@pytest.mark.integration
async def test_half_a_request_that_comes_together_with_another_ends_its_connection():
    async with serving_rest(most=20, request_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + HALF)
        with contextlib.suppress(ConnectionError):
            answered = await asyncio.wait_for(reader.read(), deadline(20))
            assert answered.count(b"HTTP/1.1 200") == 1
        writer.close()


@pytest.mark.integration
async def test_a_client_that_does_not_read_its_answer_is_let_go():
    async with serving_rest(most=20, answer_s=0.2) as server:
        with socket.socket() as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET /90000000 HTTP/1.1\r\nHost: a\r\n\r\n")
            await until(lambda: len(server.connections) == 1)
            await until(lambda: len(server.connections) == 0)


crowd = pytest.mark.fault(
    "a controller with a crowd at its port", "480 clients that never read made its probes fail"
)
OTHER_ADDRESS = "127.0.0.2"
"""Of a client that is none of the crowd."""


class Crowd:
    """Clients of one address that send request after request and never read."""

    def __init__(self, port: int, size: int) -> None:
        self._port = port
        self._sockets = [socket.socket() for _ in range(size)]

    async def __aenter__(self):
        for one in self._sockets:
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", self._port))
            one.send(b"GET /50000 HTTP/1.1\r\nHost: a\r\n\r\n" * 300)
        return self

    async def __aexit__(self, *_):
        for one in self._sockets:
            one.close()


def other_client() -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=OTHER_ADDRESS)
    return httpx.AsyncClient(transport=transport, timeout=deadline(5))


@crowd
@pytest.mark.integration
async def test_a_client_finds_a_place_beside_a_crowd_that_does_not_read():
    async with serving_rest(most=40) as server, Crowd(server.port, 40), other_client() as client:
        await until(lambda: len(server.connections) == 40)
        for _ in range(3):
            found = await client.get(f"http://127.0.0.1:{server.port}/healthz")
            assert found.status_code == 200


@crowd
@pytest.mark.integration
async def test_requests_of_an_address_are_rated_and_those_of_others_do_not_wait():
    taken = []

    async def count(scope, receive, send):
        taken.append(scope["client"])
        scope = {**scope, "path": "/1"}
        await answer(scope, receive, send)

    loop = asyncio.get_running_loop()
    began = loop.time()
    async with serving_rest(most=100, app=count) as server, Crowd(server.port, 60):
        await until(lambda: len(taken) > 300)
        async with other_client() as client:
            found = await client.get(f"http://127.0.0.1:{server.port}/")
            assert found.status_code == 200
        of_crowd = sum(host != OTHER_ADDRESS for host, _ in taken)
        assert of_crowd <= 200 + 200 * (loop.time() - began) + 1


@crowd
def test_a_request_waits_for_its_turn_and_never_longer_than_some_seconds():
    rates = PeerRates(PeerLimits(requests_per_s=10, request_burst=20, request_turn_s=3))
    assert [rates.wait_s("a", now=5.0) for _ in range(20)] == [0.0] * 20
    waits = [rates.wait_s("a", now=5.0) for _ in range(60)]
    assert waits[:30] == pytest.approx([number / 10 for number in range(1, 31)])
    assert waits[30:] == [3.0] * 30
    assert rates.wait_s("b", now=5.0) == 0.0
    assert rates.wait_s("a", now=6.0) == pytest.approx(2.0, abs=0.11), "the others did not count"
    assert rates.wait_s("a", now=60.0) == 0.0


@crowd
def test_addresses_that_asked_long_ago_are_forgotten():
    rates = PeerRates(PeerLimits(requests_per_s=10, request_burst=20, request_turn_s=3))
    for number in range(10_000):
        rates.wait_s(f"host-{number}", now=float(number))
    assert len(rates) < 2000


@crowd
@pytest.mark.integration
async def test_a_probe_waits_for_no_other_request_of_its_address():
    rate = {"requests_per_s": 0.001, "request_burst": 1, "request_turn_s": 1000.0}
    async with serving_rest(most=40, probes={"/8"}, **rate) as server:

        async def ask(path):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            return reader, writer

        opened = [await ask(path) for path in ("/7", "/7", "/8", "/8")]
        for reader, _ in [opened[0], *opened[2:]]:
            line = await asyncio.wait_for(reader.readline(), deadline(20))
            assert line.startswith(b"HTTP/1.1 200")
        opened[3][1].write(b"GET /8 HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: sum(one.has_request for one in server.connections) == 2)
        for _, writer in opened:
            writer.close()


@pytest.mark.integration
async def test_open_connections_to_the_metrics_take_no_thread_each():
    registry = CollectorRegistry()
    Gauge("found", "Found.", registry=registry).set(7)
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        before = set(threading.enumerate())
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(150)]
        async with httpx.AsyncClient(trust_env=False) as client:
            found = await client.get(
                f"http://127.0.0.1:{server.port}/metrics", timeout=deadline(10)
            )
            assert "found 7.0" in found.text
            assert found.headers["content-type"].startswith("text/plain")
            # Of a version that is not a number.
            accept = {"Accept": "application/openmetrics-text;version=abc"}
            found = await client.get(
                f"http://127.0.0.1:{server.port}/metrics", headers=accept, timeout=deadline(10)
            )
            assert "found 7.0" in found.text
            assert found.headers["content-type"].startswith("text/plain")
        # Threads of earlier tests may end meanwhile.
        assert set(threading.enumerate()) <= before
        for _, writer in opened:
            writer.close()
    finally:
        server.close()
