"""A large group with real links: a Prepare to all its ranks, and a leader that dies.

Each rank sends one report, of the steps that a plan needs. The links, the two controllers and the
store share the machine.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.ingest import cpu_s
from bench.ingest_fleet import (
    HEARTBEAT,
    TOKENS,
    Scale,
    draw_counts,
    hello_of,
    identity_of,
    report_of,
    state_of,
)
from bench.report import Row
from bench.scale_parts import controller_of, get_metrics, large, many, rss, valkey_in
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import Phase, StepMeta, step_table
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.wire import link
from tests.waiting import until

NAME = "scale"
_TIMING = LinkTiming(connect_timeout_s=120.0, keepalive_s=600.0, keepalive_timeout_s=600.0)
"""Long enough that a starved machine cuts no stream."""
_WITHIN_S = 240.0
_LAYERS = (4, 16)
"""Layers of the two waves: the slope tells what one of all layers costs."""


class LinkedRank:
    """A rank's link, and the state that it tells."""

    def __init__(self, rank: int, scale: Scale, placement: Placement, addresses: list[str]) -> None:
        self.scale, self.placement = scale, placement
        self.identity = identity_of(NAME, rank)
        self.registered_at: float | None = None
        self.acknowledged = False
        self.prepared_at: dict[str, float] = {}
        """Monotonic seconds at which the first Prepare of a plan arrived."""
        self._term = 0
        self._link = GrpcRankLink(addresses, seed=rank, timing=_TIMING)
        self._running = asyncio.create_task(self._link.run(self))

    def hello(self) -> m.Hello:
        return hello_of(self.identity, self.placement, self.scale.shape, self._term)

    def heartbeat(self) -> link.Heartbeat:
        return HEARTBEAT

    def received(self, stream: int, message: link.ToRankLink) -> None:
        if isinstance(message, link.Registration):
            self.registered_at = time.monotonic()
        elif isinstance(message, link.ReportAck):
            assert message.reason is None, message
            self.acknowledged = True
        elif isinstance(message, m.Prepare):
            self.prepared_at.setdefault(message.wave.plan_id, time.monotonic())
        elif isinstance(message, m.Abort):
            answer = m.AbortAnswer(message.wave, Epoch(0), m.WaveOutcome.DROPPED, True)
            self._link.send(answer, stream)
        elif isinstance(message, m.QueryState):
            self._term = message.leader.term
            self._link.send(state_of(self.identity, self.placement, message), stream)

    def lost(self, _stream: int) -> None:
        self.registered_at = None

    def report(self, steps: Any, counts: Any) -> None:
        self._link.send(report_of(self.identity, steps, counts))

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


@asynccontextmanager
async def _ranks(addresses: list[str], scale: Scale):
    placement = Placement.initial(scale.shape)
    ranks = [LinkedRank(rank, scale, placement, addresses) for rank in range(scale.ranks)]
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


async def live_rows(sizes: tuple[int, ...] = (256, 2048)) -> AsyncIterator[list[Row]]:
    """Yield the figures of the registration, of `/metrics`, of two Prepares and of a takeover."""
    for size in sizes:
        async for rows in _live(many() if size == 256 else large()):
            yield [row._replace(name=f"scale_live_{size}_{row.name}") for row in rows]


async def _live(scale: Scale) -> AsyncIterator[list[Row]]:
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        async with valkey_in(Path(folder)) as (valkey, _):
            one, two = (controller_of(Path(folder), valkey.url, n, 2) for n in ("one", "two"))
            async with one, two:
                for each in (one, two):  # The load of a start would be in the figures.
                    await until(lambda each=each: each.events("planner_ready"), within_s=_WITHIN_S)
                before, cpu = rss(one.process.pid), cpu_s(one.process.pid)
                # The links begin with the same address, which depends on the deployment's name.
                async with _ranks([one.address], scale) as ranks:
                    took = await _ready(one, ranks)
                    spent = cpu_s(one.process.pid) - cpu
                    yield [
                        Row("register_s", took, "s until all have answered"),
                        Row("register_ended", float(len(one.events("silent_streams_ended"))),
                            "seconds in which a stream gave way before its Hello was read"),
                        Row("register_us", spent / len(ranks) * 1e6, "us of CPU per rank"),
                        Row("rank_bytes", (rss(one.process.pid) - before) / len(ranks),
                            "bytes of memory per rank"),
                        *await _metrics_rows(one),
                    ]  # fmt: skip
                    for number, layers in enumerate(_LAYERS):
                        # A plan is refused on steps that are 15 s old.
                        await _report(ranks, number * scale.steps)
                        yield await _prepare(one, ranks, layers)
                    for rank in ranks:  # As if a Service had given them the other replica.
                        rank._link._order = (two.address,)
                    yield await _takeover(one, two, ranks)


