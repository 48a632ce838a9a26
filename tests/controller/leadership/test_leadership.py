"""A replica that begins to lead has the plans and the ranks that were there before."""

from dataclasses import replace

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.test_stores import make_record
from tests.controller.replicas import DEMO, replicas
from tests.waiting import until


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
        # Both were made for an earlier generation of the group, and end for that reason.
        for name in ("moving", "waits"):
            record = await one.operations.plan(DEMO, PlanId(name))
            assert record.reason is Reason.GENERATION_CHANGED
        assert await store.open_plans(DEMO) == []


async def test_a_ranks_trouble_outlives_a_lease_lost_and_won_again():
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        sessions[1].received(Heartbeat(1, 2, 3, "its replicas differ"))
        await one.lose(store, seen=False)
        await until(lambda: one.member.control.state == "ready")
        reason, detail = one.member.control.state_reason(one.member.clock.monotonic())
        assert (reason, "its replicas differ" in detail) == (Reason.OBSERVE_ONLY, True)
