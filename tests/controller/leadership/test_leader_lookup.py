"""A replica names the leader of a deployment, and leaves the rest of the answer to that leader."""

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.api.convert import deployment_out
from evenkeel_moe.errors import Conflict, NotFound, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, PlanId
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.planning.decision.capacity import CapacityRequest
from evenkeel_moe.ports.operations import LedElsewhere, NotLeading, RollbackRequest
from tests.contracts.memory_store import SilentStore
from tests.contracts.test_stores import make_record
from tests.controller.replicas import DEMO, feed, replicas
from tests.waiting import until

NOBODY = DeploymentId("nobody")


READS = {
    "acquire_lease",
    "fetch_document",
    "fetch_lease",
    "deployments",
    "fetch_decisions",
}


@asynccontextmanager
async def two_replicas(led_before):
    """Yield leader a, follower b and their store.

    Args:
        led_before: b led before a, and still has its state of that time in memory.
    """
    async with replicas("a", "b", store=SilentStore(SystemClock())) as (one, two, store):
        term = 0
        if led_before:
            sessions = await two.lead()
            await two.operations.set_policy(DEMO, {"cycle_s": 77.0}, "eve")
            await two.yield_lease(sessions)
            term = two.member.leadership.term
        await one.lead(first=11, highest_term=term)
        await one.operations.set_policy(DEMO, {"mode": "auto"}, "eve")
        yield one, two, store


def plan_of(phase):
    record = make_record("p", phase=phase)
    return replace(record, plan=replace(record.plan, deployment=DEMO))


ASKED = {
    "deployment": lambda operations: operations.deployment(DEMO),
    "policy": lambda operations: operations.policy(DEMO),
    "recommendation": lambda operations: operations.recommendation(DEMO, None),
    "capacity": lambda operations: operations.capacity(DEMO, CapacityRequest()),
    "quarantine": lambda operations: operations.quarantine(DEMO),
    "clear_quarantine": lambda operations: operations.clear_quarantine(DEMO, "eve"),
    "set_policy": lambda operations: operations.set_policy(DEMO, {"mode": "observe"}, "eve"),
    "set_policy on a document": lambda operations: operations.set_policy(
        DEMO, {"mode": "observe"}, "eve", {}
    ),
    "freeze": lambda operations: operations.freeze(DEMO, 60.0, "eve"),
    "resume": lambda operations: operations.resume(DEMO, "eve"),
    "approve": lambda operations: operations.approve(DEMO, PlanId("p"), "eve"),
    "cancel": lambda operations: operations.cancel(DEMO, PlanId("p"), "eve"),
    "epochs": lambda operations: operations.epochs(DEMO),
    "rollback": lambda operations: operations.rollback(DEMO, RollbackRequest()),
    "rollback_plan": lambda operations: operations.rollback_plan(DEMO, RollbackRequest()),
    "forget": lambda operations: operations.forget(DEMO, "eve"),
}


@pytest.mark.parametrize("led_before", [True, False], ids=["led before", "never led"])
async def test_what_only_the_leader_knows_or_may_is_answered_with_the_leader(led_before):
    async with two_replicas(led_before) as (one, two, _):
        for ask in ASKED.values():
            with pytest.raises(NotLeading) as caught:
                await ask(two.operations)
            assert caught.value.reason is Reason.NOT_LEADER
            assert caught.value.led == LedElsewhere(DEMO, "a", "a:1")
        assert "replica a at a:1 leads d" in str(caught.value)
        assert (await one.operations.policy(DEMO))["mode"] == "auto"
        assert [view.status().deployment for view in await one.operations.deployments()] == [DEMO]
        assert one.member.keeper.leading


@pytest.mark.parametrize("led_before", [True, False], ids=["led before", "never led"])
async def test_what_is_stored_is_answered_from_the_store(led_before):
    async with two_replicas(led_before) as (one, two, store):
        plan = plan_of(PlanPhase.PROPOSED)
        if led_before:  # From the time it led; the other replica has ended the plan since.
            two.member.control.records.by_id[PlanId("p")] = plan
        await store.store_plan(plan_of(PlanPhase.EXPIRED), one.member.leadership.term)
        await store.append_decision(DEMO, {"at": 1.0, "reason": "no_change"})
        assert (await two.operations.plan(DEMO, PlanId("p"))).phase is PlanPhase.EXPIRED
        records, more = await two.operations.plans(DEMO, 10)
        assert [(record.plan.plan_id, record.phase) for record in records] == [
            ("p", PlanPhase.EXPIRED)
        ]
        assert not more
        rows = await two.operations.decisions(DEMO, 10)
        assert rows[0]["reason"] == "no_change"
        store.silent = READS
        for ask in (
            two.operations.decisions(DEMO, 10),
            two.operations.plans(DEMO, 10),
            two.operations.policy(DEMO),
        ):
            with pytest.raises(Unavailable) as caught:
                await ask
            assert caught.value.reason is Reason.STORE_UNAVAILABLE


