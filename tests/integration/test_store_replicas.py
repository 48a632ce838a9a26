"""Writes count only once a replica of the store has them, so that a failover cannot lose them."""

import asyncio
import signal

import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.ids import Epoch
from tests.contracts.conftest import connected
from tests.contracts.test_stores import BASE, DEMO, every_plan, make_record
from tests.integration.controller_rig import Controller, Group
from tests.integration.store_server import Server
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
async def pair(tmp_path):
    """A primary and its replica, which has caught up."""
    ports = free_ports(2)
    primary = Server(tmp_path / "primary", ports[0], "--repl-diskless-sync-delay", "0")
    replica = Server(tmp_path / "replica", ports[1], "--replicaof", "127.0.0.1", str(ports[0]))
    try:
        for one in (primary, replica):
            one.start()
            await one.answering()

        async def caught_up() -> bool:
            await admin.set("probe", 1)
            return await admin.wait(1, 100) == 1

        async with connected(primary.url, timeout_s=deadline(2)) as admin:
            await until(caught_up, within_s=30)
        yield primary, replica
    finally:
        for one in (primary, replica):
            one.end()


async def test_what_was_acknowledged_is_on_the_replica_that_takes_over(pair):
    primary, replica = pair
    client, other = (
        connect(primary.url, timeout_s=deadline(2)),
        connect(replica.url, timeout_s=deadline(2)),
    )
    store = RedisDeploymentStore(client, wait_replicas=1, wait_s=0.3)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)

    async def written() -> bool:
        try:
            await store.store_plan(make_record("first"), lease.term)
        except Unavailable:
            return False
        return True

    await until(written, within_s=30)
    await store.store_epoch(DEMO, Epoch(1), BASE, lease.term)
    replica.signal(signal.SIGSTOP)
    try:
        with pytest.raises(
            Unavailable, match=r"writing plans: 0 of 1 replicas have it after 0\.3 s"
        ):
            await store.store_plan(make_record("second"), lease.term)
        with pytest.raises(Unavailable, match="writing documents: 0 of 1"):
            await store.store_document(DEMO, "policy", {"mode": "auto"}, lease.term)
        with pytest.raises(Unavailable, match=r"ping: 0 of 1 replicas have a write after 0\.3 s"):
            await store.ping()
        # Every leader writes it again, so it needs no replica to lead.
        await store.store_document(DEMO, "leader", {"address": "here"}, lease.term)
    finally:
        replica.signal(signal.SIGCONT)
    await until(written, within_s=30)
    await store.ping()
    with pytest.raises(Conflict, match="has taken over"):
        await store.store_plan(make_record("stale"), lease.term - 1)
    primary.kill()
    await other.replicaof("NO", "ONE")
    left = RedisDeploymentStore(other)
    assert {record.plan.plan_id for record in await every_plan(left)} >= {"first"}
    assert await left.fetch_epochs(DEMO) == {Epoch(1): BASE}
    await asyncio.gather(disconnect(client), disconnect(other))


async def test_no_wave_begins_before_its_plan_is_on_a_replica(pair, tmp_path):
    primary, replica = pair
    settings = {"PLANNER__MODE": "auto", "PLANNER__CYCLE_S": "3600"}
    store = {"REDIS__URL": primary.url, "REDIS__WAIT_REPLICAS": "1", "REDIS__TIMEOUT_S": "1"}
    async with Controller(tmp_path / "data", **settings, **store) as controller, Group() as group:
        await group.join(controller)
        await until(lambda: controller.events("planner_ready"), within_s=90)
        group.serve_on()
        await until(lambda: _beyond(controller, 100))
        replica.signal(signal.SIGSTOP)

        async def is_planned():
            # Again while the controller rests from a store that it has found to lack its replica.
            body = {"plan_id": "p", "policy": "eplb", "approve": True}
            answer = await controller.http.post("/v1/deployments/demo/plans", json=body)
            assert answer.status_code == 503, answer.text
            return await controller.state("migrating")

        await until(is_planned)
        step = (await controller.status())["step"]
        await until(lambda: _beyond(controller, step + 100))
        assert group.epoch == 0
        # The loss is reported once, and calls that need no replica do not clear it: an alert
        # needs time to fire.
        for _ in range(10):
            await controller.plans()
            await asyncio.sleep(0.1)
        (lost,) = controller.events("store_lost")
        assert "0 of 1 replicas" in str(lost) and not controller.events("store_back")
        replica.signal(signal.SIGCONT)
        await until(lambda: group.epoch > 0, within_s=60)
        await until(lambda: bool(controller.events("store_back")), within_s=30)
        assert not controller.failures()


async def _beyond(controller, step):
    return ((await controller.status()).get("step") or 0) > step
