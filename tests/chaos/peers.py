"""Hostile peers beside honest ranks: each does for some time what once brought a controller down.

A peer returns in some words what became of it. `PEERS` names the words that are refusals as
promised; any other answer breaks a promise.
"""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import httpx
import psutil
from redis.asyncio import Redis

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.protocol.terms import MAX_TERM
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from tests.chaos import hostile
from tests.chaos.processes import DEPLOYMENT, ControllerProcess
from tests.controller.leadership import test_bad_records
from tests.controller.replicas import DEMO
from tests.integration.controller_rig import Group, Rank
from tests.waiting import deadline, until

LARGE = ModelShape(64, 512, 2, 512, 2, 64)
"""A map of 262,144 bytes."""
OTHER = ModelShape(3, 16, 1, 16, 2, 64)
TAKEN = "taken"
ELSEWHERE = "NotLeader"
"""The answer for a made-up name that another replica leads."""
MOST_GROWTH_BYTES = 700 << 20
"""The bytes that may wait (256 MiB), what decodes them, and the bodies of some requests."""
SETTINGS = {
    "GRPC__MAX_STREAMS": "64",
    "INGEST__MAX_DEPLOYMENTS": "64",
    "INGEST__MAX_NEW_DEPLOYMENTS": "16",
    # Nothing fails here, so a lost lease is a fault. Store and ranks may answer late, because their
    # proxies share a process with the peers.
    "LEADER__LEASE_S": "30",
    "LEADER__RENEW_S": "3",
    "REDIS__TIMEOUT_S": "8",
    "INGEST__RANK_LEASE_S": "10",
}
"""Limits of the controllers that peers reach within a minute, and patience."""
_AT_A_TIME = 2
_PEER_WITHIN_S = 60.0
_ENDS_WITHIN_S = 25.0
_LOOK_S = 5.0
_LOSSES = ("lease_lost", "deployment_failed", "rank_displaced", "lease_not_acquired")
_numbers = itertools.count()
_T = TypeVar("_T")
_ATTACH = "/evenkeel.v1.RankLink/Attach"
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What gRPC raises on a stream that the controller ends, before and after gRPC knows of it."""


@dataclass(frozen=True)
class Target:
    """What peers attack: the leader of the honest ranks.

    Args:
        store_port: of the primary.
    """

    controller: ControllerProcess
    store_port: int
    shape: ModelShape
    generation: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.controller.grpc_port}"

    def honest_group(self) -> Group:
        """Return a group that calls itself the honest one."""
        return Group(DEPLOYMENT, self.shape, generation=self.generation)


def _told(answer: Any) -> str:
    """Return the answer to a Hello in a word."""
    reason = getattr(answer, "reason", None)
    outcome = getattr(answer, "outcome", None)
    if outcome is None:
        return f"{type(answer).__name__}"
    return str(reason.value if hasattr(reason, "value") else reason) if reason else TAKEN


def _joined(answers: set[str]) -> str:
    """Return the answers of several ranks in words, without those of replicas that do not lead."""
    return " ".join(sorted(answers - {ELSEWHERE}) or [ELSEWHERE])


async def _ended(call: Any) -> str:
    """Return the status with which a stream ends within the controller's longest limit.

    gRPC's client calls it INTERNAL where the stream ends while it writes.
    """
    try:
        async with asyncio.timeout(deadline(_ENDS_WITHIN_S)):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            return str((await call.code()).name)
    except TimeoutError:
        return "was not ended"


async def _any(opened: Sequence[_T], ended: Callable[[_T], Any]) -> bool:
    """Return whether any of what a peer opened ends within the controller's longest limit.

    A slow machine takes long to open it, so one look after a time may come too early.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _ENDS_WITHIN_S
    while not any(map(ended, opened)):
        if loop.time() > until_s:
            return False
        await asyncio.sleep(0.5)
    return True


async def silent_streams(target: Target, rng: random.Random) -> str:
    """Streams without a Hello, more than may wait."""
    async with grpc.aio.insecure_channel(target.address) as channel:
        calls = [agent_pb2_grpc.RankLinkStub(channel).Attach() for _ in range(700)]
        await asyncio.sleep(rng.uniform(1, 12))
        ended = await _any(calls, lambda call: call.done())
        for call in calls:
            call.cancel()
    return "some or all were ended" if ended else "none was ended"


async def silent_ranks(target: Target, rng: random.Random) -> str:
    """Ranks that say nothing after their Hello."""
    group = Group(f"silent-{rng.randrange(8)}")
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach()
        await call.write(encode_rank_message(group.ranks[0].hello()))
        return await _ended(call)


async def half_open(target: Target, rng: random.Random) -> str:
    """Connections to REST and metrics that send half a request."""
    writers, reads = [], []
    try:
        for number in range(700):
            controller = target.controller
            port = controller.rest_port if number % 2 else controller.metrics_port
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\n")
                writers.append(writer)
                reads.append(asyncio.create_task(reader.read()))
        await asyncio.sleep(rng.uniform(1, 25))
        closed = await _any(reads, lambda read: read.done())
    finally:
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*reads, return_exceptions=True)
    return "some or all were closed" if closed else "none was closed"


