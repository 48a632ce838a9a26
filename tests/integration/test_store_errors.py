"""Errors of a store: full, read-only, slow or failing over; what the controller does then."""

import asyncio

import numpy as np
import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.errors import Reason, Unavailable
from tests.chaos.processes import Sentinel, StoreNode
from tests.chaos.proxy import Proxy
from tests.contracts.test_stores import DEMO, make_record
from tests.integration.controller_rig import Controller, Group
from tests.integration.store_server import Server
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def test_a_full_store_is_unavailable_and_nothing_is_decided_until_it_has_room(
    tmp_path, start_server
):
    one = await start_server()
    url = f"redis://127.0.0.1:{one.port}"
    admin = connect(url, timeout_s=deadline(2))
    settings = {"REDIS__URL": url, "PLANNER__MODE": "auto", "PLANNER__THRESHOLDS__COOLDOWN_S": "0"}
    async with Controller(tmp_path / "data", **settings) as controller, Group() as group:
        group.popularity = np.full_like(group.popularity, 1 / 8)
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        await until(lambda: controller.events("planner_ready"), within_s=90)
        group.serve_on()
        await until(lambda: _health(controller, "ok"))

        await admin.config_set("maxmemory", "1")
        store = RedisDeploymentStore(admin)
        with pytest.raises(Unavailable, match="OutOfMemory") as caught:
            await store.store_plan(make_record(), 1)
        assert caught.value.reason is Reason.STORE_UNAVAILABLE
        await until(lambda: _health(controller, "degraded"))
        group.popularity = group.draw(seed=3)
        epoch, step = group.epoch, (await controller.status())["step"]
        await until(lambda: _beyond(controller, step + 100))
        assert group.epoch == epoch
        assert (await controller.status())["state"] == "ready"

        await admin.config_set("maxmemory", "0")
        await until(lambda: _health(controller, "ok"))
        await until(lambda: group.epoch > epoch, within_s=60)
        assert not controller.failures()
    await disconnect(admin)


async def test_a_store_that_cannot_write_to_its_disk_is_unavailable_until_it_can(
    tmp_path, start_server
):
    """The store refuses every write (MISCONF) but answers reads; it must not count as healthy."""
    one = await start_server("--save", "3600 1", "--appendonly", "no")
    (tmp_path / "store" / "dump.rdb").mkdir()  # In the way of the snapshot.
    client = connect(one.url, timeout_s=deadline(2))
    store = RedisDeploymentStore(client)
    await store.store_plan(make_record(), 1)
    await client.bgsave()

    async def failed() -> bool:
        return (await client.info("persistence"))["rdb_last_bgsave_status"] == "err"

    await until(failed)
    for refused in (
        store.store_plan(make_record("q"), 1),
        store.acquire_lease(DEMO, "a", 60, 0),
        store.ping(),
    ):
        with pytest.raises(Unavailable, match="MISCONF"):
            await refused
    assert [plan for plan, _ in await store.plan_order(DEMO)] == [make_record().plan.plan_id]
    (tmp_path / "store" / "dump.rdb").rmdir()
    await client.bgsave()

    async def well() -> bool:
        return not await failed()

    await until(well)
    await store.store_plan(make_record("q"), 1)
    await disconnect(client)


async def _health(controller, status):
    return (await controller.http.get("/readyz")).json()["status"] == status


async def _beyond(controller, step):
    return ((await controller.status()).get("step") or 0) > step


async def test_a_store_that_turned_read_only_is_left_and_followed(tmp_path, start_server):
    """The primary behind an address changed: READONLY means reconnect, not a store that is down."""
    one = await start_server()
    other = Server(tmp_path / "other", free_ports(1)[0])
    other.start()
    await other.answering(f"redis://127.0.0.1:{other.port}")
    front = Proxy(one.port)
    await front.start()
    old = connect(f"redis://127.0.0.1:{one.port}", timeout_s=deadline(2))
    client = connect(f"redis://{front.address}", timeout_s=deadline(2))
    try:
        store = RedisDeploymentStore(client)
        await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
        # The address leads to the new primary; the connection still leads to the old one.
        front.target = other.port
        await old.execute_command("REPLICAOF", "127.0.0.1", str(other.port))
        with pytest.raises(Unavailable, match="ReadOnlyError"):
            await store.store_document(DEMO, "policy", {"mode": "observe"}, 2)
        await store.store_document(DEMO, "policy", {"mode": "observe"}, 2)
        assert await store.fetch_document(DEMO, "policy") == {"mode": "observe"}
    finally:
        await disconnect(client)
        await disconnect(old)
        await front.stop()
        other.end()


async def test_slow_answers_are_waited_for_up_to_the_timeout_and_no_longer(tmp_path, start_server):
    one = await start_server()
    front = Proxy(one.port)
    await front.start()
    client = connect(f"redis://{front.address}", timeout_s=1.5)
    store = RedisDeploymentStore(client)
    try:
        front.delay_s = 0.1
        await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
        front.delay_s = 4.0
        with pytest.raises(Unavailable, match=r"[Tt]ime"):
            await asyncio.wait_for(
                store.store_document(DEMO, "policy", {"mode": "observe"}, 1), deadline(60)
            )
        front.heal()
        # The late answer to the write that was given up is not taken for another's.
        for number in range(20):
            await store.store_document(DEMO, f"n{number}", {"n": number}, 1)
            assert await store.fetch_document(DEMO, f"n{number}") == {"n": number}
    finally:
        await disconnect(client)
        await front.stop()


async def test_a_failover_by_sentinel_is_followed(tmp_path):
    """With a real Sentinel: the primary is killed, and the replica has all stored data."""
    ports = free_ports(3)
    nodes = [StoreNode("a", tmp_path, ports[0]), StoreNode("b", tmp_path, ports[1])]
    sentinel = Sentinel(tmp_path, ports[2])
    client = connect(sentinel.url, timeout_s=deadline(2))
    store = RedisDeploymentStore(client)

    async def stored(name: str) -> bool:
        try:
            await store.store_document(DEMO, name, {"name": name}, 1)
        except Unavailable:
            return False
        return True

    try:
        for node in nodes:
            await node.proxy.start()
        nodes[0].begin(None)
        nodes[1].begin(nodes[0])
        await until(nodes[0].has_replica)
        sentinel.begin(nodes[0])
        await until(lambda: stored("before"), within_s=30)
        # The replica's first copy of everything may take seconds to begin.
        await until(lambda: _holds_as_much(nodes[1], nodes[0]), within_s=60)
        # Sentinel looks for replicas every ten seconds; it cannot promote one it has not seen.
        await until(lambda: _replicas(sentinel), within_s=30)
        nodes[0].kill()
        await until(lambda: stored("after"), within_s=60)
        assert await store.fetch_document(DEMO, "before") == {"name": "before"}
        assert await sentinel.primary_port() == nodes[1].proxy.port
        # The old primary returns as a replica, and nobody writes to it.
        nodes[0].start()
        await until(lambda: _is_replica(nodes[0]), within_s=60)
        assert await stored("later")
        assert await nodes[1].role() == "master"
    finally:
        await disconnect(client)
        for process in (sentinel, *nodes):
            process.end()
        for node in nodes:
            await node.proxy.stop()


async def _holds_as_much(replica, primary) -> bool:
    held, wanted = await replica.ask("DBSIZE"), await primary.ask("DBSIZE")
    return bool(wanted) and held == wanted


async def _replicas(sentinel) -> bool:
    answer = await sentinel.ask("SENTINEL", "REPLICAS", "main")
    return bool(answer)


async def _is_replica(node) -> bool:
    return await node.role() == "slave"
