"""Hostile peers: each does for some time what once brought a controller down.

A peer returns in some words what became of it. `PEERS` names the words that are refusals as
promised; any other answer breaks a promise.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.protocol.terms import MAX_TERM
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.codec import encode_rank_message
from tests.chaos import hostile
from tests.controller.leadership import test_bad_records
from tests.controller.replicas import DEMO
from tests.integration.controller_rig import Controller, Group, Rank

HONEST = "fleet"
"""The deployment that `tests.chaos.hostile` attacks too."""
LARGE = ModelShape(64, 512, 2, 512, 2, 64)
"""A map of 262,144 bytes."""
OTHER = ModelShape(3, 16, 1, 16, 2, 64)
TAKEN = "taken"
_numbers = itertools.count()
_ATTACH = "/evenkeel.v1.RankLink/Attach"
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What gRPC raises on a stream that the controller ends, before and after gRPC knows of it."""


@dataclass(frozen=True)
class Target:
    """What peers attack."""

    controller: Controller
    store: Any
    """A client of the store."""
    honest_generation: str

    @property
    def address(self) -> str:
        return self.controller.address


def _told(answer: Any) -> str:
    """Return the answer to a Hello in a word."""
    reason = getattr(answer, "reason", None)
    outcome = getattr(answer, "outcome", None)
    if outcome is None:
        return f"{type(answer).__name__}"
    return str(reason.value if hasattr(reason, "value") else reason) if reason else TAKEN


async def _ended(call: Any, within_s: float) -> str:
    """Return the status with which a stream ends.

    gRPC's client calls it INTERNAL where the stream ends while it writes.
    """
    async with asyncio.timeout(within_s):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return str((await call.code()).name)


async def silent_streams(target: Target, rng: random.Random) -> str:
    """Streams without a Hello, more than may wait."""
    async with grpc.aio.insecure_channel(target.address) as channel:
        calls = [agent_pb2_grpc.RankLinkStub(channel).Attach() for _ in range(700)]
        await asyncio.sleep(rng.uniform(1, 12))
        ended = sum(call.done() for call in calls)
        for call in calls:
            call.cancel()
    return "some or all were ended" if ended else "none was ended"


async def silent_ranks(target: Target, rng: random.Random) -> str:
    """Ranks that say nothing after their Hello."""
    group = Group(f"silent-{rng.randrange(8)}")
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(encode_rank_message(group.ranks[0].hello()))
        return await _ended(call, 25)


async def half_open(target: Target, rng: random.Random) -> str:
    """Connections to REST and metrics that send half a request."""
    opened = []
    for number in range(700):
        port = target.controller.ports["rest" if number % 2 else "metrics"]
        with contextlib.suppress(OSError):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            opened[-1][1].write(b"GET / HTTP/1.1\r\n")
    await asyncio.sleep(rng.uniform(1, 25))
    closed = 0
    for reader, writer in opened:
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(), 0.001)
            closed += 1
        writer.close()
    return "some or all were closed" if closed else "none was closed"


async def second_group(target: Target, _rng: random.Random) -> str:
    """Another group under the name of the honest one."""
    async with Group(HONEST, generation=f"stranger-{next(_numbers)}") as group:
        answers = [_told(await rank.connect(target.address)) for rank in group.ranks]
    return " ".join(sorted(set(answers)))


async def highest_term(target: Target, _rng: random.Random) -> str:
    """A rank of the honest generation that knows the highest term."""
    async with Group(HONEST, generation=target.honest_generation) as group:
        group.ranks[0].term = MAX_TERM
        return _told(await group.ranks[0].connect(target.address))


async def two_shapes(target: Target, rng: random.Random) -> str:
    """Two groups of one generation with different shapes, and a rank of the honest one."""
    name = f"torn-{rng.randrange(4)}"
    async with (
        Group(name, generation="g") as one,
        Group(name, OTHER, generation="g") as other,
        Group(HONEST, LARGE, generation=target.honest_generation) as honest,
    ):
        for rank in one.ranks:
            await rank.connect(target.address)
        first = _told(await other.ranks[0].connect(target.address))
        return f"{first}, {_told(await honest.ranks[0].connect(target.address))}"


async def new_names(target: Target, rng: random.Random) -> str:
    """Names of which one rank says hello."""
    answers = set()
    for _ in range(20):
        async with Group(f"name-{next(_numbers)}") as group:
            group.ranks[0].term = rng.randrange(3)
            answers.add(_told(await group.ranks[0].connect(target.address)))
    return " ".join(sorted(answers))


async def oversized(target: Target, rng: random.Random) -> str:
    """A message larger than any right one of its shape."""
    group = Group(f"oversized-{rng.randrange(4)}")
    hello = encode_rank_message(group.ranks[0].hello()).SerializeToString()
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = channel.stream_stream(_ATTACH)()
        await call.write(hello)
        with contextlib.suppress(*_ENDED):
            await call.write(rng.randbytes(rng.choice((3, 30)) << 20))
        return await _ended(call, 25)


