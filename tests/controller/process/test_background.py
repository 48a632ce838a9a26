"""Background tasks: stored windows and refreshed gauges."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from evenkeel_moe.controller.process.flow_control import Pacer
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.wire.link import FlowControl
from tests.contracts.memory_store import SilentStore
from tests.controller.replicas import ONE, TWO, make_health, replicas
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
        make_health(),
        lambda name, deployment, error: failed.append((name, deployment)),
    )
    assert failed == [("broken", members[1])]
    assert [member.asked for member in members] == [1] * 3


async def test_a_shard_that_is_gone_keeps_no_window_from_the_others():
    health = make_health()
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


LEASES = {"acquire_lease", "renew_lease"}


def _stays_faulty(health):
    assert "no answer" in health.fault
    return True


@pytest.mark.parametrize("led_before", [True, False])
async def test_a_shard_that_gives_no_lease_is_logged_once_until_it_gives_one(led_before):
    store = SilentStore(SystemClock(), about=ONE)
    async with replicas("a", store=store) as (replica, _):
        health = replica.health
        store.silent = set() if led_before else LEASES
        with capture_logs() as log:
            replica.tasks.spawn(store_windows(replica.registry, 0.02), "store-windows")
            for name in (ONE, TWO):
                replica.registry.add(name).keeper.want()
            one, two = (
                replica.registry.deployments[ONE].keeper,
                replica.registry.deployments[TWO].keeper,
            )
            await until(lambda: two.leading and one.leading is led_before)
            store.silent = LEASES
            await until(lambda: "no answer" in health.fault)
            refused = store.refused
            await until(
                lambda: _stays_faulty(health) and not one.leading and store.refused > refused + 10
            )
            assert two.leading
            store.silent = set()
            await until(lambda: not health.fault)
        said = [row["event"] for row in log if row["event"] in ("store_lost", "store_back")]
        assert said == ["store_lost", "store_back"]


async def test_a_lease_that_is_not_wanted_any_more_is_no_fault_of_the_store():
    store = SilentStore(SystemClock(), about=ONE)
    async with replicas("a", store=store) as (replica, _):
        keeper = replica.registry.add(ONE).keeper
        await keeper.decided(5)
        store.silent = LEASES
        await until(lambda: keeper.fault)
        await keeper.yield_lease("a test")
        assert keeper.fault is None


FLOW = FlowControl(0.25, stride=1, from_step=0, max_steps_per_report=256)


def run(pacer, lag_s, samples):
    return sum(pacer.sample(lag_s, 32) for _ in range(samples))


def test_it_slows_down_by_steps_and_leaves_steps_out_only_at_last():
    pacer, seen = Pacer(FLOW, 2000), []
    for _ in range(10):
        run(pacer, 0.5, 4)
        seen.append((pacer.flow.report_interval_s, pacer.flow.stride))
    assert seen[:6] == [(0.5, 1), (1.0, 1), (2.0, 1), (2.0, 2), (2.0, 4), (2.0, 8)]
    assert seen[6:] == [(2.0, 8)] * 4, "there is a slowest pace"


def test_one_pause_changes_nothing_and_recovery_takes_longer_than_trouble():
    pacer = Pacer(FLOW, 2000)
    for _ in range(50):
        assert not pacer.sample(0.9, 32)
        assert not pacer.sample(0.0, 32)
    assert run(pacer, 0.3, 8) == 2
    assert run(pacer, 0.1, 1000) == 0, "neither behind nor idle"
    assert run(pacer, 0.0, 39) == 0
    assert run(pacer, 0.0, 1) == 1
    assert run(pacer, 0.0, 40) == 1
    assert pacer.flow == FLOW
    assert run(pacer, 0.0, 1000) == 0


@pytest.mark.parametrize(
    ("ranks", "interval_s"),
    [(500, 0.25), (501, 0.5), (1000, 0.5), (2048, 2.0), (4608, 2.0), (100_000, 2.0)],
)
def test_many_ranks_send_longer_messages_from_the_start(ranks, interval_s):
    pacer = Pacer(FLOW, 2000)
    assert pacer.sample(0.0, ranks) == (interval_s > 0.25)
    assert (pacer.flow.report_interval_s, pacer.flow.stride) == (interval_s, 1)
    for _ in range(200):  # An idle event loop does not make the messages shorter.
        assert not pacer.sample(0.0, ranks)


def test_when_most_ranks_have_left_the_others_report_as_the_settings_say():
    pacer = Pacer(FLOW, 2000)
    pacer.sample(0.0, 4608)
    assert run(pacer, 0.0, 200) == 3
    assert pacer.flow == FLOW


def test_a_late_event_loop_still_leaves_steps_out():
    pacer = Pacer(FLOW, 2000)
    pacer.sample(0.0, 4608)
    assert run(pacer, 0.5, 4) == 1
    assert (pacer.flow.report_interval_s, pacer.flow.stride) == (2.0, 2)


@given(st.lists(st.floats(0, 5), max_size=300), st.integers(1, 8))
def test_it_never_reports_more_often_or_more_densely_than_the_settings_say(lags, stride):
    pacer = Pacer(FlowControl(0.25, stride), 2000)
    for lag in lags:
        before = pacer.flow
        assert pacer.sample(lag, 32) == (pacer.flow != before)
        assert pacer.flow.report_interval_s >= 0.25
        assert pacer.flow.stride >= stride
        assert pacer.flow.stride % stride == 0