async def second_group(target: Target, _rng: random.Random) -> str:
    """Another group under the name of the honest one."""
    async with Group(DEPLOYMENT, generation=f"stranger-{next(_numbers)}") as group:
        answers = [_told(await rank.connect(target.address)) for rank in group.ranks]
    return " ".join(sorted(set(answers)))


async def highest_term(target: Target, _rng: random.Random) -> str:
    """A rank of the honest generation that knows the highest term."""
    async with target.honest_group() as group:
        group.ranks[0].term = MAX_TERM
        return _told(await group.ranks[0].connect(target.address))


async def two_shapes(target: Target, rng: random.Random) -> str:
    """Two groups of one generation with different shapes, and a rank of the honest one."""
    name = f"torn-{rng.randrange(4)}"
    async with (
        Group(name, generation="g") as one,
        Group(name, OTHER, generation="g") as other,
        Group(DEPLOYMENT, LARGE, generation=target.generation) as honest,
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
    return _joined(answers)


async def oversized(target: Target, rng: random.Random) -> str:
    """A message larger than any right one of its shape."""
    group = Group(f"oversized-{rng.randrange(4)}")
    hello = encode_rank_message(group.ranks[0].hello()).SerializeToString()
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = channel.stream_stream(_ATTACH)()
        await call.write(hello)
        with contextlib.suppress(*_ENDED):
            await call.write(rng.randbytes(rng.choice((3, 30)) << 20))
        return await _ended(call)


async def compressed(target: Target, rng: random.Random) -> str:
    """Messages that are a thousand times larger than what arrives."""
    group = Group(f"compressed-{rng.randrange(4)}")
    hello = replace(group.ranks[0].hello(), node="n" * 200)
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub = agent_pb2_grpc.RankLinkStub(channel)
        call = stub.Attach(compression=grpc.Compression.Gzip)
        with contextlib.suppress(*_ENDED):
            await call.write(encode_rank_message(hello))
        return await _ended(call)


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
    return f"{_joined(answers)} placement {placement}"


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
    path = f"/v1/deployments/{DEPLOYMENT}/plans"
    answer = await target.controller.http.post(
        path, content=body[: rng.randrange(len(body))], headers=headers
    )
    return f"{answer.status_code} in less than 64 KiB" if len(answer.content) < 1 << 16 else "large"


async def wrong_requests(target: Target, _rng: random.Random) -> str:
    """Hundreds of requests that are refused, or put off while the controller or store is busy."""
    path = f"/v1/deployments/{DEPLOYMENT}/plans/none/approve"
    found = set()
    for _ in range(200):
        answer = await target.controller.http.post(path, json={"if": 1})
        if answer.status_code != 503:
            found.add(str(answer.status_code))
        elif (reason := answer.json()["reason"]) not in (Reason.BUSY, Reason.STORE_UNAVAILABLE):
            found.add(f"503 {reason}")
    return " ".join(sorted(found))


async def bad_records(target: Target, _rng: random.Random) -> str:
    """Bad records of every kind of another deployment, whose ranks then come."""
    async with Redis(port=target.store_port) as store:
        await test_bad_records.damage(store, next(_numbers))
    async with Group(DEMO) as group:
        answers = {_told(await rank.connect(target.address)) for rank in group.ranks}
        await target.controller.get(f"/v1/deployments/{DEMO}")
    return _joined(answers)


async def hostile_clients(target: Target, rng: random.Random) -> str:
    """Noise, floods, false identities and clients that never read."""
    controller = target.controller
    await hostile.main(controller.grpc_port, controller.rest_port, 3.0, rng.randrange(1 << 30))
    return "went on for 3 s"


async def taken_over_rank(target: Target, rng: random.Random) -> str:
    """An older process of a rank of the honest group."""
    async with target.honest_group() as group:
        rank = Rank(group, rng.randrange(target.shape.num_ranks))
        old = m.RankIdentity(group.deployment, EpRank(rank.rank), group.generation, 1)
        answer = _told(await rank.connect(target.address, identity=old))
        await rank.close()
    return answer


_LIMIT = "limit_exceeded"
_STALE = "stale_incarnation"
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
        f"{ELSEWHERE}, shape_disagrees",
        # Two of these peers use one name at the same time.
        f"{_STALE}, shape_disagrees",
    ),
    new_names: (TAKEN, _LIMIT, f"{_LIMIT} {TAKEN}", ELSEWHERE),
    oversized: ("OK", "RESOURCE_EXHAUSTED", "CANCELLED", "UNAVAILABLE", "INTERNAL"),
    compressed: ("UNIMPLEMENTED", "INTERNAL"),
    large_maps: tuple(
        f"{words} placement {placement}"
        for words in (TAKEN, _LIMIT, ELSEWHERE)
        for placement in ("answered", "unknown yet")
    ),
    large_bodies: tuple(f"{status} in less than 64 KiB" for status in (400, 413, 422)),
    wrong_requests: ("404", "409", "422", "404 422", "409 422"),
    # Two of these peers use one name at the same time.
    bad_records: (TAKEN, _LIMIT, ELSEWHERE, _STALE, f"{_STALE} {TAKEN}"),
    hostile_clients: ("went on for 3 s",),
    taken_over_rank: (_STALE,),
}
"""Peers with what may become of them."""
NO_ANSWER = (TimeoutError, httpx.HTTPError, *_ENDED, OSError)
"""What a peer may see instead, because the others take all places or connections."""


