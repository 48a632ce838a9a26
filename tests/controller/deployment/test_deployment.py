"""Actions are stored under the machine's own term, sent in order, and logged once."""

import asyncio
import sys
from dataclasses import replace

import pytest
import structlog

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.controller.ingest.group_loads import shape_document
from evenkeel_moe.controller.ingest.group_memory import memory_together
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.messages import Ack, Leader, MovedAnswers, QueryState, Tick
from evenkeel_moe.protocol.transitions import ControlState
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_window
from tests.controller.replicas import DEMO, ONE, TWO, feed, make_registry, replicas
from tests.protocol.machines import hello_of, key_of, plan_of, prepare_of
from tests.waiting import deadline, until

HOLD = ctl.PersistDocument("control", {"held": True, "frozen_until": 0.0})


def make_deployment(store: MemoryStore) -> Deployment:
    registry = make_registry(store, spawn=None)  # No task is started here.
    return Deployment(DEMO, registry.options, registry.shared)


async def lead(deployment: Deployment, store: MemoryStore):
    """Win the lease again. The machine does not learn of it: its driver does not run here."""
    lease = await store.acquire_lease(DEMO, deployment.keeper.holder, 60.0, 0)
    await deployment.leadership._won(lease)
    deployment.keeper.lease = lease
    return lease


async def leading():
    """Return store, deployment and lease of a replica whose machine leads."""
    store = MemoryStore(SystemClock())
    deployment = make_deployment(store)
    lease = await lead(deployment, store)
    leader = Leader(deployment.keeper.holder, lease.term)
    deployment.control.handle(ctl.LeaseAcquired(leader, ctl.StoredRecords()), 0.0)
    return store, deployment, lease


async def test_what_an_earlier_term_decided_is_not_stored_under_a_later_one_of_the_same_replica():
    store, deployment, first = await leading()
    assert await deployment.executor.persist([HOLD]) == ()
    assert await store.fetch_document(DEMO, "control") == dict(HOLD.body)

    second = await lead(
        deployment, store
    )  # lost and won again while the driver waited for the store
    assert second.term > first.term
    changed = ctl.PersistDocument("control", {"held": False, "frozen_until": 0.0})
    assert await deployment.executor.persist([changed]) == (ctl.LeaseLost(),)
    assert await store.fetch_document(DEMO, "control") == dict(HOLD.body)
    assert deployment.keeper.lease == second, "the newer lease is not given up for it"


async def test_a_lease_that_another_took_is_dropped_at_its_first_refused_write():
    store, deployment, lease = await leading()
    await store.release_lease(DEMO, lease)
    await store.acquire_lease(DEMO, "another", 60.0, 0)
    assert await deployment.executor.persist([HOLD]) == (ctl.LeaseLost(),)
    assert deployment.keeper.lease is None


async def test_of_a_new_deployment_only_the_replica_that_leads_it_stores_whatever_its_term():
    store = MemoryStore(SystemClock())
    registry = make_registry(store, spawn=None)
    deployment = Deployment(DEMO, registry.options, registry.shared, lasting=False)
    lease = await store.acquire_lease(DEMO, deployment.keeper.holder, 60.0, 0, False)
    await deployment.leadership._won(lease)
    deployment.keeper.lease = lease
    deployment.control.handle(ctl.LeaseAcquired(Leader("a", 1), ctl.StoredRecords()), 0.0)
    # The store forgot the first term, so another replica leads under the same one.
    await store.drop_lease(DEMO, lease)
    other = await store.acquire_lease(DEMO, "another", 60.0, 0, False)
    assert other.term == lease.term
    assert await deployment.executor.persist([HOLD]) == (ctl.LeaseLost(),)
    assert await store.fetch_document(DEMO, "control") is None
    await store.drop_lease(DEMO, other)
    deployment.keeper.lease = await store.acquire_lease(
        DEMO, deployment.keeper.holder, 60.0, 0, False
    )
    assert await deployment.executor.persist([HOLD]) == ()
    assert await store.deployments() == [DEMO]


async def test_a_deployment_that_stops_as_it_starts_leaves_nobody_waiting():
    """Its tasks are cancelled before their first step."""
    registry = make_registry(
        MemoryStore(SystemClock()), spawn=lambda work, name: asyncio.create_task(work, name=name)
    )
    deployment = registry.add(DEMO)
    processed: list[bool] = []
    deployment.inbox.post(Tick(), lambda: processed.append(True))
    await deployment.stop()
    assert processed
    with pytest.raises(Unavailable, match="the controller is stopping"):
        await asyncio.wait_for(deployment.inbox.call(lambda now: (None, ())), deadline(5))


async def test_a_waves_map_is_learned_as_it_begins(monkeypatch):
    _, deployment, _ = await leading()
    learned = []
    monkeypatch.setattr(
        deployment.executor, "expect_wave", lambda prepare: learned.append(prepare.wave)
    )
    prepare = prepare_of()
    deployment.executor.perform(ctl.WaveBegins(prepare))
    for rank in (0, 1, 0):
        deployment.executor.perform(ctl.SendToRank(EpRank(rank), 10 + rank, prepare))
    assert learned == [prepare.wave]


async def test_a_leader_that_was_fenced_off_asks_nothing_more():
    """R13; also in the batch whose write was refused."""
    store, deployment, lease = await leading()
    sent = []
    deployment.ranks.send = lambda rank, stream, message: sent.append(message)  # type: ignore[method-assign]
    leader = deployment.control.leader
    assert leader is not None
    question = QueryState(leader, query=1)
    deployment.executor.perform(ctl.SendToRank(EpRank(0), 1, question))
    assert sent == [question]
    await store.release_lease(DEMO, lease)
    await store.acquire_lease(DEMO, "another", 60.0, 0)
    await deployment.driver._carry_out([HOLD, ctl.SendToRank(EpRank(0), 1, question)])
    assert sent == [question]
    assert deployment.control.state is ControlState.FOLLOWER


