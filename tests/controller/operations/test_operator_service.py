"""Answers to operators from memory and from the store."""

from dataclasses import replace

import pytest

from evenkeel_moe.controller.cycles.manual_plans import request_digest
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.ports.operations import PlanRequest
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_record
from tests.controller.replicas import ONE


async def test_an_id_is_taken_also_by_a_plan_that_is_only_in_the_store(leading_two):
    registry, operations, _ = leading_two
    member = registry.deployments[ONE]
    request = PlanRequest(plan_id=PlanId("old"), requested_by="eve")
    record = make_record("old", request_digest=request_digest(request))
    record = replace(record, plan=replace(record.plan, deployment=ONE))
    await registry.shared.store.store_plan(record, member.leadership.term)
    assert member.control.records.by_id == {}
    assert await operations.create_plan(ONE, request) == record
    with pytest.raises(Conflict, match="plan old was created by another request") as caught:
        await operations.create_plan(ONE, replace(request, policy="eplb"))
    assert caught.value.reason is Reason.ID_REUSED
    with pytest.raises(Unavailable):  # The id is new, so a plan is tried; there are no ranks.
        await operations.create_plan(ONE, replace(request, plan_id=PlanId("new")))


class Shy(MemoryStore):
    """A store that does not answer the calls in `silent`."""

    def __init__(self, clock):
        super().__init__(clock)
        self.silent: set[str] = set()

    async def fetch_plans(self, *arguments):
        return await self._answer("fetch_plans", *arguments)

    async def plan_order(self, *arguments):
        return await self._answer("plan_order", *arguments)

    async def _answer(self, name, *arguments):
        if name in self.silent:
            raise Unavailable("no answer")
        return await getattr(MemoryStore, name)(self, *arguments)


@pytest.mark.parametrize("silent", ["fetch_plans", "plan_order"])
async def test_a_page_of_plans_has_no_holes_while_the_store_is_out_of_reach(leading_two, silent):
    registry, operations, clock = leading_two
    member, store = registry.deployments[ONE], Shy(clock)
    for number in range(6):
        record = make_record(f"p{number}", 100.0 + number)
        record = replace(record, plan=replace(record.plan, deployment=ONE))
        await store.store_plan(record, 1)
        if number > 3:
            member.control.records.by_id[record.plan.plan_id] = record
    operations._store = store

    async def page(after=None):
        records, more = await operations.plans(ONE, 3, after)
        return [record.plan.plan_id for record in records], more

    assert await page() == (["p5", "p4", "p3"], True)
    assert await page("p3") == (["p2", "p1", "p0"], False)
    store.silent.add(silent)
    assert await page() == (["p5", "p4"], False)
    with pytest.raises(Unavailable):
        await page("p3")


async def test_a_plan_that_only_the_store_has_is_not_denied_while_that_is_out_of_reach(leading_two):
    registry, operations, clock = leading_two
    store = Shy(clock)
    store.silent.add("fetch_plans")
    operations._store = store
    with pytest.raises(Unavailable):
        await operations.plan(ONE, PlanId("old"))
