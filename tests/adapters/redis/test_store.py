"""The deployment store on a real server: damaged values, bounds, late writes, a cluster."""

import asyncio
import contextlib
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from evenkeel_moe.adapters.redis import leases
from evenkeel_moe.adapters.redis.client import connect, disconnect, eviction_policies
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.records import milliseconds
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.ports.stores import Lease
from tests.contracts.conftest import bounded
from tests.contracts.test_stores import (
    BASE,
    DEMO,
    every_plan,
    fetch,
    make_decision,
    make_record,
    make_window,
)
from tests.waiting import until


async def test_every_key_runs_out_from_its_first_write_on(client):
    store = bounded(RedisDeploymentStore(client), record_age_s=100.0, decision_age_s=50.0)
    writes = [
        lambda: store.store_document(DEMO, "leader", {"replica_id": "a"}, 1),
        lambda: store.store_plan(make_record(), 1),
        lambda: store.store_epoch(DEMO, Epoch(1), BASE, 1),
        lambda: store.append_decision(DEMO, {}),
        lambda: store.acquire_lease(DEMO, "a", 60, 0),
        lambda: store.store_document(DEMO, "policy", {}, 2),
        store.ping,
    ]
    for write in writes:
        await write()
        left = {key.decode(): await client.pttl(key) for key in await client.keys("*")}
        assert all(0 < ms <= 100_000 for ms in left.values()), left
    assert {key.rpartition(":")[2] for key in left} >= {
        "term",
        "written",
        "plans",
        "plan_maps",
        "plan_story",
        "plan_order",
        "plans_open",
    }


async def test_everything_of_a_deployment_shares_a_hash_tag_and_windows_expire(client):
    store, windows = RedisDeploymentStore(client), RedisWindowStore(client, ttl_s=60)
    await store.acquire_lease(DEMO, "a", 60, 0)
    await store.store_plan(make_record(), 1)
    await store.append_decision(DEMO, {})
    await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
    keys = {key.decode() for key in await client.keys("*")}
    assert {key for key in keys if "{demo}" not in key} == {"evenkeel:seen"}
    expiring = [key for key in keys if "window" in key]
    assert len(expiring) == 4
    for key in expiring:
        assert 0 < await client.pttl(key) <= 60_000


async def test_a_deployment_is_listed_for_as_long_as_it_is_led(client):
    store = bounded(RedisDeploymentStore(client), record_age_s=2.0)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    began = time.monotonic()

    async def renewed_beyond_the_age():
        assert await store.renew_lease(DEMO, lease, 60)
        return time.monotonic() - began > 3.0

    await until(renewed_beyond_the_age, every_s=0.1)
    assert await store.deployments() == [DEMO]


