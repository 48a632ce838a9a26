"""Requests of strangers, who have no token, to the REST API and to the metrics."""

import asyncio
import socket

import psutil
import pytest

from tests.integration.controller_rig import Controller
from tests.waiting import deadline, slowness

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
