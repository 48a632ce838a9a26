"""Deployments of one replica: letting go of them, and clocks that are set."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from evenkeel.adapters.clock import SystemClock
from evenkeel.adapters.metrics import ControllerMetrics
from evenkeel.adapters.planner_pool import PlannerPool
from evenkeel.controller.deployment import Outside
from evenkeel.controller.figures import FigureLimits
from evenkeel.controller.fleet import Fleet
from evenkeel.controller.hands import StoreHealth
from evenkeel.controller.planning import request_digest
from evenkeel.controller.serve import _deployment_options, _refresh_metrics
from evenkeel.errors import Conflict, Reason, Unavailable
from evenkeel.model.ids import DeploymentId, PlanId
from evenkeel.ports import PlanRequest
from evenkeel.settings import Settings
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_record
from tests.waiting import until

ONE, TWO = DeploymentId("one"), DeploymentId("two")


class SetClock(SystemClock):
    """A Unix clock that can be set."""

    ahead_s = 0.0

    def unix(self):
        return super().unix() + self.ahead_s


class SlowStore(MemoryStore):
    """Takes its time to release leases."""

    async def release_lease(self, *arguments):
        await asyncio.sleep(0.3)
        await super().release_lease(*arguments)


@pytest.fixture
async def rig():
    """(fleet that leads both deployments, clock)."""
    clock, metrics = SetClock(), ControllerMetrics(CollectorRegistry())
    store, planner, tasks = SlowStore(clock), PlannerPool(1, deadline_s=10), []

    def spawn(work, name):
        tasks.append(asyncio.create_task(work, name=name))
        return tasks[-1]

    outside = Outside(store, store, clock, metrics, StoreHealth(clock, metrics), planner, spawn)
    fleet = Fleet(_deployment_options(Settings(), "here:1"), outside, max_deployments=8)
    for name in (ONE, TWO):
        keeper = fleet.add(name).keeper
        await keeper.decided(10)
        assert keeper.leading
    yield fleet, clock
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    planner.close()


async def test_a_deployment_let_go_of_by_an_operator_meanwhile_is_no_mistake(rig):
    fleet, _ = rig
    idle = asyncio.create_task(fleet.forget_idle(0.0))
    await asyncio.sleep(0.1)
    await fleet.forget(TWO, "operator")
    await idle
    assert not fleet.members


async def test_a_deployment_whose_ranks_came_back_meanwhile_is_kept(rig):
    fleet, _ = rig
    idle = asyncio.create_task(fleet.forget_idle(0.0))
    await asyncio.sleep(0.1)
    fleet.members[TWO].sessions[1] = object()  # type: ignore[assignment]
    await idle
    assert list(fleet.members) == [TWO]


async def test_an_id_is_taken_also_by_a_plan_that_is_only_in_the_store(rig):
    fleet, _ = rig
    member = fleet.members[ONE]
    request = PlanRequest(plan_id=PlanId("old"), requested_by="eve", dry_run=True)
    record = make_record("old", request_digest=request_digest(request))
    record = replace(record, plan=replace(record.plan, deployment=ONE))
    await member.outside.store.store_plan(record, member.term)
    assert member.control.book.records == {}
    assert await fleet.create_plan(ONE, request) == record
    with pytest.raises(Conflict, match="plan old was created by another request") as caught:
        await fleet.create_plan(ONE, replace(request, policy="eplb"))
    assert caught.value.reason is Reason.ID_REUSED
    with pytest.raises(Unavailable):  # New to the store: it would be planned, were there ranks.
        await fleet.create_plan(ONE, replace(request, plan_id=PlanId("new")))


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
async def test_records_go_by_the_clock_as_it_is_set(rig, step_s):
    fleet, clock = rig
    member = fleet.members[ONE]
    # The machine hears of its lease with the next event; then it has a migration that carries times of its own.
    await until(lambda: member.control.migration is not None)
    before = member.unix_offset_s
    clock.ahead_s = step_s
    await until(lambda: member.unix_offset_s != before)
    for offset in (
        member.unix_offset_s,
        member.control.unix_offset_s,
        member.control.migration.unix_offset_s,
    ):
        assert offset == pytest.approx(clock.unix() - clock.monotonic(), abs=1.0)


async def test_other_work_is_done_between_the_figures_of_two_deployments(rig):
    fleet, _ = rig
    said = []

    class Noting(ControllerMetrics):
        def follow(self, deployment):
            super().follow(deployment)
            said.append(deployment)
            asyncio.get_running_loop().call_soon(said.append, "other work")

    refresh = asyncio.create_task(
        _refresh_metrics(fleet, Noting(CollectorRegistry()), 0.01, FigureLimits(1, 0))
    )
    try:
        await until(lambda: len(said) >= 8)
    finally:
        refresh.cancel()
    assert said[:4] == [ONE, "other work", TWO, "other work"]


async def test_a_deployment_let_go_of_while_figures_are_refreshed_gets_no_series_again(rig):
    fleet, _ = rig
    said = []

    class Noting(ControllerMetrics):
        def follow(self, deployment):
            super().follow(deployment)
            said.append(deployment)
            fleet.members.pop(TWO, None)

    refresh = asyncio.create_task(
        _refresh_metrics(fleet, Noting(CollectorRegistry()), 0.01, FigureLimits(1, 0))
    )
    try:
        await until(lambda: len(said) >= 2)
    finally:
        refresh.cancel()
    assert set(said) == {ONE}