async def compressed(target: Target, rng: random.Random) -> str:
    """Messages that are a thousand times larger than what arrives."""
    group = Group(f"compressed-{rng.randrange(4)}")
    hello = replace(group.ranks[0].hello(), node="n" * 200)
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub = agent_pb2_grpc.RankLinkStub(channel)
        call = stub.Attach(compression=grpc.Compression.Gzip)
        with contextlib.suppress(*_ENDED):
            await call.write(encode_rank_message(hello))
        return await _ended(call, 25)


async def large_maps(target: Target, rng: random.Random) -> str:
    """A whole group with large maps that sends its state again and again."""
    name = f"large-{rng.randrange(2)}"
    async with Group(name, LARGE) as group:
        answers = {_told(await rank.connect(target.address)) for rank in group.ranks}
        query = m.QueryState(m.Leader("a", 1), True, True, 1)
        wire = encode_rank_message(group.ranks[0]._told(query))
        for _ in range(rng.randrange(40)):
            await group.ranks[0].send_wire(wire)
        placement = await _placement(target, name)
    return " ".join((*sorted(answers), f"placement {placement}"))


async def _placement(target: Target, name: str) -> str:
    """Ask for the placement; the answer is 503 until the controller knows the ranks' maps."""
    for _ in range(20):
        status = (await target.controller.http.get(f"/v1/deployments/{name}/placement")).status_code
        if status != 503:
            return "answered" if status < 500 else str(status)
        await asyncio.sleep(0.25)
    return "unknown yet"


async def large_bodies(target: Target, rng: random.Random) -> str:
    """Megabytes of wrong types, up to more than is taken."""
    body = b'{"target": {"physical_to_logical": [' + b'["x"],' * 1_600_000 + b"[1]]}}"
    headers = {"content-type": "application/json"}
    path = f"/v1/deployments/{HONEST}/plans"
    answer = await target.controller.http.post(
        path, content=body[: rng.randrange(len(body))], headers=headers
    )
    return f"{answer.status_code} in less than 64 KiB" if len(answer.content) < 1 << 16 else "large"


async def wrong_requests(target: Target, _rng: random.Random) -> str:
    """Hundreds of requests that are refused."""
    path = f"/v1/deployments/{HONEST}/plans/none/approve"
    found = set()
    for _ in range(200):
        found.add((await target.controller.http.post(path, json={"if": 1})).status_code)
    return " ".join(map(str, sorted(found)))


async def bad_records(target: Target, _rng: random.Random) -> str:
    """Bad records of every kind of another deployment, whose ranks then come."""
    await test_bad_records.damage(target.store, next(_numbers))
    async with Group(DEMO) as group:
        answers = {_told(await rank.connect(target.address)) for rank in group.ranks}
        await target.controller.status(DEMO)
    return " ".join(sorted(answers))


async def hostile_clients(target: Target, rng: random.Random) -> str:
    """Noise, floods, false identities and clients that never read."""
    ports = target.controller.ports
    await hostile.main(ports["grpc"], ports["rest"], 3.0, rng.randrange(1 << 30))
    return "went on for 3 s"


async def taken_over_rank(target: Target, rng: random.Random) -> str:
    """An older process of a rank of the honest group."""
    async with Group(HONEST, generation=target.honest_generation) as group:
        rank = Rank(group, rng.randrange(4))
        old = m.RankIdentity(group.deployment, EpRank(rank.rank), group.generation, 1)
        answer = _told(await rank.connect(target.address, identity=old))
        await rank.close()
    return answer


_LIMIT = "limit_exceeded"
Peer = Callable[[Target, random.Random], Awaitable[str]]
PEERS: dict[Peer, tuple[str, ...]] = {
    silent_streams: ("some or all were ended",),
    silent_ranks: ("RESOURCE_EXHAUSTED", "OK"),
    half_open: ("some or all were closed",),
    second_group: ("deployment_in_use",),
    highest_term: (_LIMIT,),
    two_shapes: (
        "shape_disagrees, shape_disagrees",
        f"{_LIMIT}, shape_disagrees",
        # Two of these peers use one name at the same time.
        "stale_incarnation, shape_disagrees",
    ),
    new_names: (TAKEN, _LIMIT, f"{_LIMIT} {TAKEN}"),
    oversized: ("OK", "RESOURCE_EXHAUSTED", "CANCELLED", "UNAVAILABLE", "INTERNAL"),
    compressed: ("UNIMPLEMENTED", "INTERNAL"),
    large_maps: tuple(
        f"{words} placement {placement}"
        for words in (TAKEN, _LIMIT)
        for placement in ("answered", "unknown yet")
    ),
    large_bodies: tuple(f"{status} in less than 64 KiB" for status in (400, 413, 422)),
    wrong_requests: ("404", "409", "422", "404 422", "409 422"),
    bad_records: (TAKEN, _LIMIT),
    hostile_clients: ("went on for 3 s",),
    taken_over_rank: ("stale_incarnation",),
}
"""Peers with what may become of them."""
NO_ANSWER = (TimeoutError, httpx.HTTPError, *_ENDED, OSError)
"""What a peer may see instead, because the others take all places or connections."""
