"""What a deployment knows when it begins to lead: from the store, and where the store forgot, from before."""

import asyncio
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.deployment.action_executor import StoreHealth
from evenkeel_moe.controller.deployment.deployment import Outside
from evenkeel_moe.controller.operations.operator_service import Fleet
from evenkeel_moe.controller.process.serve import _deployment_options
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation, PlanId
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.protocol.messages import QueryState
from evenkeel_moe.settings import Settings
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_record
from tests.controller.spawned import Spawned
from tests.protocol.rigs import hello_of, state_of
from tests.waiting import until

DEMO = DeploymentId("d")
"""As the protocol's rigs name it."""


class Replica:
    """One controller on a store, without ports; its ranks answer when they are asked."""

    def __init__(self, store, name, *, max_deployments=8, **planner):
        settings = Settings()
        settings = replace(
            settings,
            planner=replace(settings.planner, **planner),
            leader=replace(settings.leader, replica_id=name, replicas=2, lease_s=2.0, renew_s=0.05),
        )
        clock, metrics = SystemClock(), ControllerMetrics(CollectorRegistry())
        self.tasks, self.store = Spawned(), store
        outside = Outside(
            store, store, clock, metrics, StoreHealth(clock, metrics), None, self.tasks.spawn
        )
        options = _deployment_options(settings, f"{name}:1")
        self.fleet = Fleet(options, outside, max_deployments=max_deployments)

    @property
    def member(self):
        return self.fleet.members[DEMO]

    async def lead(self, generation="g1", first=1, highest_term=0):
        """Until its two ranks are led and have told where they stand; their sessions."""
        streams = [RankStream(first + rank, "peer", capacity=4096) for rank in range(2)]
        sessions = []
        for rank, stream in enumerate(streams):
            hello = hello_of(rank, generation, first, highest_term=highest_term)
            sessions.append(await self.fleet.attach(hello, stream))
        assert all(sessions)
        self.tasks.spawn(_answer(streams, sessions), "ranks")
        await until(lambda: self.member.control.state == "ready")
        return sessions

    async def yield_lease(self, sessions):
        await self.member.keeper.yield_lease("a test")
        for session in sessions:
            session.lost()
        await until(lambda: self.member.control.leader is None)

    async def lose(self, store, other="b", *, seen=True):
        """The lease, to another that leads for a moment and has no ranks; until this one leads again. The other's term.

        seen: this one meets the other, and sends its ranks to it.
        """
        await store.release_lease(DEMO, self.member.keeper.lease)
        lease = await store.acquire_lease(DEMO, other, 60.0, 0)
        leader = {"replica_id": other, "address": f"{other}:1"}
        await store.store_document(DEMO, "leader", leader, lease.term)
        if seen:
            await until(lambda: self.member.control.leader is None)
        await store.release_lease(DEMO, lease)
        self.member.keeper.want()
        await until(
            lambda: self.member.control.leader is not None and self.member.term > lease.term
        )
        return lease.term

    async def reasons(self):
        return [row["reason"] for row in await self.fleet.decisions(DEMO, 100)]


async def _answer(streams, sessions):
    while True:
        await asyncio.sleep(0.01)
        for rank, stream in enumerate(streams):
            for message in [stream._queue.popleft() for _ in range(len(stream._queue))]:
                if isinstance(message, QueryState):
                    identity = sessions[rank].hello.identity
                    sessions[rank].received(state_of(rank, query=message.query, identity=identity))


@asynccontextmanager
async def replicas(*names, store=None, **options):
    store = store or MemoryStore(SystemClock())
    made = [Replica(store, name, **options) for name in names]
    try:
        yield (*made, store)
    finally:
        for replica in made:
            await replica.tasks.end()


def flush(store):
    for kept in (store._leases, store._terms, store._plans, store._epochs, store._documents):
        kept.clear()
    store._decisions.clear()
    store._windows.clear()


def orders(replica):
    control = replica.member.control
    return control.policy.mode, control.held, control.frozen_until > 0


async def hold(replica):
    """As a rollback leaves it."""

    def change(_now):
        replica.member.control.planning_loop.held = True
        return None, replica.member.control.outgoing([replica.member.control.document()])

    await replica.member.driver.call(change)