async def test_a_plan_is_logged_once_however_often_it_is_stored_and_not_held_for_it():
    """Records of large models are megabytes: the log must not keep them alive."""
    _, deployment, _ = await leading()
    told = []
    deployment.executor.log._log_plan = told.append  # type: ignore[method-assign]
    book = PlanRecords()
    action = book.add(plan_of(), PlanPhase.PROPOSED, Reason.PLAN_PROPOSED, 0.0)
    for again in (action, ctl.PersistPlan(action.record)):
        await deployment.executor.persist([again])
    changed = book.change(action.record, "approved", 1.0, phase=PlanPhase.APPROVED)
    await deployment.executor.persist([changed])
    assert told == [action.record, changed.record]
    placement = ctl.PersistEpoch(Generation("g1"), Epoch(0), action.record.plan.base)
    await deployment.executor.persist([placement])
    known = [sys.getrefcount(thing) for thing in (action.record, changed.record, placement)]
    deployment.executor.log._logged.clear()
    assert [sys.getrefcount(thing) for thing in (action.record, changed.record, placement)] == known


async def test_a_plan_that_is_measured_has_not_ended_again():
    _, deployment, _ = await leading()
    ended = []
    deployment.executor.log.metrics.plan_ended = lambda *args: ended.append(args)  # type: ignore[method-assign]
    book = PlanRecords()
    book.add(plan_of(), PlanPhase.MIGRATING, Reason.PLAN_STARTED, 0.0)
    record = next(iter(book.by_id.values()))
    committed = book.change(record, "ended", 1.0, phase=PlanPhase.COMMITTED)
    await deployment.executor.persist([committed])
    gained = DeliveredGain(2.0, unknown_because="no rank reports seconds")
    answers = book.answered(committed.record, [MovedAnswers(key_of(index=1), 2, 2, 0, 0)], 2.0)
    await deployment.executor.persist([answers])
    await deployment.executor.persist([book.measured(answers.record, gained, 2.0)])
    assert len(ended) == 1


async def test_a_wave_that_a_new_leader_finds_is_counted_once_and_its_duration_is_not_known():
    _, deployment, _ = await leading()
    counted = []
    deployment.executor.log.metrics.wave_committed = lambda *args: counted.append(args)  # type: ignore[method-assign]
    deployment.control.records.add(plan_of(), PlanPhase.MIGRATING, Reason.PLAN_STARTED, 0.0)
    for index, newly_counted in ((0, False), (1, True), (1, True)):
        wave = key_of(index=index)
        ended = ctl.WaveEnded(wave, True, Reason.COMMITTED, newly_counted)
        deployment.executor.perform(ended)
    assert [(seconds, moves) for _, seconds, moves, _ in counted] == [(None, 1)]


async def test_a_leader_that_was_fenced_off_leaves_a_wave_to_the_next_one_to_count():
    store, deployment, lease = await leading()
    counted = []
    deployment.executor.log.metrics.wave_committed = lambda *args: counted.append(args)  # type: ignore[method-assign]
    deployment.control.records.add(plan_of(), PlanPhase.MIGRATING, Reason.PLAN_STARTED, 0.0)
    await store.release_lease(DEMO, lease)
    await store.acquire_lease(DEMO, "another", 60.0, 0)
    ended = ctl.WaveEnded(key_of(index=0), True, Reason.COMMITTED)
    await deployment.driver._carry_out([HOLD, ended])
    assert counted == []


async def test_an_acknowledgement_that_is_repeated_is_no_stall_of_a_step():
    _, deployment, _ = await leading()
    stalls = []
    deployment.executor.shared.metrics.swap_stall = lambda *args: stalls.append(args)  # type: ignore[method-assign]
    for seconds in (0.02, 0.0):
        deployment.ranks.swapped(Ack(key_of(), Epoch(1), "digest", swap_s=seconds))
    assert stalls == [(DEMO, 0.02)]


async def test_each_decision_is_logged_once():
    _, deployment, _ = await leading()
    rows = [ctl.PersistDecision({"at": at, "reason": "no_change"}) for at in (1.0, 2.0)]
    for _ in range(2):
        await deployment.executor.persist(rows)
    assert [row["at"] for row in deployment.decisions] == [1.0, 2.0]


# --- The windows that are read from the store count in the memory of all deployments --------------


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
        limit = one.registry.memory_bytes = memory_together([memory] * 2)
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
        one.registry.memory_bytes = memory_together([one.registry.options.memory_of(SHAPE)])
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
        one.registry.memory_bytes = memory_together([memory_of(SHAPE)])
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
        fitting = [one.member.loads.windows_of(Placement.initial(each)) for each in (SHAPE, LARGE)]
        assert [set(windows) for windows in fitting] == [{Phase.DECODE}, set()]
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


# --- The parts of a deployment follow its machine and its clock -----------------------------------


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
async def test_records_go_by_the_clock_as_it_is_set(leading_two, step_s):
    registry, operations, clock = leading_two
    member = registry.deployments[ONE]
    # The machine leads from its next event on. Then its executor has an offset of its own.
    await until(lambda: member.control.leading is not None)
    before = member.control.unix_offset_s
    clock.ahead_s = step_s
    await until(lambda: member.control.unix_offset_s != before)
    for offset in (member.control.unix_offset_s, member.control.as_leader.executor.unix_offset_s):
        assert offset == pytest.approx(clock.unix() - clock.monotonic(), abs=1.0)
