"""The windows that are read from the store count in the memory of all deployments."""

import asyncio
from dataclasses import replace

import structlog

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.ingest.group_loads import shape_document
from evenkeel_moe.controller.ingest.group_memory import memory_together
from evenkeel_moe.model.ids import DeploymentId, Generation
from evenkeel_moe.model.load import Phase
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_window
from tests.controller.replicas import DEMO, ONE, TWO, feed, replicas
from tests.protocol.machines import hello_of
from tests.waiting import until

SHAPE = hello_of(0).shape
"""The shape of the ranks in `Replica.lead`."""
LARGE = replace(SHAPE, num_layers=64)


async def keep(store, name, shape=SHAPE, generation="g1"):
    """Store a deployment that replica `a` led, with a window of 20 steps."""
    lease = await store.acquire_lease(name, "a", 0.01, 0)
    leader = {"replica_id": "a", "address": "a:1"}
    body = shape_document(Generation(generation), shape)
    await store.store_document(name, "leader", leader, lease.term)
    await store.store_document(name, "shape", body, lease.term)
    await store.append(name, Phase.DECODE, make_window(range(20), shape=shape))
    await store.release_lease(name, lease)


async def took_up(replica, store):
    """Let a replica take up what it led, and wait until it leads all of it."""
    await replica.registry.take_up(await store.deployments())
    members = replica.registry.deployments.values()
    await until(lambda: all(one.control.leader is not None for one in members))


def steps_of(member):
    return {phase: len(ring) for phase, ring in member.loads.ingest.rings.items() if len(ring)}


async def test_windows_of_many_deployments_are_restored_up_to_the_memory_there_is():
    store = MemoryStore(SystemClock())
    names = [DeploymentId(f"d{number}") for number in range(6)]
    for name in names:
        await keep(store, name)
    async with replicas("a", store=store) as (one, _):
        memory = one.registry.options.memory_of(SHAPE)
        limit = one.registry._memory_bytes = memory_together([memory] * 2)
        with structlog.testing.capture_logs() as logs:
            await took_up(one, store)
        members = one.registry.deployments
        assert set(members) == set(names)
        restored = [name for name in names if steps_of(members[name])]
        assert len(restored) == 2
        held = [member.memory for member in members.values() if member.memory is not None]
        assert memory_together(held) == limit
        refused = [log for log in logs if log["event"] == "windows_not_restored"]
        assert {log["deployment"] for log in refused} == set(names) - set(restored)
        for words in (f"may take {memory},", f"ingest.memory_bytes is {limit}"):
            assert words in refused[0]["detail"]


async def test_windows_that_are_being_restored_count_too(monkeypatch):
    store = MemoryStore(SystemClock())
    for name in (ONE, TWO):
        await keep(store, name)
    gate, waiting = asyncio.Event(), []
    fetch = store.fetch

    async def slow(name, *rest):
        waiting.append(name)
        await gate.wait()
        return await fetch(name, *rest)

    monkeypatch.setattr(store, "fetch", slow)
    async with replicas("a", store=store) as (one, _):
        one.registry._memory_bytes = memory_together([one.registry.options.memory_of(SHAPE)])
        await one.registry.take_up(await store.deployments())
        members = one.registry.deployments
        await until(lambda: any(one.control.leader is not None for one in members.values()))
        assert len(set(waiting)) == 1
        gate.set()
        await until(lambda: all(one.control.leader is not None for one in members.values()))
        assert [name for name in members if steps_of(members[name])] == waiting[:1]


async def test_restored_windows_count_by_their_own_shape():
    """The ranks that come may have declared a smaller one."""
    store = MemoryStore(SystemClock())
    await keep(store, DEMO, LARGE, "of another group")
    async with replicas("a", store=store) as (one, _):
        await took_up(one, store)
        memory_of = one.registry.options.memory_of
        one.member.loads.shape = SHAPE
        assert one.member.memory == memory_of(LARGE)
        await one.lead(highest_term=2)
        await until(lambda: one.member.loads.ingest.generation == "g1")
        assert one.member.memory == memory_of(SHAPE)


async def test_a_group_whose_windows_did_not_fit_is_led_and_begins_empty_ones():
    store = MemoryStore(SystemClock())
    await keep(store, DEMO, LARGE)
    async with replicas("a", store=store) as (one, _):
        memory_of = one.registry.options.memory_of
        assert memory_together([memory_of(LARGE)]) > memory_together([memory_of(SHAPE)])
        one.registry._memory_bytes = memory_together([memory_of(SHAPE)])
        await took_up(one, store)
        assert one.member.memory is None
        await one.lead(highest_term=2)
        feed(one, 0, 5)
        assert steps_of(one.member) == {Phase.DECODE: 5}
        await one.member.store_windows()
        stored = await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)
        assert stored is not None and stored.steps.tolist() == list(range(5))


async def test_a_stored_shape_that_is_not_that_of_the_running_group_is_set_aside():
    async with replicas("a") as (one, store):
        await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        body = shape_document(Generation("g1"), LARGE)
        await store.store_document(DEMO, "shape", body, one.member.leadership.term)
        await one.lose(store, seen=False)
        assert steps_of(one.member) == {Phase.DECODE: 20}
        await until(lambda: one.member.control.state == "ready")
        feed(one, 20, 30)
        await one.member.store_windows()
        assert steps_of(one.member) == {Phase.DECODE: 30}
        stored = await store.fetch_document(DEMO, "shape")
        assert stored == shape_document(Generation("g1"), SHAPE)


async def test_restored_windows_of_another_shape_are_not_those_of_the_group_that_comes():
    store = MemoryStore(SystemClock())
    await keep(store, DEMO, LARGE)
    async with replicas("a", store=store) as (one, _):
        await took_up(one, store)
        assert steps_of(one.member) == {Phase.DECODE: 20}
        await one.lead(highest_term=2)
        feed(one, 0, 5)
        assert steps_of(one.member) == {Phase.DECODE: 5}
