"""Measures what ten open consoles do to the REST API of a controller that takes reports.

python -m bench.console [--rounds] [--seconds] [--pages]

One deployment of 32 ranks reports to a controller process. A client asks the GET routes at a fixed
pace, in turn with and without pages that ask what the console asks. The result is the p99 of the
client with the pages over the p99 without them, and the processor time that a page adds to the
controller and Valkey. Client and pages run in processes of their own.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from bench.ingest import cpu_s
from bench.ingest_fleet import Fleet, Scale
from bench.report import Row, write_report
from bench.scale_parts import valkey_in
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.controller.tasks import end_tasks
from tests.integration.controller_rig import Controller
from tests.waiting import until

SCALE = Scale(deployments=1)
D = "deployments/d0"
LIGHT = (
    "deployments",
    D,
    f"{D}/plans",
    f"{D}/decisions",
    f"{D}/gates",
    f"{D}/policy",
    f"{D}/quarantine",
    f"{D}/audit",
)
HEAVY = (f"{D}/heatmap", f"{D}/placement")
"""Their answers hold matrices. They have a p99 of their own, which would hide the other routes'."""
RATE = 20.0
"""Requests a second of the client."""
HEADER = ((D, 2.0),)
VIEWS: tuple[tuple[tuple[str, float], ...], ...] = (
    (("deployments?page_size=1000", 3),),
    (*HEADER, (f"{D}/gates", 2), (f"{D}/policy", 10), (f"{D}/decisions?page_size=1000", 0)),
    (*HEADER, (f"{D}/plans?page_size=100", 3)),
    (*HEADER, (f"{D}/heatmap", 5), (f"{D}/plans?page_size=20", 5), (f"{D}/placement", 0)),
    (*HEADER, (f"{D}/quarantine", 10)),
    (*HEADER, (f"{D}/policy", 5), (f"{D}/audit?page_size=100", 5)),
)
"""What fleet, gates, plans, load, ranks and record ask: (path, seconds between two; 0: once)."""


class Server(NamedTuple):
    """Where a client asks."""

    url: str
    token: str

    def options(self) -> dict:
        headers = {"Authorization": f"Bearer {self.token}"}
        base = f"{self.url}/v1/"
        return {"base_url": base, "headers": headers, "timeout": 30, "trust_env": False}


@dataclass
class Figures:
    """All blocks with or all blocks without pages."""

    light_s: list[float] = field(default_factory=list)
    heavy_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    page_requests: int = 0


def probe(server: Server, seconds: float) -> tuple[list[float], list[float]]:
    """Ask the routes in turn at `RATE`; return the seconds of light and of heavy answers.

    A request that is due while another one runs is sent late, and its time counts from when it was
    due: a slow answer must not hide the wait behind it.
    """
    times: tuple[list[float], list[float]] = ([], [])
    routes = [*LIGHT, HEAVY[0], *LIGHT, HEAVY[1]]
    with httpx.Client(**server.options()) as client:
        client.get(routes[0])
        began = time.monotonic()
        for number in range(int(seconds * RATE)):
            due = began + number / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            route = routes[number % len(routes)]
            client.get(route).raise_for_status()
            times[route in HEAVY].append(time.monotonic() - due)
    return times


def open_pages(server: Server, pages: int, seconds: float) -> int:
    """Ask what that many pages ask; return the number of requests."""

    async def run() -> int:
        asked = [ask_view(server, VIEWS[i % len(VIEWS)], seconds) for i in range(pages)]
        return sum(await asyncio.gather(*asked))

    return asyncio.run(run())


async def ask_view(server: Server, view: tuple[tuple[str, float], ...], seconds: float) -> int:
    """Be one page: each path again some time after its last answer, with its entity tag."""
    end = time.monotonic() + seconds

    async def repeat(path: str, period_s: float) -> int:
        requests, tag = 0, ""
        while True:
            first: int | None = 0
            while first is not None:
                part = {"first_layer": first} if "heatmap" in path else {}
                answer = await client.get(path, params=part or None, headers={"If-None-Match": tag})
                requests += 1
                if answer.status_code != httpx.codes.NOT_MODIFIED:
                    answer.raise_for_status()
                    tag = answer.headers.get("ETag", "")
                    first = answer.json().get("next_layer")
                else:
                    first = None
            if not period_s or time.monotonic() + period_s >= end:
                return requests
            await asyncio.sleep(period_s)

    async with httpx.AsyncClient(**server.options()) as client:
        return sum(await asyncio.gather(*(repeat(*each) for each in view)))


