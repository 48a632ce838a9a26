"""Deployments of one replica: letting go of them, and clocks that are set."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from evenkeel.adapters.clock import SystemClock
from evenkeel.adapters.metrics import ControllerMetrics
from evenkeel.adapters.planner_pool import PlannerPool
from evenkeel.controller.deployment import Outside
from evenkeel.controller.fleet import Fleet
from evenkeel.controller.hands import StoreHealth
from evenkeel.controller.serve import _deployment_options
from evenkeel.model.ids import DeploymentId
from evenkeel.settings import Settings
from tests.contracts.memory_store import MemoryStore
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
