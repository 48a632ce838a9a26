"""Errors of a store: full, read-only, slow or failing over; what the controller does then."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.controller.process.background import store_windows
from evenkeel_moe.errors import Unavailable
from tests.contracts.conftest import connected
from tests.contracts.test_stores import DEMO as OF_RECORDS
from tests.contracts.test_stores import make_record
from tests.controller.replicas import DEMO, Replica
from tests.integration.store_server import proxied
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def test_a_store_that_cannot_write_to_its_disk_is_unavailable_until_it_can(
    tmp_path, start_server
):
    """The store refuses every write (MISCONF) but answers reads; it must not count as healthy."""
    one = await start_server("--save", "3600 1", "--appendonly", "no")
    (tmp_path / "store" / "dump.rdb").mkdir()  # In the way of the snapshot.
    async with connected(one.url, timeout_s=deadline(2)) as client:
        store = RedisDeploymentStore(client)
        await store.store_plan(make_record(), 1)
        await client.bgsave()

        async def failed() -> bool:
            return (await client.info("persistence"))["rdb_last_bgsave_status"] == "err"

        await until(failed)
        for refused in (
            store.store_plan(make_record("q"), 1),
            store.acquire_lease(OF_RECORDS, "a", 60, 0),
            store.ping(),
        ):
            with pytest.raises(Unavailable, match="MISCONF"):
                await refused
        assert [plan for plan, _ in await store.plan_order(OF_RECORDS)] == [
            make_record().plan.plan_id
        ]
        (tmp_path / "store" / "dump.rdb").rmdir()
        await client.bgsave()

        async def well() -> bool:
            return not await failed()

        await until(well)
        await store.store_plan(make_record("q"), 1)


async def test_a_store_that_turned_read_only_is_left_and_followed(start_server):
    """The primary behind an address changed: READONLY means reconnect, not a store that is down."""
    one = await start_server()
    other = await start_server()
    async with (
        proxied(one.port) as front,
        connected(one.url, timeout_s=deadline(2)) as old,
        connected(f"redis://{front.address}", timeout_s=deadline(2)) as client,
    ):
        store = RedisDeploymentStore(client)
        await store.store_document(OF_RECORDS, "policy", {"mode": "auto"}, 1)
        # The address leads to the new primary; the connection still leads to the old one.
        front.target = other.port
        await old.execute_command("REPLICAOF", "127.0.0.1", str(other.port))
        await store.store_document(OF_RECORDS, "policy", {"mode": "observe"}, 2)
        assert await store.fetch_document(OF_RECORDS, "policy") == {"mode": "observe"}
        # There is nothing to follow while the new primary is read-only too.
        await client.execute_command("REPLICAOF", "127.0.0.1", str(one.port))
        with pytest.raises(Unavailable, match="ReadOnlyError"):
            await store.store_document(OF_RECORDS, "policy", {"mode": "auto"}, 2)


async def test_slow_answers_are_waited_for_up_to_the_timeout_and_no_longer(start_server):
    one = await start_server()
    async with (
        proxied(one.port) as front,
        connected(f"redis://{front.address}", timeout_s=1.5) as client,
    ):
        store = RedisDeploymentStore(client)
        front.delay_s = 0.1
        await store.store_document(OF_RECORDS, "policy", {"mode": "auto"}, 1)
        front.delay_s = 4.0
        with pytest.raises(Unavailable, match=r"[Tt]ime"):
            await asyncio.wait_for(
                store.store_document(OF_RECORDS, "policy", {"mode": "observe"}, 1), deadline(60)
            )
        front.heal()
        # The late answer to the write that was given up is not taken for another's.
        for number in range(20):
            await store.store_document(OF_RECORDS, f"n{number}", {"n": number}, 1)
            assert await store.fetch_document(OF_RECORDS, f"n{number}") == {"n": number}


# --- health, of a replica that leads nothing or writes nothing too --------------------------------


_REFUSING = {
    "no replica": ("min-replicas-to-write", "1", "0"),
    "no memory": ("maxmemory", "1", "0"),
}
"""Ways in which a server refuses writes but answers reads: setting, value, value that ends it."""


@pytest.fixture
async def server(start_server):
    return await start_server()


@asynccontextmanager
async def replica_on(server):
    """Yield (replica, its store's client) on a real store, without decision cycles."""
    async with connected(server.url, timeout_s=1) as client:
        replica = Replica(RedisDeploymentStore(client), "a", cycle_s=600.0)
        replica.registry.shared = replace(replica.registry.shared, windows=RedisWindowStore(client))
        replica.tasks.spawn(store_windows(replica.registry, 0.1), "store-windows")
        try:
            yield replica, client
        finally:
            await replica.tasks.end()


def health(replica):
    return replica.registry.shared.health


async def stays_degraded(replica, for_s=1.0):
    """Check throughout a period that the replica keeps reporting the fault.

    A standby writes every 0.1 s; a leader does so while it has its lease.
    """
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
            await stays_degraded(replica, 4.0 if leads else 1.0)
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
