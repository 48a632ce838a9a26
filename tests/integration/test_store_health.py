"""A replica reports a store that refuses writes, even if it leads nothing or writes nothing."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.controller.process.background import store_windows
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.errors import Unavailable
from tests.controller.replicas import DEMO, Replica
from tests.integration.store_server import Server
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

_REFUSING = {
    "no replica": ("min-replicas-to-write", "1", "0"),
    "no memory": ("maxmemory", "1", "0"),
}
"""Ways in which a server refuses writes but answers reads: setting, value, value that ends it."""


@pytest.fixture
async def server(tmp_path):
    one = Server(tmp_path / "store", free_ports(1)[0])
    one.start()
    await one.answering(one.url)
    yield one
    one.end()


@asynccontextmanager
async def replica_on(server):
    """Yield (replica, its store's client) on a real store, without decision cycles."""
    client = connect(server.url, timeout_s=1)
    replica = Replica(RedisDeploymentStore(client), "a", cycle_s=600.0)
    replica.registry.shared = replace(replica.registry.shared, windows=RedisWindowStore(client))
    replica.tasks.spawn(store_windows(replica.registry, 0.1), "store-windows")
    try:
        yield replica, client
    finally:
        await replica.tasks.end()
        await disconnect(client)


def health(replica):
    return replica.registry.shared.health


async def stays_degraded(replica, for_s=4.0):
    """Check throughout a period that the replica keeps reporting the fault."""
    deadline = asyncio.get_running_loop().time() + for_s
    while asyncio.get_running_loop().time() < deadline:
        assert health(replica).fault
        assert replica.registry.shared.metrics._degraded._value.get() == 1
        await asyncio.sleep(0.05)


async def test_a_standby_reports_that_the_store_is_gone_and_when_it_answered_last(server):
    async with replica_on(server) as (replica, _):
        metrics = replica.registry.shared.metrics
        await until(lambda: metrics._answered_at is not None)
        server.kill()
        await until(lambda: health(replica).fault)
        answered_at = metrics._answered_at
        await stays_degraded(replica)
        assert metrics._answered_at == answered_at
        server.start()
        await until(lambda: not health(replica).fault)


@pytest.mark.parametrize("refusal", _REFUSING)
@pytest.mark.parametrize("leads", [False, True], ids=["standby", "leader"])
async def test_a_store_that_refuses_writes_is_degraded_until_it_takes_them(server, refusal, leads):
    setting, value, end = _REFUSING[refusal]
    async with replica_on(server) as (replica, client):
        if leads:
            await replica.lead()
        with capture_logs() as log:
            await client.config_set(setting, value)
            await until(lambda: health(replica).fault)
            await stays_degraded(replica)
            if leads:
                # What an operator asks for is refused, and is no second loss of the store.
                with pytest.raises(Unavailable):
                    await replica.operations.freeze(DEMO, 60.0, "eve")
                await stays_degraded(replica, 2.5)
            await client.config_set(setting, end)
            await until(lambda: not health(replica).fault)
        said = [row["event"] for row in log if row["event"] in ("store_lost", "store_back")]
        assert said == ["store_lost", "store_back"]
        if leads:
            await until(lambda: replica.member.keeper.leading)