async def test_a_led_deployment_is_listed_again_after_a_hundredth_of_the_age(client, monkeypatch):
    store = bounded(RedisDeploymentStore(client), record_age_s=100.0)
    clock = SimpleNamespace(now=50.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(leases, "time", clock)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    found = []
    for clock.now in (50.0, 50.75, 51.0):
        await store.unlist(DEMO)
        assert await store.renew_lease(DEMO, lease, 60)
        found.append(await store.deployments())
    assert found == [[DEMO], [], [DEMO]]
    await store.release_lease(DEMO, lease)
    assert not store._listed_at, "nothing is kept of a deployment that this replica does not lead"


async def test_a_store_that_lost_its_data_lists_a_claimed_deployment_at_once(client, store):
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    assert await store.renew_lease(DEMO, lease, 60)
    await client.flushall()
    lease = await store.acquire_lease(DEMO, "a", 60, 0, lasting=False)
    assert await store.deployments() == []
    assert await store.renew_lease(DEMO, dataclasses.replace(lease, lasting=True), 60)
    assert await store.deployments() == [DEMO]


@pytest.mark.parametrize("lasting", [True, False])
async def test_a_renewal_prolongs_all_records_or_those_of_a_new_deployment(client, lasting):
    store = bounded(RedisDeploymentStore(client), record_age_s=2 * leases.NEW_AGE_S)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    await store.store_document(DEMO, "policy", {}, 1)
    await store.store_plan(make_record(), 1)
    await store.store_epoch(DEMO, Epoch(1), BASE, 1)
    await store.store_epoch(DEMO, Epoch(0), BASE, 1)
    records = [key for key in await client.keys("*{demo}*") if not key.endswith(b":lease")]
    for key in records:
        await client.pexpire(key, 1_000_000)
    assert await store.renew_lease(DEMO, dataclasses.replace(lease, lasting=lasting), 60)
    left = {key.decode().rpartition(":")[2]: await client.pttl(key) for key in records}
    age_ms = 1000 * leases.NEW_AGE_S * (2 if lasting else 1)
    prolonged = {name for name, ms in left.items() if 0.9 * age_ms < ms <= age_ms}
    under_a_lease = {"term", "written", "documents"}
    assert prolonged == (left.keys() if lasting else under_a_lease)
    assert all(ms <= 1_000_000 for name, ms in left.items() if name not in prolonged)
    assert left.keys() == under_a_lease | {
        "plans",
        "plan_maps",
        "plan_story",
        "plan_order",
        "plans_open",
        "epochs",
        "replaced_epochs",
    }


def test_an_age_is_at_least_one_millisecond():
    assert [milliseconds(s) for s in (0.0, 0.0004, 0.002, 60.0)] == [1, 1, 2, 60_000]


async def test_leases_and_names_that_cannot_be_read_are_skipped_and_named(client, store, noted):
    await store.acquire_lease(DEMO, "a", 60, 0)
    await client.zadd("evenkeel:seen", {b"\xff": 5e9, b"a b": 5e9})
    assert await store.deployments() == [DEMO]
    names = [r"evenkeel:seen b'\xff'", "evenkeel:seen b'a b'"]
    assert [(one.kind, one.where) for one in noted] == [("deployment", name) for name in names]
    noted.clear()
    lease = "evenkeel:{demo}:lease"
    for fields, told in (
        ({"holder": b"\xff", "term": 5}, [lease]),
        ({"holder": "a", "term": "soon"}, [lease]),
        ({"holder": "a"}, []),
        ({"term": 5}, []),
    ):
        await client.delete(lease)
        await client.hset(lease, mapping=fields)
        assert await store.fetch_lease(DEMO) is None
        assert [one.where for one in noted] == told
        noted.clear()
    await client.hset(lease, "holder", "a")
    assert await store.fetch_lease(DEMO) == Lease("a", 5)


DAMAGED_LEASE = pytest.mark.fault(
    "an operator with a damaged lease in the store",
    "the deployment was never led, and nothing was logged",
)


@DAMAGED_LEASE
@pytest.mark.parametrize(
    "fields",
    [
        {"holder": "b", "term": "abc"},
        {"holder": "b", "term": ""},
        {"holder": "b", "term": "-1"},
        {"holder": "b", "term": "1e3"},
        {"holder": "b", "term": "inf"},
        {"holder": "b", "term": "9" * 30},
        {"holder": "b", "term": b"\xff"},
        {"holder": "b" * 2000, "term": 5},
    ],
    ids=repr,
)
async def test_a_damaged_lease_is_set_aside_and_another_one_taken(client, store, noted, fields):
    key = "evenkeel:{demo}:lease"
    await client.set("evenkeel:{demo}:term", 6)
    await client.hset(key, mapping=fields)
    assert await store.acquire_lease(DEMO, "a", 60.0, 0) == Lease("a", 7)
    assert await store.fetch_lease(DEMO) == Lease("a", 7)
    assert [(one.kind, one.where) for one in noted] == [("lease", key)]
    assert 0 < await client.pttl(key + ":unreadable") <= 30 * 86_400_000
    kept = {
        name.decode(): value for name, value in (await client.hgetall(key + ":unreadable")).items()
    }
    assert kept.keys() == fields.keys()


@DAMAGED_LEASE
async def test_a_lease_without_an_end_gets_one(client, store, noted):
    key = "evenkeel:{demo}:lease"
    await client.hset(key, mapping={"holder": "b", "term": 5})
    for _ in range(2):
        assert await store.acquire_lease(DEMO, "a", 60.0, 0) == Lease("b", 5)
        assert 0 < await client.pttl(key) <= 60_000
    assert [one.why for one in noted] == ["it had no end"]
    # One with an end keeps it, whatever others ask for.
    assert await store.renew_lease(DEMO, Lease("b", 5), 1000.0)
    await store.acquire_lease(DEMO, "a", 60.0, 0)
    assert await client.pttl(key) > 60_000


async def test_plans_and_streams_are_bounded_in_the_server(client):
    store = bounded(RedisDeploymentStore(client), plans_kept=3)
    for number in range(6):
        ended = make_record(f"p{number}", 100.0 + number, phase=PlanPhase.EXPIRED)
        await store.store_plan(ended, 1)
    for name in ("plans", "plan_maps", "plan_story"):
        assert await client.hlen(f"evenkeel:{{demo}}:{name}") == 3
    windows = RedisWindowStore(client, capacity=100)
    window = make_window(range(1000))
    for first in range(0, 1000, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
    assert await client.xlen("evenkeel:{demo}:window:decode") == 13


class Replaying:
    """A client that can repeat a write, like a network that delivers it late."""

    def __init__(self, client):
        self._client, self.writes = client, []

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def eval(self, *arguments):
        self.writes.append(arguments)
        return await self._client.eval(*arguments)

    async def late(self, position):
        return await self._client.eval(*self.writes[position])


async def test_a_write_that_arrives_late_replaces_no_later_one(client):
    late: Any = Replaying(client)
    store = bounded(RedisDeploymentStore(late), plans_kept=2)
    await store.store_plan(make_record(phase=PlanPhase.MIGRATING), 1)
    await store.store_epoch(DEMO, Epoch(1), BASE, 1)
    await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
    await store.store_plan(make_record(phase=PlanPhase.COMMITTED), 1)
    await store.store_epoch(DEMO, Epoch(2), BASE, 1)
    await store.store_document(DEMO, "policy", {"mode": "observe"}, 1)
    # The newest too, as the client's own second try. The earlier ones last, so that none of them is
    # replaced by what is repeated after it.
    for position in (3, 4, 5, 0, 1, 2):
        assert await late.late(position) == 0
    (record,) = await every_plan(store)
    assert record.phase is PlanPhase.COMMITTED
    assert await store.open_plans(DEMO) == []
    assert list(await store.fetch_epochs(DEMO)) == [1, 2]
    assert await store.fetch_document(DEMO, "policy") == {"mode": "observe"}
    # Another writer, as after a restart, is no earlier one; its first write counts.
    other = RedisDeploymentStore(client)
    await other.store_document(DEMO, "policy", {"mode": "propose"}, 1)
    assert await store.fetch_document(DEMO, "policy") == {"mode": "propose"}
    # What is kept for this goes with the plans.
    for number in range(3):
        ended = make_record(f"p{number}", 200.0 + number, phase=PlanPhase.EXPIRED)
        await store.store_plan(ended, 1)
    kept = {name.decode() for name in await client.hkeys("evenkeel:{demo}:written")}
    assert kept == {"plan:p1", "plan:p2", "epochs", "document:policy"}


async def test_a_cluster_takes_every_command(tmp_path, unused_tcp_port_factory):
    """One node of a real cluster that owns all slots."""
    port, bus_port = unused_tcp_port_factory(), unused_tcp_port_factory()
    server = EmbeddedValkey(tmp_path / "probe")
    await server.start()
    binary = server._command()[0]
    await server.stop()
    process = await asyncio.create_subprocess_exec(
        binary,
        *("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes"),
        *("--cluster-port", str(bus_port)),
        *("--dir", str(tmp_path), "--save", "", "--logfile", str(tmp_path / "log")),
    )
    try:
        plain = connect(f"redis://127.0.0.1:{port}", timeout_s=2)

        async def owns_all_slots():
            with contextlib.suppress(ConnectionError):
                return await plain.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def is_ready():
            return b"cluster_state:ok" in bytes(await plain.execute_command("CLUSTER", "INFO"))

        await until(owns_all_slots)
        await until(is_ready)
        await disconnect(plain)
        client = connect(f"redis+cluster://127.0.0.1:{port}", timeout_s=2)
        store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
        lease = await store.acquire_lease(DEMO, "a", 60, 0)
        assert await store.renew_lease(DEMO, lease, 60)
        assert await eviction_policies(client) == frozenset({"noeviction"})
        await store.store_plan(make_record(), lease.term)
        await store.store_epoch(DEMO, Epoch(1), BASE, lease.term)
        await store.append_decision(DEMO, make_decision(1))
        await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
        assert len(await every_plan(store)) == 1
        assert await store.deployments() == [DEMO]
        assert await fetch(windows) is not None
        await windows.forget(DEMO)
        await store.ping()
        await disconnect(client)
    finally:
        process.terminate()
        await process.wait()


async def test_an_epoch_has_at_most_eighteen_digits(client, store, noted):
    await store.store_epoch(DEMO, Epoch(1), BASE, 1)
    body = await client.hget("evenkeel:{demo}:epochs", "1")
    await client.hset("evenkeel:{demo}:epochs", mapping={"9" * 18: body, "9" * 19: body})
    assert list(await store.fetch_epochs(DEMO)) == [1, 10**18 - 1]
    assert [one.where for one in noted] == [f"evenkeel:{{demo}}:epochs b'{'9' * 19}'"]
