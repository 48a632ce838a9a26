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
async def start_server(tmp_path, unused_tcp_port):
    """Yield a function that starts a server with options; all of them end with the test."""
    started: list[Server] = []

    async def start(*options: str, url: str = "") -> Server:
        one = Server(tmp_path / "store", unused_tcp_port, *options)
        one.start()
        started.append(one)
        await one.answering(url or f"redis://127.0.0.1:{one.port}")
        return one

    yield start
    for one in started:
        one.end()
