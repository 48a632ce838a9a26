"""Stores that tests start as processes."""

import pytest

from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from tests.integration.store_server import Server


@pytest.fixture
async def store(tmp_path):
    """Yield an embedded store that runs."""
    server = EmbeddedValkey(tmp_path / "shared")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def start_server(tmp_path, unused_tcp_port_factory):
    """Yield a function that starts a server with options; all of them end with the test."""
    started: list[Server] = []

    async def start(*options: str) -> Server:
        folder = tmp_path / f"store{len(started) or ''}"
        one = Server(folder, unused_tcp_port_factory(), *options)
        one.start()
        started.append(one)
        await one.answering()
        return one

    yield start
    for one in started:
        one.end()
