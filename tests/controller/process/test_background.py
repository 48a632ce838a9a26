"""Background tasks: stored windows and refreshed gauges."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.operations.gauges import GaugeLimits
from evenkeel_moe.controller.process.background import (
    refresh_metrics,
    store_all_windows,
    store_windows,
)
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import ONE, TWO, SetClock, replicas
from tests.waiting import until


async def figures_said(registry, count, then):
    """Return the deployments in the order in which their gauges are refreshed, at least `count`.

    Args:
        then: called with the list after each; may add to it.
    """
    said = []

    class Noting(ControllerMetrics):
        def follow(self, deployment):
            super().follow(deployment)
            said.append(deployment)
            then(said)

    refresh = asyncio.create_task(
        refresh_metrics(registry, Noting(CollectorRegistry()), 0.01, GaugeLimits(1, 0))
    )
    try:
        await until(lambda: len(said) >= count)
    finally:
        refresh.cancel()
    return said


async def test_other_work_is_done_between_the_figures_of_two_deployments(leading_two):
    registry, operations, _ = leading_two
    said = await figures_said(
        registry, 8, lambda said: asyncio.get_running_loop().call_soon(said.append, "other work")
    )
    assert said[:4] == [ONE, "other work", TWO, "other work"]


async def test_a_deployment_evicted_while_gauges_are_refreshed_gets_no_series_again(leading_two):
    registry, operations, _ = leading_two
    said = await figures_said(registry, 2, lambda _: registry.deployments.pop(TWO, None))
    assert set(said) == {ONE}


class Stuck:
    """A fake of a deployment whose windows are to be stored."""

    def __init__(self, fault=None):
        self.asked, self.keeper, self._fault = 0, self, fault
        self.deployment = "one"
        self.lost_why = ""

    async def store_windows(self):
        self.asked += 1
        if self._fault is not None:
            raise self._fault

    def lose(self, why):
        self.lost_why = why


def no_failure(name, deployment, error):
    raise error


async def test_windows_that_cannot_be_stored_fail_their_deployment_alone():
    members = [Stuck(), Stuck(ZeroDivisionError("a bug of ours")), Stuck()]
    members[1].deployment = "broken"
    failed: list[Any] = []
    await store_all_windows(
        members,  # type: ignore[arg-type]
        StoreHealth(SetClock(), ControllerMetrics(CollectorRegistry())),
        lambda name, deployment, error: failed.append((name, deployment)),
    )
    assert failed == [("broken", members[1])]
    assert [member.asked for member in members] == [1] * 3


async def test_a_shard_that_is_gone_keeps_no_window_from_the_others():
    clock = SetClock()
    health = StoreHealth(clock, ControllerMetrics(CollectorRegistry()))
    gone, fenced = (
        Unavailable("shard 2 does not answer"),
        Conflict("term 2 has taken over", Reason.LEASE_LOST),
    )
    members = [Stuck(), Stuck(gone), Stuck(fenced), Stuck(gone), Stuck()]
    with pytest.raises(Unavailable, match="shard 2"):
        await store_all_windows(members, health, no_failure)  # type: ignore[arg-type]
    assert [member.asked for member in members] == [1] * 5
    assert members[2].lost_why == "term 2 has taken over"
    assert health.resting
    await store_all_windows([Stuck(), Stuck()], health, no_failure)  # type: ignore[list-item]


class NoLeases(MemoryStore):
    """Takes probes, but no lease of ONE while the shard of ONE is down."""

    down = False
    refused = 0

    async def acquire_lease(self, deployment, *arguments):
        self._check(deployment)
        return await super().acquire_lease(deployment, *arguments)

    async def renew_lease(self, deployment, *arguments):
        self._check(deployment)
        return await super().renew_lease(deployment, *arguments)

    def _check(self, deployment):
        if self.down and deployment == ONE:
            self.refused += 1
            raise Unavailable("shard 1 does not answer")


def _stays_faulty(health):
    assert "shard 1" in health.fault
    return True


@pytest.mark.parametrize("led_before", [True, False])
async def test_a_shard_that_gives_no_lease_is_logged_once_until_it_gives_one(led_before):
    store = NoLeases(SystemClock())
    async with replicas("a", store=store) as (replica, _):
        health = replica.health
        store.down = not led_before
        with capture_logs() as log:
            replica.tasks.spawn(store_windows(replica.registry, 0.02), "store-windows")
            for name in (ONE, TWO):
                replica.registry.add(name).keeper.want()
            one, two = (
                replica.registry.deployments[ONE].keeper,
                replica.registry.deployments[TWO].keeper,
            )
            await until(lambda: two.leading and one.leading is led_before)
            store.down = True
            await until(lambda: "shard 1" in health.fault)
            refused = store.refused
            await until(
                lambda: _stays_faulty(health) and not one.leading and store.refused > refused + 10
            )
            assert two.leading
            store.down = False
            await until(lambda: not health.fault)
        said = [row["event"] for row in log if row["event"] in ("store_lost", "store_back")]
        assert said == ["store_lost", "store_back"]


async def test_a_lease_that_is_not_wanted_any_more_is_no_fault_of_the_store():
    store = NoLeases(SystemClock())
    async with replicas("a", store=store) as (replica, _):
        keeper = replica.registry.add(ONE).keeper
        await keeper.decided(5)
        store.down = True
        await until(lambda: keeper.fault)
        await keeper.yield_lease("a test")
        assert keeper.fault is None
