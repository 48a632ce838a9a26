"""The stores under test: in memory, and on a real Valkey."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from tests.contracts.memory_store import MemoryStore

CAPACITY = 10
EPOCHS_KEPT = 4
PLANS_KEPT = 5


@asynccontextmanager
async def connected(url: str, **options) -> AsyncIterator[Any]:
    """Yield a client of the store at a URL, for any command."""
    client = connect(url, **{"timeout_s": 5.0, **options})
    try:
        yield client
    finally:
        await disconnect(client)


def bounded(store: RedisDeploymentStore, **bounds: float) -> RedisDeploymentStore:
    """Return a store with other bounds than those of a controller's."""
    for name, value in bounds.items():
        assert hasattr(store, name)
        setattr(store, name, value)
    return store


@pytest.fixture
async def valkey(tmp_path) -> AsyncIterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "data")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(params=["memory", pytest.param("valkey", marks=pytest.mark.integration)])
async def stores(request, tmp_path):
    """Yield (deployment store, window store) on the same data."""
    if request.param == "memory":
        store = MemoryStore(
            SystemClock(), capacity=CAPACITY, epochs_kept=EPOCHS_KEPT, plans_kept=PLANS_KEPT
        )
        yield store, store
        return
    server = EmbeddedValkey(tmp_path / "data")
    await server.start()
    async with connected(server.url) as client:
        yield (
            bounded(RedisDeploymentStore(client), epochs_kept=EPOCHS_KEPT, plans_kept=PLANS_KEPT),
            RedisWindowStore(client, capacity=CAPACITY),
        )
    await server.stop()


@pytest.fixture
def store(stores):
    return stores[0]


@pytest.fixture
def windows(stores):
    return stores[1]