async def measure(rounds: int, seconds: float, pages: int) -> tuple[Figures, Figures]:
    """Return the figures without and with pages; they take turns, `rounds` times."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        async with valkey_in(Path(folder)) as (valkey, _):
            controller = Controller(
                Path(folder) / "data",
                REDIS__URL=valkey.url,
                PLANNER__MODE="observe",
                PLANNER__CYCLE_S="5",
                METRICS__REFRESH_S="5",
            )
            async with controller:
                fleet = Fleet(SCALE)
                await until(lambda: bool(controller.events("planner_ready")), within_s=120)
                await fleet.connect(controller.address)
                serving = asyncio.create_task(fleet.serve(1_000_000))
                try:
                    return await take_turns(controller, valkey, rounds, seconds, pages)
                finally:
                    await end_tasks((serving,))
                    await fleet.close()


async def take_turns(
    controller: Controller, valkey: EmbeddedValkey, rounds: int, seconds: float, pages: int
) -> tuple[Figures, Figures]:
    """Measure blocks without and with pages in turn."""
    token = (controller.data_dir / "tokens").read_text().split()[-1]
    server = Server(f"http://127.0.0.1:{controller.ports['rest']}", token)
    loop = asyncio.get_running_loop()
    pids = [controller.process.pid, valkey.pid or 0]
    none, many = Figures(), Figures()
    # New processes: a copy of this one would share its event loop and gRPC's threads.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn) as pool:

        async def block(figures: Figures, number: int, length: float) -> None:
            before, began = cpu_s(*pids), time.monotonic()
            asking = loop.run_in_executor(pool, open_pages, server, number, length)
            light, heavy = await loop.run_in_executor(pool, probe, server, length)
            figures.page_requests += await asking
            figures.light_s += light
            figures.heavy_s += heavy
            figures.cpu_s += cpu_s(*pids) - before
            figures.wall_s += time.monotonic() - began

        # Both processes import, and the window fills: it keeps 256 steps of 50 a second.
        await block(Figures(), pages, 10.0)
        for _ in range(rounds):
            await block(none, 0, seconds)
            await block(many, pages, seconds)
    return none, many


def rows_of(none: Figures, many: Figures, pages: int) -> list[Row]:
    """Return the ratios, then what they are made of."""
    rows = []
    for kind in ("light", "heavy"):
        without, beside = (np.quantile(getattr(f, f"{kind}_s"), 0.99) for f in (none, many))
        rows += [
            Row(f"p99_{kind}_over_no_page", beside / without, "times"),
            Row(f"p99_{kind}_no_page", without * 1e3, "ms"),
            Row(f"p99_{kind}_{pages}_pages", beside * 1e3, "ms"),
        ]
    shares = [100 * figures.cpu_s / figures.wall_s for figures in (none, many)]
    return [
        *rows,
        Row("cpu_no_page", shares[0], "% of a core"),
        Row(f"cpu_{pages}_pages", shares[1], "% of a core"),
        Row("cpu_of_a_page", (shares[1] - shares[0]) / pages, "% of a core"),
        Row("page_requests_per_s", many.page_requests / many.wall_s, "1/s"),
    ]


def main() -> None:
    """Measure and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=4, help="blocks of each kind")
    arguments.add_argument("--seconds", type=float, default=30, help="length of a block")
    arguments.add_argument("--pages", type=int, default=10, help="open consoles")
    chosen = arguments.parse_args()
    print(f"{os.cpu_count()} cores; ranks, clients, controller and Valkey share them")
    none, many = asyncio.run(measure(chosen.rounds, chosen.seconds, chosen.pages))
    write_report("console", rows_of(none, many, chosen.pages), ("httpx", "uvicorn", "numpy"))


if __name__ == "__main__":
    main()
