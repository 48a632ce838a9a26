"""Connections to the ranks' port that gRPC's core refuses by itself, before any code of ours."""

import asyncio

import grpc
import pytest

from evenkeel_moe.v1 import agent_pb2_grpc
from tests.adapters.serving import Authority
from tests.integration.controller_rig import Controller
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
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
