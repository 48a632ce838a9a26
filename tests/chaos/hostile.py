"""Clients that misbehave: `python -m tests.chaos.hostile GRPC_PORT REST_PORT SECONDS SEED`.

It runs as a separate process that ends by itself; its result is not used.
"""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import httpx

from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from tests.chaos.processes import DEPLOYMENT
from tests.integration.controller_rig import Group, Rank

__all__ = ["flood", "main"]

_METHOD = "/evenkeel.v1.RankLink/Attach"


@contextlib.asynccontextmanager
async def _connection(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    """Open a connection, and reset it at the end."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield writer
    finally:
        writer.transport.abort()


async def noise(port: int, rng: random.Random) -> None:
    """Bytes that are no HTTP/2."""
    async with _connection(port) as writer:
        writer.write(rng.randbytes(rng.randrange(1, 100_000)))
        with contextlib.suppress(OSError):
            await writer.drain()


async def half_open(port: int, rng: random.Random) -> None:
    """A connection that says nothing."""
    async with _connection(port):
        await asyncio.sleep(rng.uniform(0.5, 2.0))


async def no_message(port: int, rng: random.Random) -> None:
    """A stream that begins with noise."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(_METHOD)()
        await call.write(rng.randbytes(rng.randrange(0, 5000)))
        await asyncio.wait_for(call.read(), 2)


async def silence(port: int, rng: random.Random) -> None:
    """Many streams that never say Hello."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [channel.stream_stream(_METHOD)() for _ in range(50)]
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        for call in calls:
            call.cancel()


async def impostor(port: int, rng: random.Random) -> None:
    """A rank of the real deployment that cannot be right."""
    async with Group(DEPLOYMENT, generation=f"other-{rng.randrange(3)}") as group:
        rank = Rank(group, rng.randrange(4))
        old = m.RankIdentity(group.deployment, rank.identity.rank, group.generation, 1)
        await asyncio.wait_for(rank.connect(f"127.0.0.1:{port}", identity=old), 3)
        await rank.close()


async def flood(port: int, rng: random.Random, seconds: float = 2.0) -> None:
    """A stranger that registers, then sends as fast as it can."""
    async with Group(f"stranger-{rng.randrange(5)}") as group:
        rank = group.ranks[0]
        await asyncio.wait_for(rank.connect(f"127.0.0.1:{port}"), 5)
        report = encode_rank_message(group.route(8)[0])
        vote = encode_rank_message(m.Vote(WaveKey(group.generation, PlanId("none"), 0, 1), True))
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await rank.send_wire(rng.choice((report, vote)))


async def slow_reader(port: int, rng: random.Random) -> None:
    """Registers and never reads again."""
    async with Group(f"stranger-{rng.randrange(5)}") as group:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = agent_pb2_grpc.RankLinkStub(channel).Attach()  # type: ignore[no-untyped-call]
            await call.write(encode_rank_message(group.ranks[1].hello()))
            await asyncio.sleep(rng.uniform(1.0, 3.0))
            call.cancel()


async def rest(port: int, rng: random.Random) -> None:
    """Requests nobody may make, and bodies nobody can read."""
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=2
    ) as client:
        await client.post(f"/v1/deployments/{DEPLOYMENT}/plans", content=rng.randbytes(5000))
        await client.get("/v1/deployments", headers={"Authorization": "Bearer wrong"})
        await client.post(f"/v1/deployments/{DEPLOYMENT}/freeze", json={"seconds": "for ever"})


_AT_GRPC: tuple[Callable[[int, random.Random], Awaitable[None]], ...] = (
    noise,
    half_open,
    no_message,
    silence,
    impostor,
    flood,
    slow_reader,
)


async def main(grpc_port: int, rest_port: int, seconds: float, seed: int) -> None:
    """Misbehave for a period, with a few clients at a time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def misbehave(rng: random.Random) -> None:
        while loop.time() < until:
            with contextlib.suppress(Exception):
                if rng.random() < 0.2:
                    await rest(rest_port, rng)
                else:
                    await rng.choice(_AT_GRPC)(grpc_port, rng)
            await asyncio.sleep(0.05)

    async with asyncio.timeout(seconds + 10):
        await asyncio.gather(*(misbehave(random.Random(seed + number)) for number in range(3)))


if __name__ == "__main__":
    with contextlib.suppress(TimeoutError):
        asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
