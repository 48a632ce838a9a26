"""What only the real store has: damaged values, bounds in the server, two writers, a cluster."""

import asyncio
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError, TimeoutError

from evenkeel_moe.adapters.redis.client import connect, disconnect, eviction_policies
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.encoding import (
    Unreadable,
    pack_placement,
    pack_plan,
    pack_source,
    pack_window,
    unpack_placement,
    unpack_plan,
    unpack_source,
    unpack_window,
)
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanPhase
from tests.contracts.test_stores import (
    BASE,
    DEMO,
    assert_same,
    every_plan,
    make_record,
    make_window,
)

# --- damage ------------------------------------------------------------------------------------


FORMS = [
    (pack_window(make_window(range(3))), unpack_window),
    (pack_source(make_window(range(3), source=True).source), unpack_source),
    (pack_placement(BASE), unpack_placement),
    (pack_plan(make_record()), unpack_plan),
]


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
)
def test_damaged_values_are_unreadable_and_nothing_worse(form, cuts):
    data, unpack = form
    damaged = bytearray(data)
    for position, value in cuts:
        damaged[position % len(damaged)] = value
    try:
        unpack(bytes(damaged))
    except Unreadable:
        pass


@given(st.sampled_from(FORMS), st.binary(max_size=60))
def test_foreign_values_are_unreadable_and_nothing_worse(form, data):
    for value in (data, form[0][: len(data)]):
        with pytest.raises(Unreadable):
            form[1](value)


@pytest.mark.parametrize(
    "most, width",
    [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), ((1 << 24) - 1, 3), ((1 << 32) - 1, 4)],
)
def test_counts_take_as_many_bytes_as_the_largest_needs(most, width):
    window = make_window(range(2), high=most + 1)
    window.counts[0, 0, 0] = most
    data = pack_window(window)
    assert data[1] == width
    assert_same(unpack_window(data), window)
    assert pack_window(*(window.slice(slice(i, i + 1)) for i in range(2))) == data


def test_a_chunk_that_claims_too_many_counts_is_not_unpacked():
    """One byte a count on the wire is four in memory."""
    head = struct.pack("<BBIIII", 2, 1, 1 << 14, 1 << 7, 1 << 8, 1)
    with pytest.raises(Unreadable, match="16384 x 128 x 256 counts"):
        unpack_window(head + b"anything")


async def test_what_cannot_be_read_is_left_out(valkey):
    client = connect(valkey.url, timeout_s=2)
    store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
    await store.store_plan(make_record("good"), 1)
    await store.store_plan(make_record("bad"), 1)
    await store.store_epoch(DEMO, Epoch(1), BASE, 1)
    await client.hset("evenkeel:{demo}:plans", "bad", b"\0noise")
    await client.hset("evenkeel:{demo}:epochs", "2", b"noise")
    await client.hset("evenkeel:{demo}:documents", "policy", b"[1")
    await client.xadd("evenkeel:{demo}:decisions", {"d": b"noise"})
    await store.append_decision(DEMO, {"cycle": 1})
    await windows.append(DEMO, Phase.DECODE, make_window(range(3)))
    await client.xadd("evenkeel:{demo}:window:decode", {"n": 1, "d": b"noise"})
    await client.set("evenkeel:{demo}:window_source:decode", b"noise")
    assert [record.plan.plan_id for record in await every_plan(store)] == ["good"]
    assert list(await store.fetch_epochs(DEMO)) == [1]
    assert await store.fetch_document(DEMO, "policy") is None
    assert await store.fetch_decisions(DEMO, 10) == [{"cycle": 1}]
    found = await windows.fetch(DEMO, Phase.DECODE)
    assert found is not None
    assert_same(found, make_window(range(3)))
    await disconnect(client)


# --- bounds and overlaps -----------------------------------------------------------------------


async def test_every_key_runs_out_from_its_first_write_on(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client, record_age_s=100.0, decision_age_s=50.0)
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
        "plan_order",
        "plans_open",
    }
    await disconnect(client)


async def test_everything_of_a_deployment_shares_a_hash_tag_and_windows_expire(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
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
    await disconnect(client)


async def test_a_deployment_is_listed_for_as_long_as_it_is_led(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client, record_age_s=2.0)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    for _ in range(30):
        await asyncio.sleep(0.1)
        assert await store.renew_lease(DEMO, lease, 60)
    assert await store.deployments() == [DEMO]
    await disconnect(client)


async def test_plans_and_streams_are_bounded_in_the_server(valkey):
    client = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client, plans_kept=3)
    for number in range(6):
        await store.store_plan(make_record(f"p{number}", 100.0 + number), 1)
    assert await client.hlen("evenkeel:{demo}:plans") == 3
    assert await store.open_plans(DEMO) == ["p3", "p4", "p5"]
    windows = RedisWindowStore(client, capacity=100)
    window = make_window(range(1000))
    for first in range(0, 1000, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
    assert await client.xlen("evenkeel:{demo}:window:decode") == 13
    await disconnect(client)


async def test_parts_given_together_share_chunks(valkey):
    client = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=512), make_window(range(200))
    await windows.append(
        DEMO, Phase.DECODE, *(window.slice(slice(i, i + 5)) for i in range(0, 200, 5))
    )
    assert await client.xlen("evenkeel:{demo}:window:decode") == 4
    assert_same(await windows.fetch(DEMO, Phase.DECODE), window)
    await disconnect(client)