# --- a store that comes back empty ----------------------------------------------------------------


async def test_a_flushed_store_undoes_nothing_an_operator_set():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead()
        await one.fleet.set_policy(DEMO, {"mode": "observe"}, "eve")
        await one.fleet.freeze(DEMO, 3600.0, "eve")
        await hold(one)
        term = one.member.term
        flush(store)
        await until(lambda: one.member.term > term and one.member.control.state == "ready")
        assert orders(one) == (Mode.OBSERVE, True, True)
        assert (await store.fetch_document(DEMO, "policy"))["mode"] == "observe"
        control = await store.fetch_document(DEMO, "control")
        assert control["held"] and control["frozen_until"] > 0
        await until(lambda: _said(one, "stay as they were"))
        # Nor is it forgotten whose steps are stored from now on.
        await one.member.store_windows()
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g1"


async def _said(replica, words):
    return any(words in row.get("detail", "") for row in await replica.fleet.decisions(DEMO, 100))


async def test_a_new_process_on_an_emptied_store_holds_automatic_plans_and_says_so():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead(highest_term=7)
        assert orders(one) == (Mode.AUTO, True, False)
        assert one.member.term > 7
        assert (await store.fetch_document(DEMO, "control"))["held"]
        await until(lambda: _said(one, "held until resume"))
        await one.fleet.resume(DEMO, "eve")
        assert not one.member.control.held


async def test_a_replica_that_led_earlier_does_not_take_its_memory_for_the_latest_word():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, store):
        sessions = await one.lead()
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.term)
        await hold(two)
        flush(store)
        await two.tasks.end()
        await one.lead(first=21, highest_term=two.member.term)
        assert orders(one) == (Mode.AUTO, True, False)


async def test_what_is_stored_beats_what_a_replica_remembers():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, _):
        sessions = await one.lead()
        await hold(one)
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.term)
        assert two.member.control.held
        await two.fleet.resume(DEMO, "eve")
        await two.yield_lease(sessions)
        await one.lead(first=21, highest_term=two.member.term)
        assert not one.member.control.held


@pytest.mark.parametrize("again", [False, True])
async def test_a_new_deployment_is_held_by_nothing(again):
    async with replicas("a", mode=Mode.AUTO) as (one, _):
        sessions = await one.lead()
        if again:
            await one.yield_lease(sessions)
            await one.lead(first=11, highest_term=one.member.term)
        assert orders(one) == (Mode.AUTO, False, False)
        assert not [row for row in await one.fleet.decisions(DEMO, 100) if "detail" in row]


# --- plans ----------------------------------------------------------------------------------------


async def test_a_new_leader_finds_an_open_plan_behind_many_newer_ones():
    async with replicas("a") as (one, store):

        async def stored(name, created_at, phase):
            record = make_record(name, created_at, phase=phase, story=())
            await store.store_plan(replace(record, plan=replace(record.plan, deployment=DEMO)), 0)

        await stored("moving", 1.0, PlanPhase.STALLED)
        await stored("waits", 2.0, PlanPhase.PROPOSED)
        for number in range(60):
            await stored(f"dry-{number}", 10.0 + number, PlanPhase.EXPIRED)
        await one.lead()
        # Both were made for an earlier life of the group, and end as such.
        for name in ("moving", "waits"):
            record = await one.fleet.plan(DEMO, PlanId(name))
            assert record.reason is Reason.GENERATION_CHANGED
        assert await store.open_plans(DEMO) == []


# --- windows --------------------------------------------------------------------------------------


def report(rank, first, end, generation, incarnation):
    """One token per slot and step."""
    steps = step_table([StepMeta(step, 0, Phase.DECODE, 3) for step in range(first, end)])
    counts = np.ones((end - first, 2, 3), np.int32)
    identity = (DEMO, Generation(generation), EpRank(rank), incarnation)
    return LoadReport(*identity, CountingSide.DESTINATION, steps, counts)


def feed(replica, first, end, generation="g1", incarnation=1):
    for rank in range(2):
        replica.member.ingest.take(
            report(rank, first, end, generation, incarnation), lambda _: None
        )


