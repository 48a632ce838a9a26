"""One soak: a store, a controller, an honest fleet, and hostile peers beside it."""

import asyncio
import collections
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from tests.integration.controller_rig import Controller, Group
from tests.soak.honest import Fleet
from tests.soak.peers import HONEST, NO_ANSWER, PEERS, Peer, Target
from tests.waiting import deadline, until

MOST_GROWTH_BYTES = 700 << 20
"""The bytes that may wait (256 MiB), what decodes them, and the bodies of some requests."""
_AT_A_TIME = 2
_PEER_WITHIN_S = 60.0
ENVIRONMENT = {
    "PLANNER__MODE": "auto",
    # The lease runs out if the event loop does not renew it in time, as beside other replicas.
    "LEADER__REPLICAS": "2",
    # The honest ranks do not connect again when the controller renews connections, as agents do.
    "GRPC__MAX_CONNECTION_AGE_S": "0",
    "GRPC__MAX_STREAMS": "64",
    "INGEST__MAX_DEPLOYMENTS": "64",
    "INGEST__MAX_NEW_DEPLOYMENTS": "16",
    "INGEST__FORGET_AFTER_S": "20",
    "INGEST__HEARTBEAT_S": "1",
    "INGEST__RANK_LEASE_S": "4",
}


@dataclass
class Soak:
    """What happened in one run."""

    fleet: Fleet
    peers: dict[Peer, tuple[str, ...]]
    seed: int
    attacks: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    """By peer and what became of it."""

    async def attack(self, target: Target, number: int) -> None:
        """Be one hostile peer after another. Every kind comes as often."""
        rng = random.Random(self.seed * 1000 + number)
        while True:
            order = list(self.peers)
            rng.shuffle(order)
            for peer in order:
                self.attacks[peer.__name__, await self._met(peer, target, rng)] += 1

    async def _met(self, peer: Peer, target: Target, rng: random.Random) -> str:
        try:
            async with asyncio.timeout(_PEER_WITHIN_S):
                words = await peer(target, rng)
        except NO_ANSWER as error:
            return f"no answer ({type(error).__name__})"
        except AssertionError as error:
            words = f"assertion: {error}"
        if words not in self.peers[peer]:
            self.fleet.failures.append(f"{peer.__name__}: {words}")
        return words


@contextlib.asynccontextmanager
async def _under_attack(
    folder: Path, peers: dict[Peer, tuple[str, ...]], seed: int
) -> AsyncIterator[tuple[Soak, Target]]:
    """Yield a soak whose fleet serves and is ready."""
    store = EmbeddedValkey(folder / "store")
    await store.start()
    client: Any = connect(store.url, timeout_s=deadline(5))
    try:
        async with (
            Controller(folder / "data", **ENVIRONMENT, REDIS__URL=store.url) as controller,
            Group(HONEST, generation="honest") as first,
            Group("second", generation="honest", seed=1) as second,
        ):
            groups = [first, second]
            for group in groups:
                await group.connect(controller.address)
                name = group.deployment
                await until(lambda name=name: controller.state("ready", name), within_s=60)
            await until(lambda: controller.events("planner_ready"), within_s=120)
            fleet = Fleet(controller, groups)
            yield Soak(fleet, peers, seed), Target(controller, client, "honest")
    finally:
        await disconnect(client)
        await store.stop()


async def run_soak(
    folder: Path,
    seconds: float,
    seed: int,
    *,
    peers: dict[Peer, tuple[str, ...]] = PEERS,
    least_plans: int | None = None,
    say: Callable[[str], None],
) -> list[str]:
    """Run for some seconds and print the figures; return the promises that were broken."""
    began = time.monotonic()
    async with _under_attack(folder, peers, seed) as (soak, target):
        fleet, controller = soak.fleet, target.controller
        serving = [group.serve_on(every_s=0.2) for group in fleet.groups]
        terms = {name: (await controller.status(name))["term"] for name in fleet.names}
        before = fleet.process.memory_info().rss
        attacks = [asyncio.create_task(soak.attack(target, n)) for n in range(_AT_A_TIME)]
        honest = [asyncio.create_task(work()) for work in (fleet.drift, fleet.ask)]
        looking = asyncio.create_task(fleet.look())
        watched = (looking, *attacks, *honest, *serving)
        ended, _ = await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ended - {looking}:
            fleet.failures.append(f"a part of the soak ended: {task.exception()!r}")
        for task in watched:
            task.cancel()
        await asyncio.gather(*watched, return_exceptions=True)
        plans = await _judge_end(fleet, terms)
    wanted = int((time.monotonic() - began) / 120) if least_plans is None else least_plans
    if plans["committed"] < wanted:
        fleet.failures.append(
            f"{plans['committed']} plans were committed, at least {wanted} should"
        )
    if (grown := fleet.most_bytes - before) > MOST_GROWTH_BYTES:
        fleet.failures.append(f"memory grew by {grown >> 20} MiB")
    for line in _figures(soak, before, plans):
        say(line)
    broken = list(dict.fromkeys(fleet.failures))
    for words in broken:
        say(f"FAILED: {words}")
    say(
        f"soak {time.monotonic() - began:.0f} s attacks {soak.attacks.total()}"
        f" plans {plans['committed']} growth {grown >> 20} MiB failures {len(broken)}"
    )
    return broken


async def _judge_end(fleet: Fleet, terms: dict[str, int]) -> collections.Counter[str]:
    """Judge terms, plans and steps once the peers have left; return the plans by phase."""
    controller = fleet.controller
    fleet.judge()
    plans: collections.Counter[str] = collections.Counter()
    if controller.process.returncode is not None:
        return plans
    for name in sorted(fleet.names):
        await until(lambda name=name: controller.state("ready", name), within_s=60)
        last = await controller.status(name)
        if last["term"] != terms[name]:
            fleet.failures.append(f"{name}: term {terms[name]} became {last['term']}")
        plans.update(plan["phase"] for plan in await controller.plans(name))
    lost = {phase: count for phase, count in plans.items() if phase != "committed"}
    if lost:
        fleet.failures.append(f"plans ended as {lost}")

    async def all_counted() -> bool:
        told, counted = fleet.counted(await controller.metrics())
        return told == counted

    with contextlib.suppress(TimeoutError, AssertionError):
        await until(all_counted, within_s=20)
    told, counted = fleet.counted(await controller.metrics())
    if told != counted:
        fleet.failures.append(f"of {told} steps of ranks {counted} were counted")
    fleet.judge()
    return plans


def _figures(soak: Soak, before: int, plans: collections.Counter[str]) -> list[str]:
    """Return what happened, a line each."""
    fleet = soak.fleet
    answers = np.array(fleet.answers_s or [float("nan")]) * 1000
    p50, p99 = np.percentile(answers, (50, 99))
    times = f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {answers.max():.0f} ms"
    lines = [
        f"steps of ranks: {sum(group.step * len(group.ranks) for group in fleet.groups)}",
        f"plans: {dict(plans)}",
        f"memory: {before >> 20} MiB before, {fleet.most_bytes >> 20} MiB at most",
        f"an operator's answer: {times} of {len(answers)}; {fleet.refused_requests} had none",
        f"log lines: {fleet.lines}",
    ]
    for (peer, words), count in sorted(soak.attacks.items()):
        lines.append(f"{peer}: {words}: {count}")
    return lines