class Replaying:
    """A client that can carry a write out once more, as the network does with one it held back."""

    def __init__(self, client):
        self._client, self.writes = client, []

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def eval(self, *arguments):
        self.writes.append(arguments)
        return await self._client.eval(*arguments)

    async def late(self, position):
        return await self._client.eval(*self.writes[position])


async def test_a_write_that_arrives_late_replaces_no_later_one(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
    late: Any = Replaying(client)
    store = RedisDeploymentStore(late, plans_kept=2)
    await store.store_plan(make_record(phase=PlanPhase.MIGRATING), 1)
    await store.store_epoch(DEMO, Epoch(1), BASE, 1)
    await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
    await store.store_plan(make_record(phase=PlanPhase.COMMITTED), 1)
    await store.store_epoch(DEMO, Epoch(2), BASE, 1)
    await store.store_document(DEMO, "policy", {"mode": "observe"}, 1)
    for position in range(6):  # Also the newest, as the client's own second try.
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
        await store.store_plan(make_record(f"p{number}", 200.0 + number), 1)
    kept = {name.decode() for name in await client.hkeys("evenkeel:{demo}:written")}
    assert kept == {"plan:p1", "plan:p2", "epochs", "document:policy"}
    await disconnect(client)


@pytest.mark.parametrize("lost", ["window_total", "window_chunks"])
async def test_a_window_stays_bounded_when_its_count_is_lost(valkey, lost):
    client: Any = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(200))
    for first in range(0, 40, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
    await client.delete(f"evenkeel:{{demo}}:{lost}:decode")
    for first in range(40, 200, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
        found = await windows.fetch(DEMO, Phase.DECODE)
        assert found is not None
        assert_same(found, window.slice(slice(0, first + 8)).last(20))
        assert await client.xlen("evenkeel:{demo}:window:decode") <= (3 if first >= 64 else 6)
    await disconnect(client)


async def test_chunks_whose_answers_are_lost_are_counted_all_the_same(valkey, monkeypatch):
    """The store did it, the controller does not know and gives the same steps again."""
    client: Any = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(400))
    execute = Pipeline.execute

    async def lost(self, raise_on_error=True):
        await execute(self, raise_on_error)
        raise TimeoutError("no answer")

    await windows.append(DEMO, Phase.DECODE, window.slice(slice(0, 8)))
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "execute", lost)
        for first in range(8, 392, 4):
            with pytest.raises(Unavailable):
                await windows.append(DEMO, Phase.DECODE, window.slice(slice(8, first + 8)))
            assert await client.xlen("evenkeel:{demo}:window:decode") <= 4
    assert 0 < await client.pttl("evenkeel:{demo}:window:decode")
    await windows.append(DEMO, Phase.DECODE, window.slice(slice(8, 400)))
    found = await windows.fetch(DEMO, Phase.DECODE)
    assert found is not None
    assert_same(found, window.last(20))
    await disconnect(client)


async def test_a_chunk_whose_count_was_lost_on_the_way_does_not_stay(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(64))
    chunk = {"n": 8, "d": pack_window(window.slice(slice(0, 8)))}
    await client.xadd("evenkeel:{demo}:window:decode", chunk)
    for first in range(0, 64, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
        found = await windows.fetch(DEMO, Phase.DECODE)
        assert found is not None
        assert_same(found, window.slice(slice(0, first + 8)).last(20))
    assert await client.xlen("evenkeel:{demo}:window:decode") == 3
    await disconnect(client)


async def test_steps_two_writers_stored_twice_are_read_once(valkey):
    client = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client), make_window(range(20))
    for cut in (slice(0, 8), slice(4, 12), slice(8, 14), slice(14, 20)):
        await windows.append(DEMO, Phase.DECODE, window.slice(cut))
    found = await windows.fetch(DEMO, Phase.DECODE)
    assert found is not None
    assert_same(found, window)
    await disconnect(client)


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
        for _ in range(100):
            try:
                await plain.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                break
            except ConnectionError:
                await asyncio.sleep(0.05)
        for _ in range(100):
            if b"cluster_state:ok" in bytes(await plain.execute_command("CLUSTER", "INFO")):
                break
            await asyncio.sleep(0.05)
        await disconnect(plain)
        client = connect(f"redis+cluster://127.0.0.1:{port}", timeout_s=2)
        store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
        lease = await store.acquire_lease(DEMO, "a", 60, 0)
        assert await store.renew_lease(DEMO, lease, 60)
        assert await eviction_policies(client) == frozenset({"noeviction"})
        await store.store_plan(make_record(), lease.term)
        await store.store_epoch(DEMO, Epoch(1), BASE, lease.term)
        await store.append_decision(DEMO, {"cycle": 1})
        await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
        assert len(await every_plan(store)) == 1
        assert await store.deployments() == [DEMO]
        assert await windows.fetch(DEMO, Phase.DECODE) is not None
        await windows.forget(DEMO)
        await store.ping()
        await disconnect(client)
    finally:
        process.terminate()
        await process.wait()
