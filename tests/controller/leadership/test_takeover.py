"""A new leader reads the plans that matter, and not all there are."""

from dataclasses import replace

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.cycles.cycle_inputs import plan_history
from evenkeel_moe.controller.leadership.operator_state import OperatorStateRecovery
from evenkeel_moe.controller.leadership.takeover import take_over
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.ports.stores import Lease
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import BASE, DEMO, TARGET, make_record


class CountingStore(MemoryStore):
    """Counts the plans that are read, in all and in one call."""

    def __init__(self):
        super().__init__(SystemClock())
        self.read = []
        self.first_read = []

    async def fetch_plans(self, deployment, plan_ids):
        self.read.append(len(plan_ids))
        self.first_read = self.first_read or list(plan_ids)
        return await super().fetch_plans(deployment, plan_ids)

    async def plan(self, name, at, phase, reason=Reason.EXPIRED, waves=0):
        record = make_record(
            name, at, phase=phase, reason=reason, updated_at=at, waves_committed=waves
        )
        await self.store_plan(replace(record, story=()), 0)

    async def dry_runs(self, first, count):
        for number in range(count):
            await self.plan(f"dry{first + number}", first + number, PlanPhase.EXPIRED)

    async def epochs(self, *placements):
        for epoch, placement in enumerate(placements):
            await self.store_epoch(DEMO, Epoch(epoch), placement, 0)


@pytest.fixture
def store():
    return CountingStore()


async def records_of(store):
    """Return the records as the machine of a new leader has them."""
    recovery = OperatorStateRecovery("a", DeploymentPolicy())
    taken = await take_over(store, DEMO, Lease("a", 0), recovery)
    book = PlanRecords()
    book.load(taken.records.plans)
    return book


async def test_the_last_plan_that_was_carried_out_is_found_behind_many_newer_ones(store):
    await store.epochs(BASE, TARGET)
    await store.plan("fault-before", 0.0, PlanPhase.ABORTED, Reason.RANK_LOST)
    await store.plan("ran", 1.0, PlanPhase.COMMITTED, Reason.COMMITTED, waves=1)
    await store.dry_runs(10, 70)
    await store.plan("fault", 90.0, PlanPhase.ABORTED, Reason.RANK_LOST)
    await store.dry_runs(100, 70)
    book = await records_of(store)
    assert {PlanId("ran"), PlanId("fault")} <= book.by_id.keys()
    assert PlanId("fault-before") not in book.by_id
    assert plan_history(book.by_id.values()) == (1, 90.0)
    assert max(store.read) <= 48, "a plan of a large model is large"


async def test_the_search_ends_where_it_found_one(store):
    await store.epochs(BASE, TARGET)
    await store.dry_runs(0, 200)
    await store.plan("ran", 210.0, PlanPhase.COMMITTED, Reason.COMMITTED, waves=1)
    await store.dry_runs(220, 60)
    assert PlanId("ran") in (await records_of(store)).by_id
    assert store.read == [48, 48]


async def test_the_search_ends_also_where_there_is_none(store):
    await store.epochs(BASE, TARGET)
    await store.dry_runs(0, 900)
    await records_of(store)
    assert store.read == [48] * 5


async def test_where_no_map_was_ever_changed_nothing_is_searched_for(store):
    await store.epochs(BASE)
    await store.dry_runs(0, 200)
    await records_of(store)
    assert store.read == [48]


async def test_a_plan_that_runs_is_read_before_newer_ones_that_may_leave_it_no_room(store):
    await store.epochs(BASE)
    await store.plan("runs", 0.0, PlanPhase.MIGRATING)
    await store.dry_runs(10, 60)
    book = await records_of(store)
    assert book.active is not None and store.first_read[0] == "runs"