def steps_of(replica):
    return replica.member.ingest.rings[Phase.DECODE].window().steps.tolist()


async def test_a_replica_that_leads_again_has_the_steps_the_other_stored():
    async with replicas("a", "b") as (one, two, store):
        sessions = await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        feed(one, 20, 25)  # Never stored, and counted on by the other.
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
        assert (await store.fetch(DEMO, Phase.DECODE)).steps.tolist() == list(range(70))


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
        await until(lambda: one.member.ingest.generation == "g2")
        assert one.member.ingest.newest_step == 39
        feed(one, 40, 50, "g2", 21)
        await one.member.store_windows()
        assert steps_of(one) == list(range(50))
        assert (await store.fetch(DEMO, Phase.DECODE)).steps.tolist() == list(range(50))


async def test_steps_that_only_this_replica_has_outlive_another_that_led_without_ranks():
    async with replicas("a") as (one, store):
        await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        feed(one, 20, 25)
        await one.lose(store)
        assert steps_of(one) == list(range(25))
        await one.member.store_windows()
        assert (await store.fetch(DEMO, Phase.DECODE)).steps.tolist() == list(range(25))


@pytest.mark.parametrize("stay", [False, True])
async def test_a_group_that_restarted_before_the_store_was_told_is_counted_under_its_own_generation(
    stay,
):
    """The stored window is of the group before: taken for the new one's, it would hide its steps for days."""
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        feed(one, 0, 200)
        await one.member.store_windows()
        for session in sessions:
            session.lost()
        sessions = await one.lead("g2", first=11, highest_term=one.member.term)
        await until(lambda: one.member.ingest.generation == "g2")
        feed(one, 0, 20, "g2", 11)
        if not stay:
            for session in sessions:
                session.lost()
        term = await one.lose(store, seen=not stay)
        if not stay:
            await one.lead("g2", first=31, highest_term=term)
        await until(
            lambda: one.member.control.state == "ready" and one.member.ingest.generation == "g2"
        )
        feed(one, 20, 60, "g2", 11 if stay else 31)
        await one.member.store_windows()
        # Without ranks nobody knew which of both groups would return: what was not stored of the new one is begun anew.
        assert steps_of(one) == list(range(0 if stay else 20, 60))
        assert (await store.fetch(DEMO, Phase.DECODE)).steps.tolist() == steps_of(one)
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g2"


@pytest.mark.parametrize("fails", [None, Unavailable("a timeout"), asyncio.CancelledError()])
async def test_a_group_that_restarts_while_the_shape_is_stored_has_its_own_stored(fails):
    """The stored shape names the generation whose window it is: by an old one the next leader would drop the window."""
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        feed(one, 0, 20)
        keep, met = store.store_document, []

        async def slow(deployment, name, body, term):
            if name == "shape" and not met:
                met.append(body["generation"])
                for session in sessions:
                    session.lost()
                await one.lead("g2", first=11, highest_term=one.member.term)
                await until(lambda: one.member.ingest.generation == "g2")
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


async def test_a_ranks_trouble_outlives_a_lease_lost_and_won_again():
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        sessions[1].received(Heartbeat(1, 2, 3, "its replicas differ"))
        await one.lose(store, seen=False)
        await until(lambda: one.member.control.state == "ready")
        reason, detail = one.member.control.state_reason(one.member.outside.clock.monotonic())
        assert (reason, "its replicas differ" in detail) == (Reason.OBSERVE_ONLY, True)


async def test_an_order_the_store_did_not_take_is_not_led_without():
    store = MemoryStore(SystemClock())
    async with replicas("a", store=store) as (one, _):
        await one.lead()
        await one.fleet.set_policy(DEMO, {"mode": "observe"}, "me")
        flush(store)
        refused, keep = [], store.store_document

        async def refuses(deployment, name, body, term):
            if name == "policy" and len(refused) < 2:
                refused.append(term)
                raise Unavailable("a timeout")
            await keep(deployment, name, body, term)

        store.store_document = refuses
        await until(lambda: len(refused) == 2 and one.member.control.state == "ready")
        assert (await store.fetch_document(DEMO, "policy"))["mode"] == "observe"