@dataclass
class Attack:
    """Hostile peers beside honest ranks, and what the ranks and controllers lose by them.

    Args:
        controllers: all replicas; their memory is watched.
    """

    target: Target
    controllers: list[ControllerProcess]
    seed: int
    peers: dict[Peer, tuple[str, ...]] = field(default_factory=lambda: PEERS)
    broken: list[str] = field(default_factory=list)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By peer and what became of it."""
    most_growth: int = 0
    """The most bytes by which the memory of a replica has grown."""

    async def run(self, seconds: float) -> None:
        """Let peers attack for so long, two at a time, and until each kind has got its answer."""
        leader = self.target.controller
        term, lost = await self._term(), await self._lost_steps()
        work = [asyncio.create_task(self._attack(number)) for number in range(_AT_A_TIME)]
        work.append(asyncio.create_task(self._look()))
        try:
            ended, _ = await asyncio.wait(
                work, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            # A slow machine gets as long again, twice, to meet every kind.
            for _ in range(2 * int(seconds)):
                if ended or not self.unanswered():
                    break
                ended, _ = await asyncio.wait(work, timeout=1, return_when=asyncio.FIRST_COMPLETED)
            self.broken += [f"a part of the attack ended: {task.exception()!r}" for task in ended]
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        self.broken += [f"{name} never got a promised answer" for name in self.unanswered()]
        if self.most_growth > MOST_GROWTH_BYTES:
            self.broken.append(f"the memory of a replica grew by {self.most_growth >> 20} MiB")
        rows, _ = leader.rows()
        self.broken += [
            f"{row['event']}: {str(row)[:300]}"
            for row in rows
            if row.get("event") in _LOSSES and row.get("deployment") == DEPLOYMENT
        ]
        if (now := await self._term()) != term:
            self.broken.append(f"term {term} became {now}")
        if (steps := await self._lost_steps()) != lost:
            self.broken.append(f"steps of honest ranks were lost: {lost}, then {steps}")

    def unanswered(self) -> list[str]:
        """Return the kinds of peers that have not met a promised answer yet."""
        return [
            peer.__name__
            for peer, promised in self.peers.items()
            if not any((peer.__name__, words) in self.met for words in promised)
        ]

    async def _attack(self, number: int) -> None:
        """Be one hostile peer after another. Every kind comes as often."""
        rng = random.Random(self.seed * 1000 + number)
        while True:
            for peer in rng.sample(list(self.peers), len(self.peers)):
                self.met[peer.__name__, await self.become(peer, rng)] += 1

    async def become(self, peer: Peer, rng: random.Random) -> str:
        """Be one peer once; return what became of it."""
        try:
            async with asyncio.timeout(_PEER_WITHIN_S):
                words = await peer(self.target, rng)
        except NO_ANSWER as error:
            return f"no answer ({type(error).__name__})"
        except AssertionError as error:
            words = f"assertion: {error}"
        if words not in self.peers[peer]:
            self.broken.append(f"{peer.__name__}: {words}")
        return words

    async def _look(self) -> None:
        """Watch the memory of the replicas, and whether the leader hears every rank."""
        held = [psutil.Process(controller.pid) for controller in self.controllers]
        before = [process.memory_info().rss for process in held]
        while True:
            await asyncio.sleep(_LOOK_S)
            grown = (p.memory_info().rss - b for p, b in zip(held, before, strict=True))
            self.most_growth = max(self.most_growth, *grown)
            status = await self.target.controller.status()
            # Without an answer others took all connections.
            silent = (
                [rank["rank"] for rank in status["ranks"] if not rank["fresh"]] if status else []
            )
            if silent:
                self.broken.append(f"ranks {silent} are not heard")

    async def _term(self) -> int | None:
        status = await until(self.target.controller.status, within_s=60, what="the leader's answer")
        return status["term"]  # None if it does not lead any more.

    async def _lost_steps(self) -> dict[str, float]:
        series = await until(self.target.controller.series, within_s=60, what="its metrics")
        return {
            name: value
            for name, value in series.items()
            if f'deployment="{DEPLOYMENT}"' in name
            and ("steps_rejected_total{" in name or "steps_dropped_total{" in name)
        }
