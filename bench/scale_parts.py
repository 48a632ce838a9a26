"""The store, shapes, settings of the controller and readings that benches of reports share."""

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from bench.ingest_fleet import Scale
from evenkeel_moe.adapters.open_files import allow_open_files
from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.model.topology import ModelShape
from tests.integration.controller_rig import Controller

GROUPS = 10
"""Groups of `MANY` beside the one of `LARGE`."""
_FILES = 16_384
"""Open files of the bench itself: two for each stream that it simulates."""


def many(steps: int = 64) -> Scale:
    """Return a group of 256 ranks with four slots each, that sends so many steps a message."""
    return Scale(1, 256, 92, 4, 100.0, steps, 896)


def large(steps: int = 64) -> Scale:
    """Return the group of 2,048 ranks with a slot each."""
    return Scale(1, 2048, 92, 1, 100.0, steps, 896)


MANY: ModelShape = many().shape
LARGE: ModelShape = large().shape


@asynccontextmanager
async def valkey_in(folder: Path):
    """Run a store in a folder; yield it and a client."""
    allow_open_files(_FILES)
    valkey = EmbeddedValkey(folder / "valkey")
    await valkey.start()
    client = connect(valkey.url, timeout_s=60.0)
    try:
        yield valkey, client
    finally:
        await disconnect(client)
        await valkey.stop()


def controller_of(folder: Path, url: str, name: str = "one", replicas: int = 1) -> Controller:
    """Return a controller that only observes, with leases that last on a busy machine."""
    return Controller(
        folder / name,
        REDIS__URL=url,
        REDIS__TIMEOUT_S="10",
        LEADER__REPLICA_ID=name,
        LEADER__REPLICAS=str(replicas),
        LEADER__LEASE_S="30",
        LEADER__RENEW_S="3",
        INGEST__RANK_LEASE_S="120",
        INGEST__HEARTBEAT_S="5",
        GRPC__KEEPALIVE_S="600",
        GRPC__KEEPALIVE_TIMEOUT_S="600",
        INGEST__MEMORY_BYTES=str(20_000_000_000),
        ADVANCED__MAX_STREAMS_PER_PEER="8192",
        PLANNER__MODE="propose",
        PLANNER__CYCLE_S="3600",
        METRICS__REFRESH_S="5",
    )


def rss(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(psutil.Process(pid).memory_info().rss)


async def get_metrics(controller: Controller) -> tuple[int, int, float]:
    """Return the bytes and the series of `/metrics`, and the seconds of the answer."""
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        began = time.monotonic()
        text = (await client.get(f"http://127.0.0.1:{controller.ports['metrics']}/metrics")).text
        took = time.monotonic() - began
    return len(text), sum(not line.startswith("#") for line in text.splitlines()), took


class Lateness:
    """Asks the controller's event loop for `/healthz` again and again while it runs.

    The time of an answer is the lateness of the loop, and what the machine makes both wait.
    """

    def __init__(self, controller: Controller) -> None:
        self._url = f"http://127.0.0.1:{controller.ports['rest']}/healthz"
        self.seconds: list[float] = []

    async def __aenter__(self) -> "Lateness":
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
            while True:
                began = time.monotonic()
                await client.get(self._url)
                self.seconds.append(time.monotonic() - began)
                await asyncio.sleep(0.02)
