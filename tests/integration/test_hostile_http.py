"""Requests of strangers, who have no token, to the REST API and to the metrics."""

import asyncio

import pytest

from tests.integration.controller_rig import Controller
from tests.waiting import deadline

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
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
