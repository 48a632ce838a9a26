"""The addresses a controller listens on: in use, invalid, and IPv6."""

import socket

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.adapters.grpc.server import GrpcServer
from evenkeel_moe.adapters.http_servers import MetricsServer, RestServer
from evenkeel_moe.controller.process.options import server_options
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.settings_sources import load_settings
from tests.adapters.serving import make_options


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
        await servers[0]._server.start()
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
