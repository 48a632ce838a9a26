"""The windows follow the machine and the store over restarts, takeovers and new groups."""

import asyncio
from contextlib import nullcontext

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.controller.ingest.group_loads import (
    GroupLoads,
    shape_document,
    shape_from_document,
    topology_of,
)
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import DEMO, feed, make_health, make_registry, replicas
from tests.protocol.machines import answer_queries, control_of
from tests.telemetry.reports import SHAPE
from tests.waiting import until


def stop(sessions):
    """Stop a group as planned: its name is then free for another one."""
    for session in sessions:
        session.received(Heartbeat(1, 1, 1, stopping=True))
        session.lost()


def test_nodes_are_numbered_as_ranks_name_them():
    assert topology_of(["b", "b", "a", "b"]).node_of_rank == (0, 0, 1, 0)


def test_a_shape_survives_its_document():
    generation = Generation("g")
    assert shape_from_document(shape_document(generation, SHAPE)) == (generation, SHAPE)
    for body in (None, {}, {"generation": "g"}, {"generation": "g", "shape": {"num_layers": 0}}):
        assert shape_from_document(body) is None


def steps_of(replica):
    return replica.member.loads.ingest.rings[Phase.DECODE].window().steps.tolist()


async def test_a_replica_that_leads_again_has_the_steps_the_other_stored():
    async with replicas("a", "b") as (one, two, store):
        sessions = await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        feed(one, 20, 25)  # Never stored; the other replica counts these steps too.
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=1)
        feed(two, 20, 60, incarnation=11)
        await two.member.store_windows()
        await two.yield_lease(sessions)
        await one.lead(first=21, highest_term=2)
        assert steps_of(one) == list(range(60))
        feed(one, 60, 70, incarnation=21)
        await one.member.store_windows()
        assert steps_of(one) == list(range(70))
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == list(range(70))


async def test_a_replica_that_leads_again_keeps_the_window_of_a_group_that_restarted_meanwhile():
    async with replicas("a", "b") as (one, two, store):
        sessions = await one.lead()
        feed(one, 0, 200)
        await one.member.store_windows()
        await one.yield_lease(sessions)
        sessions = await two.lead("g2", first=11)
        feed(two, 0, 40, "g2", 11)
        await two.member.store_windows()
        await two.yield_lease(sessions)
        await one.lead("g2", first=21, highest_term=2)
        await until(lambda: one.member.loads.ingest.generation == "g2")
        assert one.member.loads.ingest.newest_step == 39
        feed(one, 40, 50, "g2", 21)
        await one.member.store_windows()
        assert steps_of(one) == list(range(50))
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == list(range(50))


async def test_steps_that_only_this_replica_has_outlive_another_that_led_without_ranks():
    async with replicas("a") as (one, store):
        await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        feed(one, 20, 25)
        await one.lose(store)
        assert steps_of(one) == list(range(25))
        await one.member.store_windows()
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == list(range(25))


@pytest.mark.parametrize("stay", [False, True])
async def test_a_group_that_restarted_before_the_write_is_counted_under_its_own_generation(
    stay,
):
    """The stored window is of the former group: it would hide the steps of the new one for days."""
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        feed(one, 0, 200)
        await one.member.store_windows()
        stop(sessions)
        sessions = await one.lead("g2", first=11, highest_term=one.member.leadership.term)
        await until(lambda: one.member.loads.ingest.generation == "g2")
        feed(one, 0, 20, "g2", 11)
        if not stay:
            for session in sessions:
                session.lost()
        term = await one.lose(store, seen=not stay)
        if not stay:
            await one.lead("g2", first=31, highest_term=term)
        await until(
            lambda: (
                one.member.control.state == "ready" and one.member.loads.ingest.generation == "g2"
            )
        )
        feed(one, 20, 60, "g2", 11 if stay else 31)
        await one.member.store_windows()
        # Without ranks nobody knew which group returns: unstored steps of the new one are lost.
        assert steps_of(one) == list(range(0 if stay else 20, 60))
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == steps_of(one)
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g2"


@pytest.mark.parametrize("fails", [None, Unavailable("a timeout"), asyncio.CancelledError()])
async def test_a_group_that_restarts_while_the_shape_is_stored_has_its_own_stored(fails):
    """The stored shape names the generation of the window: a wrong one would drop the window."""
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        feed(one, 0, 20)
        keep, met = store.store_document, []

        async def slow(deployment, name, body, term):
            if name == "shape" and not met:
                met.append(body["generation"])
                stop(sessions)
                await one.lead("g2", first=11, highest_term=one.member.leadership.term)
                await until(lambda: one.member.loads.ingest.generation == "g2")
                if fails is not None:
                    raise fails
            await keep(deployment, name, body, term)

        store.store_document = slow
        with nullcontext() if fails is None else pytest.raises(type(fails)):
            await one.member.store_windows()
        await one.member.store_windows()
        assert met == ["g1"]
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g2"


@pytest.mark.parametrize("fails", [Unavailable("a timeout"), asyncio.CancelledError()])
async def test_a_shape_that_was_not_stored_is_given_again(fails):
    async with replicas("a") as (one, store):
        await one.lead()
        keep, refused = store.store_document, []

        async def refuses(deployment, name, body, term):
            if name == "shape" and not refused:
                refused.append(body)
                raise fails
            await keep(deployment, name, body, term)

        store.store_document = refuses
        with pytest.raises(type(fails)):
            await one.member.store_windows()
        await one.member.store_windows()
        assert (await store.fetch_document(DEMO, "shape")) == refused[0]


async def test_maps_of_an_earlier_group_with_fewer_experts_are_not_counted_by():
    """Layers, slots and ranks agree: only the number of experts shows that it is another model."""
    control = control_of(ControlState.RECOVERING)
    answer_queries(control, epoch=Epoch(3))
    committed = control.placement
    assert committed is not None
    other = Placement(
        committed.phy2log.copy(), committed.num_ranks, committed.num_logical_experts + 1
    )
    control.as_leader.executor.history = {Epoch(1): other, Epoch(2): committed, Epoch(3): committed}
    store = MemoryStore(SystemClock())
    ingest = _ingest_on(store)
    loads = GroupLoads(control, store, ingest, 8, DispatchModel.EVEN, make_health())
    loads.times.update({}, committed, 3, loads.split())
    assert len(loads.times.speed_factors()) == committed.num_ranks
    assert loads.follow_generation()
    assert len(loads.times.speed_factors()) == 0, "the ranks' times are of a generation, too"
    loads.follow_placement()
    assembler = ingest._assembler
    assert assembler is not None
    assert {1, 2, 3} & set(assembler._epochs) == {2, 3}


def _ingest_on(store):
    registry = make_registry(store, spawn=None)  # No task is started here.
    return Deployment(DEMO, registry.options, registry.shared).loads.ingest
