"""What a deployment knows when it begins to lead: from the store, and where the store forgot, from before."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_record
from tests.controller.replicas import DEMO, feed, replicas
from tests.waiting import until


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
        return None, replica.member.control.write_retry.order([replica.member.control.document()])

    await replica.member.driver.call(change)


# --- a store that comes back empty ----------------------------------------------------------------


async def test_a_flushed_store_undoes_nothing_an_operator_set():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead()
        await one.operations.set_policy(DEMO, {"mode": "observe"}, "eve")
        await one.operations.freeze(DEMO, 3600.0, "eve")
        await hold(one)
        term = one.member.leadership.term
        flush(store)
        await until(
            lambda: one.member.leadership.term > term and one.member.control.state == "ready"
        )
        assert orders(one) == (Mode.OBSERVE, True, True)
        assert (await store.fetch_document(DEMO, "policy"))["mode"] == "observe"
        control = await store.fetch_document(DEMO, "control")
        assert control["held"] and control["frozen_until"] > 0
        await until(lambda: _said(one, "stay as they were"))
        # Nor is it forgotten whose steps are stored from now on.
        await one.member.store_windows()
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g1"


async def _said(replica, words):
    return any(
        words in row.get("detail", "") for row in await replica.operations.decisions(DEMO, 100)
    )


async def test_a_new_process_on_an_emptied_store_holds_automatic_plans_and_says_so():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead(highest_term=7)
        assert orders(one) == (Mode.AUTO, True, False)
        assert one.member.leadership.term > 7
        assert (await store.fetch_document(DEMO, "control"))["held"]
        await until(lambda: _said(one, "held until resume"))
        await one.operations.resume(DEMO, "eve")
        assert not one.member.control.held


async def test_a_replica_that_led_earlier_does_not_take_its_memory_for_the_latest_word():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, store):
        sessions = await one.lead()
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.leadership.term)
        await hold(two)
        flush(store)
        await two.tasks.end()
        await one.lead(first=21, highest_term=two.member.leadership.term)
        assert orders(one) == (Mode.AUTO, True, False)


async def test_what_is_stored_beats_what_a_replica_remembers():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, _):
        sessions = await one.lead()
        await hold(one)
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.leadership.term)
        assert two.member.control.held
        await two.operations.resume(DEMO, "eve")
        await two.yield_lease(sessions)
        await one.lead(first=21, highest_term=two.member.leadership.term)
        assert not one.member.control.held


@pytest.mark.parametrize("again", [False, True])
async def test_a_new_deployment_is_held_by_nothing(again):
    async with replicas("a", mode=Mode.AUTO) as (one, _):
        sessions = await one.lead()
        if again:
            await one.yield_lease(sessions)
            await one.lead(first=11, highest_term=one.member.leadership.term)
        assert orders(one) == (Mode.AUTO, False, False)
        assert not [row for row in await one.operations.decisions(DEMO, 100) if "detail" in row]


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
            record = await one.operations.plan(DEMO, PlanId(name))
            assert record.reason is Reason.GENERATION_CHANGED
        assert await store.open_plans(DEMO) == []


# --- windows --------------------------------------------------------------------------------------


def steps_of(replica):
    return replica.member.loads.ingest.rings[Phase.DECODE].window().steps.tolist()


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
        await until(lambda: one.member.loads.ingest.generation == "g2")
        assert one.member.loads.ingest.newest_step == 39
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


async def test_a_ranks_trouble_outlives_a_lease_lost_and_won_again():
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        sessions[1].received(Heartbeat(1, 2, 3, "its replicas differ"))
        await one.lose(store, seen=False)
        await until(lambda: one.member.control.state == "ready")
        reason, detail = one.member.control.state_reason(one.member.clock.monotonic())
        assert (reason, "its replicas differ" in detail) == (Reason.OBSERVE_ONLY, True)


async def test_an_order_the_store_did_not_take_is_not_led_without():
    store = MemoryStore(SystemClock())
    async with replicas("a", store=store) as (one, _):
        await one.lead()
        await one.operations.set_policy(DEMO, {"mode": "observe"}, "me")
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