async def _ready(controller: Any, ranks: list[LinkedRank]) -> float:
    """Wait until a controller leads and has the answers of all ranks; return the seconds."""
    began = time.monotonic()
    await until(
        lambda: all(rank.registered_at is not None for rank in ranks), within_s=_WITHIN_S, every_s=1
    )

    async def ready() -> bool:
        items = (await controller.http.get("/v1/deployments")).json()["items"]
        return any((one["deployment"], one["state"]) == (NAME, "ready") for one in items)

    await until(ready, within_s=_WITHIN_S, every_s=0.25)
    return time.monotonic() - began


async def _metrics_rows(controller: Any) -> list[Row]:
    # The gauges of a deployment are refreshed every five seconds.
    await asyncio.sleep(6.0)
    size, series, took = await get_metrics(controller)
    return [
        Row("metrics_bytes", float(size), "bytes of /metrics"),
        Row("metrics_series", float(series), "series"),
        Row("metrics_s", took, "s"),
    ]


async def _report(ranks: list[LinkedRank], first: int) -> None:
    """Let every rank report 64 steps, of which a plan needs as many, and wait for the answers."""
    scale = ranks[0].scale
    counts = draw_counts(scale, ranks[0].placement, 0)
    numbers = range(first, first + scale.steps)
    steps = step_table(StepMeta(step, 0, Phase.DECODE, TOKENS) for step in numbers)
    width = scale.slots_per_rank
    for number, rank in enumerate(ranks):
        rank.acknowledged = False
        rank.report(steps, counts[:, :, number * width : (number + 1) * width])
    await until(lambda: all(rank.acknowledged for rank in ranks), within_s=_WITHIN_S)


async def _prepare(controller: Any, ranks: list[LinkedRank], layers: int) -> list[Row]:
    """Start a plan that swaps two slots in some layers; cancel it once all ranks have its wave."""
    name, base = f"swap-{layers}", f"/v1/deployments/{NAME}/plans"
    target = np.array(ranks[0].placement.phy2log)
    target[:layers, [0, -1]] = target[:layers, [-1, 0]]
    body = {"plan_id": name, "approve": True, "target": {"physical_to_logical": target.tolist()}}
    cpu = cpu_s(controller.process.pid)
    answer = await controller.http.post(base, json=body)
    assert answer.status_code == 202, answer.text
    await until(lambda: all(name in rank.prepared_at for rank in ranks), within_s=_WITHIN_S)
    at = [rank.prepared_at[name] for rank in ranks]
    spent = cpu_s(controller.process.pid) - cpu
    await controller.http.post(f"{base}/{name}/cancel")

    async def over() -> bool:
        return (await controller.http.get(f"{base}/{name}")).json()["phase"] == "cancelled"

    await until(over, within_s=_WITHIN_S, every_s=0.5)
    return [
        Row(f"prepare_{layers}_s", max(at) - min(at), "s from the first receipt to the last"),
        Row(f"prepare_{layers}_us", spent / len(ranks) * 1e6, "us of CPU per rank"),
    ]


async def _takeover(one: Any, two: Any, ranks: list[LinkedRank]) -> list[Row]:
    """Kill the leader; all ranks come to the other replica at the same time."""
    cpu, began = cpu_s(two.process.pid), time.monotonic()
    before = rss(two.process.pid)
    await one.stop(signal.SIGKILL)
    await until(lambda: all(rank.registered_at is None for rank in ranks), within_s=_WITHIN_S)
    await _ready(two, ranks)
    took = time.monotonic() - began
    spent = cpu_s(two.process.pid) - cpu
    return [
        Row("takeover_s", took, "s from the kill until it leads and all have answered"),
        Row("takeover_lease_s", 30.0, "s of it at most until the lease ends"),
        Row("takeover_cpu_s", spent, "s of CPU of the new leader"),
        Row("takeover_memory_bytes", float(rss(two.process.pid) - before), "bytes"),
    ]
