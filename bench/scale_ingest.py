"""A group's reports through the whole controller: processor time, memory, Redis, lateness."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.ingest import cpu_s, run_ours, run_raw
from bench.ingest_fleet import Fleet, Scale
from bench.report import Row
from bench.scale_parts import Lateness, controller_of, large, many, rss, valkey_in
from evenkeel_moe.controller.ingest.group_memory import group_memory
from tests.waiting import until

_PACES = {"256": 8.0, "2048": 2.0}
"""Steps a second that two shared cores take in each group."""


async def ingest_rows(batches: int = 9) -> AsyncIterator[list[Row]]:
    """Yield the figures of each group at 16 and 64 steps a message. Nine of 64 fill a window."""
    for name, group in (("256", many), ("2048", large)):
        for steps in (16, 64):
            scale = replace(group(steps), steps_per_s=_PACES[name] * steps / 16)
            yield await _ingest(f"scale_ingest_{name}_{steps}", scale, batches)


async def _ingest(row: str, scale: Scale, batches: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        async with valkey_in(Path(folder)) as (valkey, client):
            controller = controller_of(Path(folder), valkey.url)
            async with controller:
                await until(lambda: bool(controller.events("planner_ready")), within_s=120)
                fleet = Fleet(scale)
                try:
                    pids = (controller.process.pid, valkey.pid or 0)
                    return await _measure(row, controller, client, fleet, batches, pids)
                finally:
                    await fleet.close()


async def _measure(
    row: str, controller: Any, client: Any, fleet: Fleet, batches: int, pids: tuple[int, int]
) -> list[Row]:
    scale = fleet.scale
    before_connect, cpu_before = rss(pids[0]), cpu_s(pids[0])
    await fleet.connect(controller.address)
    ranks = len(fleet.ranks)
    connected, hello_s = rss(pids[0]), (cpu_s(pids[0]) - cpu_before) / ranks
    await fleet.serve(1)
    await until(lambda: all(r.highest >= scale.steps - 1 for r in fleet.ranks), within_s=300)
    cpu, net = [cpu_s(pid) for pid in pids], await _received(client)
    async with Lateness(controller) as lateness:
        await fleet.serve(batches, 1)
        last = (1 + batches) * scale.steps - 1
        await until(lambda: all(rank.highest >= last for rank in fleet.ranks), within_s=300)
        await asyncio.sleep(1.0)  # The last windows are on their way to the store.
    spent = [cpu_s(pid) - one for pid, one in zip(pids, cpu, strict=True)]
    stored = await _received(client) - net
    steps, messages = batches * scale.steps, batches * ranks
    said = group_memory(scale.shape, window_steps=512, max_pending=512, plan_steps=256, threads=2)
    return [
        Row(f"{row}_message_us", sum(spent) / messages * 1e6, "us of CPU per message, with Valkey"),
        Row(f"{row}_step_us", sum(spent) / messages / scale.steps * 1e6, "us per rank step"),
        Row(f"{row}_valkey_us", spent[1] / messages * 1e6, "us of CPU of Valkey per message"),
        Row(f"{row}_refused", float(sum(r.refused for r in fleet.ranks)), "rank steps"),
        Row(f"{row}_late_p99_ms", 1e3 * float(np.quantile(lateness.seconds, 0.99)), "ms"),
        Row(f"{row}_redis_step_bytes", stored / steps, "bytes to the store per step of the group"),
        Row(f"{row}_hello_us", hello_s * 1e6, "us of CPU of a Hello and the first question"),
        Row(f"{row}_rank_bytes", (connected - before_connect) / ranks, "bytes per stream"),
        Row(f"{row}_memory_bytes", float(rss(pids[0]) - before_connect), "bytes, measured"),
        Row(f"{row}_memory_said_bytes", float(said.total), "bytes, said at registration"),
    ]


async def _received(client: Any) -> int:
    return int((await client.info("stats"))["total_net_input_bytes"])


async def ratio_rows(batches: int = 30) -> AsyncIterator[list[Row]]:
    """Yield the rank steps per core-second over a receiver tuned alike, at 16 and 64 steps."""
    base = Scale(deployments=4)
    found: dict[tuple[str, int], float] = {}
    for steps in (16, 64):
        scale = replace(base, steps=steps, steps_per_s=50.0 * steps / 16)
        with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
            found["ours", steps] = (await run_ours(scale, batches, Path(folder))).per_core_s
        found["raw", steps] = (await run_raw(scale, batches, tuned=True)).per_core_s
    yield [
        *(
            Row(f"scale_v3_{who}_{steps}_rank_steps_per_core_s", value, "rank steps / s of a core")
            for (who, steps), value in found.items()
        ),
        *(
            Row(f"scale_v3_{steps}_ratio_to_tuned_raw", found["ours", steps] / found["raw", steps],
                "ratio, the same messages")
            for steps in (16, 64)
        ),
        Row("scale_v3_64_over_tuned_raw_16", found["ours", 64] / found["raw", 16],
            "ratio, to messages of 16 steps"),
        Row("scale_v3_64_over_16", found["ours", 64] / found["ours", 16], "ratio, per rank step"),
    ]  # fmt: skip
