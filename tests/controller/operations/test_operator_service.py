"""Deployments of one replica: letting go of them, and clocks that are set."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.cycles.manual_plans import request_digest
from evenkeel_moe.controller.operations.gauges import GaugeLimits
from evenkeel_moe.controller.operations.operator_service import OperatorService
from evenkeel_moe.controller.process.background import (
    refresh_metrics,
    store_all_windows,
    store_windows,
)
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import DispatchModel, Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.ports import PlanRequest
from evenkeel_moe.wire.link import FlowControl, Registration
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_record
from tests.controller.replicas import Spawned, make_registry, replicas
from tests.protocol.rigs import BASE, hello_of
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
    """(registry that leads both deployments, their operator service, clock)."""
    clock, tasks = SetClock(), Spawned()
    planner = PlannerPool(1, deadline_s=10)
    registry = make_registry(SlowStore(clock), tasks.spawn, clock=clock, planner=planner)
    for name in (ONE, TWO):
        keeper = registry.add(name).keeper
        await keeper.decided(10)
        assert keeper.leading
    yield registry, OperatorService(registry), clock
    await tasks.end()
    planner.close()


async def test_a_deployment_let_go_of_by_an_operator_meanwhile_is_no_mistake(rig):
    registry, operations, _ = rig
    idle = asyncio.create_task(registry.evict_idle(0.0))
    await asyncio.sleep(0.1)
    await operations.forget(TWO, "operator")
    await idle
    assert not registry.deployments


async def test_a_deployment_whose_ranks_came_back_meanwhile_is_kept(rig):
    registry, operations, _ = rig
    idle = asyncio.create_task(registry.evict_idle(0.0))
    await asyncio.sleep(0.1)
    registry.deployments[TWO].ranks.open(hello_of(0), RankStream(1, "peer", capacity=4))
    await idle
    assert list(registry.deployments) == [TWO]


async def test_an_id_is_taken_also_by_a_plan_that_is_only_in_the_store(rig):
    registry, operations, _ = rig
    member = registry.deployments[ONE]
    request = PlanRequest(plan_id=PlanId("old"), requested_by="eve", dry_run=True)
    record = make_record("old", request_digest=request_digest(request))
    record = replace(record, plan=replace(record.plan, deployment=ONE))
    await registry.shared.store.store_plan(record, member.leadership.term)
    assert member.control.records.by_id == {}
    assert await operations.create_plan(ONE, request) == record
    with pytest.raises(Conflict, match="plan old was created by another request") as caught:
        await operations.create_plan(ONE, replace(request, policy="eplb"))
    assert caught.value.reason is Reason.ID_REUSED
    with pytest.raises(Unavailable):  # New to the store: it would be planned, were there ranks.
        await operations.create_plan(ONE, replace(request, plan_id=PlanId("new")))


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
async def test_records_go_by_the_clock_as_it_is_set(rig, step_s):
    registry, operations, clock = rig
    member = registry.deployments[ONE]
    # The machine hears of its lease with the next event; then it has a migration that carries times of its own.
    await until(lambda: member.control.executor is not None)
    before = member.control.unix_offset_s
    clock.ahead_s = step_s
    await until(lambda: member.control.unix_offset_s != before)
    for offset in (
        member.control.unix_offset_s,
        member.control.unix_offset_s,
        member.control.executor.unix_offset_s,
    ):
        assert offset == pytest.approx(clock.unix() - clock.monotonic(), abs=1.0)


async def figures_said(registry, count, then):
    """Deployments by the order of their figures, with what `then(said)` adds after each, until there are `count`."""
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


async def test_other_work_is_done_between_the_figures_of_two_deployments(rig):
    registry, operations, _ = rig
    said = await figures_said(
        registry, 8, lambda said: asyncio.get_running_loop().call_soon(said.append, "other work")
    )
    assert said[:4] == [ONE, "other work", TWO, "other work"]


async def test_a_deployment_let_go_of_while_figures_are_refreshed_gets_no_series_again(rig):
    registry, operations, _ = rig
    said = await figures_said(registry, 2, lambda _: registry.deployments.pop(TWO, None))
    assert set(said) == {ONE}


class Shy(MemoryStore):
    """Does not answer the calls that are named."""

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
async def test_a_page_of_plans_has_no_holes_while_the_store_is_out_of_reach(rig, silent):
    registry, operations, clock = rig
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


async def test_a_plan_that_only_the_store_has_is_not_denied_while_that_is_out_of_reach(rig):
    registry, operations, clock = rig
    store = Shy(clock)
    store.silent.add("fetch_plans")
    operations._store = store
    with pytest.raises(Unavailable):
        await operations.plan(ONE, PlanId("old"))


class Stuck:
    """In place of a deployment whose windows are to be stored."""

    def __init__(self, fault=None):
        self.asked, self.keeper, self._fault = 0, self, fault
        self.lost_why = ""

    async def store_windows(self):
        self.asked += 1
        if self._fault is not None:
            raise self._fault

    def lose(self, why):
        self.lost_why = why


async def test_a_shard_that_is_gone_keeps_no_window_from_the_others():
    clock = SetClock()
    health = StoreHealth(clock, ControllerMetrics(CollectorRegistry()))
    gone, fenced = (
        Unavailable("shard 2 does not answer"),
        Conflict("term 2 has taken over", Reason.LEASE_LOST),
    )
    members = [Stuck(), Stuck(gone), Stuck(fenced), Stuck(gone), Stuck()]
    with pytest.raises(Unavailable, match="shard 2"):
        await store_all_windows(members, health)  # type: ignore[arg-type]
    assert [member.asked for member in members] == [1] * 5
    assert members[2].lost_why == "term 2 has taken over"
    assert health.resting
    await store_all_windows([Stuck(), Stuck()], health)  # type: ignore[list-item]


class NoLeases(MemoryStore):
    """Takes a probe, and on the shard of ONE no lease while it is down."""

    down = False

    async def acquire_lease(self, deployment, *arguments):
        self._check(deployment)
        return await super().acquire_lease(deployment, *arguments)

    async def renew_lease(self, deployment, *arguments):
        self._check(deployment)
        return await super().renew_lease(deployment, *arguments)

    def _check(self, deployment):
        if self.down and deployment == ONE:
            raise Unavailable("shard 1 does not answer")


@pytest.mark.parametrize("led_before", [True, False])
async def test_a_shard_that_gives_no_lease_is_told_once_until_it_does(led_before):
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
            for _ in range(30):
                await asyncio.sleep(0.1)
                assert "shard 1" in health.fault
            assert not one.leading and two.leading
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


def drained(stream):
    """What was queued on a stream so far."""
    return [stream._queue.popleft() for _ in range(len(stream._queue))]


async def attach_all(registry, generation, first_stream, nodes=("n0", "n1")):
    streams = [RankStream(first_stream + rank, "peer", capacity=64) for rank in range(2)]
    for rank, stream in enumerate(streams):
        hello = hello_of(rank, generation, first_stream, node=nodes[rank])
        hello = replace(hello, identity=replace(hello.identity, deployment=ONE))
        assert await registry.attach(hello, stream) is not None
    await until(lambda: registry.deployments[ONE].loads.ingest.generation == generation)
    return streams


async def test_the_stride_holds_from_the_first_step_of_a_new_generation_on_both_sides(rig):
    registry, operations, _ = rig
    member = registry.deployments[ONE]
    await attach_all(registry, "g1", 1)
    member.loads.ingest.newest_step = 1000
    registry.pace(replace(member.ranks.flow, stride=4))
    assert member.ranks.flow.from_step == 1001
    streams = await attach_all(registry, "g2", 3)
    for stream in streams:
        said = drained(stream)
        (registration,) = (message for message in said if isinstance(message, Registration))
        flows = [
            registration.flow,
            *(message for message in said if isinstance(message, FlowControl)),
        ]
        assert flows[-1] == replace(registration.flow, stride=4, from_step=0), (
            "and nothing else is changed"
        )
    late = RankStream(9, "peer", capacity=64)
    hello = hello_of(1, "g2", 9)
    await registry.attach(replace(hello, identity=replace(hello.identity, deployment=ONE)), late)
    assert drained(late)[0].flow == member.ranks.flow == flows[-1]


async def test_without_a_stride_a_new_generation_is_told_nothing_of_it(rig):
    registry, operations, _ = rig
    await attach_all(registry, "g1", 1)
    for stream in await attach_all(registry, "g2", 3):
        assert not [message for message in drained(stream) if isinstance(message, FlowControl)]


@pytest.mark.parametrize("dispatch", DispatchModel)
async def test_gauges_split_tokens_by_the_dispatcher_and_nodes_in_force(rig, dispatch):
    registry, operations, _ = rig
    cycle = replace(registry.options.cycle, objective=Objective(dispatch=dispatch))
    registry.options = replace(registry.options, cycle=cycle)
    await registry.let_go(registry.deployments[ONE])
    member = registry.add(ONE)
    assert member.loads.split().topology == Topology((0,)), "no rank is known yet"
    for generation, first_stream, nodes in (("g1", 1, ("a", "a")), ("g2", 3, ("a", "b"))):
        await attach_all(registry, generation, first_stream, nodes)
        split = SplitModel(dispatch, Topology((0, int(nodes[1] == "b"))))
        assert (member.loads.split().dispatch, member.loads.split().topology) == (
            split.dispatch,
            split.topology,
        )
        counts = np.array([[[90, 5, 40, 10], [3, 50, 70, 20]]] * 4, np.uint32)
        steps = np.arange(4)
        window = LoadWindow(
            counts, steps, steps * 0, np.ones((4, 2), np.int64), np.full((4, 2), np.nan)
        )
        member.loads.balance.update({Phase.DECODE: [window]}, BASE)
        expected = metrics.balancedness_mean(metrics.rank_load(counts, BASE, split))
        assert member.loads.balance.summary()[0] == pytest.approx(expected)