@pytest.mark.parametrize("led_before", [True, False], ids=["led before", "never led"])
async def test_the_list_names_what_others_lead(led_before):
    async with two_replicas(led_before) as (one, two, store):
        assert await one.operations.led_elsewhere() == []
        assert await two.operations.deployments() == []
        assert await two.operations.led_elsewhere() == [LedElsewhere(DEMO, "a", "a:1")]
        store.silent = READS
        expected = [LedElsewhere(DEMO, None, None)] if led_before else []
        assert await two.operations.led_elsewhere() == expected


async def test_one_name_out_of_reach_hides_no_other():
    async with two_replicas(False) as (one, two, store):
        await store.acquire_lease(NOBODY, "c", 60.0, 0)
        fetch = store.fetch_lease

        async def fetch_lease(deployment):
            if deployment == NOBODY:
                raise Unavailable("its shard is away")
            return await fetch(deployment)

        store.fetch_lease = fetch_lease
        await store.store_document(NOBODY, "leader", {"replica_id": "c", "address": "c:1"}, 1)
        led = {one.deployment: one.leader for one in await two.operations.led_elsewhere()}
        assert led == {DEMO: "a", NOBODY: None}


async def test_while_the_store_is_away_who_led_last_and_still_counts_is_read():
    async with two_replicas(False) as (one, two, store):
        feed(one, 0, 20, incarnation=11)
        store.silent = READS
        one.health.failed(Unavailable("no answer"))
        one.member.keeper.lose("it ran out")
        await until(lambda: one.member.control.leader is None)
        status = (await one.operations.deployment(DEMO)).status()
        assert (status.state, status.mode, status.window_steps) == ("follower", "auto", 20)
        told: Any = deployment_out(status)
        assert (told.leader, told.leader_address, told.ranks, told.epoch, told.term) == (None,) * 5
        assert (await one.operations.policy(DEMO))["mode"] == "auto"
        assert [view.status().deployment for view in await one.operations.deployments()] == [DEMO]
        for replica, ask in ((one, one.operations.resume), (two, two.operations.policy)):
            with pytest.raises(Unavailable):
                await (ask(DEMO, "eve") if replica is one else ask(DEMO))
        # Without a fault another replica has the lease, or soon has: the state here is outdated.
        one.health.recovered()
        with pytest.raises(Unavailable):
            await one.operations.policy(DEMO)


async def test_a_store_that_was_emptied_makes_no_deployment_unknown():
    async with two_replicas(False) as (one, _, store):
        one.member.keeper.lose("it is gone")
        store._documents.clear()
        store._leases.clear()
        store._terms.clear()
        with pytest.raises(NotLeading):
            await one.operations.deployment(DEMO)


async def test_nobody_is_named_while_nobody_leads():
    async with two_replicas(True) as (one, two, store):
        sessions = list(one.member.ranks.by_stream.values())
        await one.yield_lease(sessions)
        for replica in (one, two):
            with pytest.raises(NotLeading, match="no replica leads d at present") as caught:
                await replica.operations.policy(DEMO)
            assert caught.value.led == LedElsewhere(DEMO, None, None)
        # Then any replica that knows the deployment may let it go.
        await two.operations.forget(DEMO, "eve")
        assert (await store.fetch_document(DEMO, "leader"))["replica_id"] == ""
        assert await store.deployments() == []
        for replica in (one, two):
            with pytest.raises(NotFound):
                await replica.operations.deployment(DEMO)
            assert await replica.operations.led_elsewhere() == []


@pytest.mark.parametrize(
    ("phase", "reason", "words"),
    [
        (PlanPhase.COMMITTED, Reason.COMMITTED, "committed"),
        (PlanPhase.REFUSED, Reason.STALE_BASE, "superseded"),
    ],
)
async def test_a_plan_that_only_the_store_remembers_has_ended_and_is_not_unknown(
    phase, reason, words
):
    async with replicas("a") as (one, store):
        await one.lead()
        ended = replace(plan_of(phase), reason=reason)
        await store.store_plan(ended, one.member.leadership.term)
        for ask in (one.operations.approve, one.operations.cancel):
            with pytest.raises(Conflict, match=f"plan p is {words}") as caught:
                await ask(DEMO, PlanId("p"), "eve")
            assert caught.value.reason is Reason.WRONG_PHASE
            with pytest.raises(NotFound):
                await ask(DEMO, PlanId("q"), "eve")


async def test_what_nobody_ever_led_is_not_found():
    async with two_replicas(False) as (one, two, store):
        for ask in (one.operations.deployment, two.operations.policy, two.operations.quarantine):
            with pytest.raises(NotFound):
                await ask(NOBODY)
        with pytest.raises(NotFound):
            await two.operations.plans(NOBODY, 10)


async def test_an_idle_deployment_that_nobody_leads_is_not_taken_up_again():
    async with two_replicas(False) as (one, _, store):
        sessions = list(one.member.ranks.by_stream.values())
        await one.yield_lease(sessions)
        await one.registry.evict_idle(0.0)
        assert (await store.fetch_document(DEMO, "leader"))["replica_id"] == ""
        async with replicas("a", store=store) as (again, _):
            await again.registry.take_up(await store.deployments())
            assert again.registry.deployments == {}
