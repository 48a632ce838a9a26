"""Replicas of a controller without ports, over a store in memory, with scripted ranks."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.deployment.deployment_registry import DeploymentRegistry
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.ingest.waiting_reports import IncompleteGroups
from evenkeel_moe.controller.operations.operator_service import OperatorService
from evenkeel_moe.controller.process.options import deployment_options
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.controller.store_clock import StoreClock
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import QueryState
from evenkeel_moe.settings import Settings
from evenkeel_moe.telemetry.load_check import LoadCheck
from tests.contracts.memory_store import MemoryStore
from tests.protocol.machines import hello_of, state_of
from tests.waiting import deadline, until

DEMO = DeploymentId("d")
"""The deployment of the ranks in `tests.protocol.machines`."""
ONE, TWO = DeploymentId("one"), DeploymentId("two")
"""The deployments that the fixture `leading_two` leads."""


class SetClock(SystemClock):
    """A Unix clock that can be set."""

    ahead_s = 0.0

    def unix(self):
        return super().unix() + self.ahead_s


class GatedStore(MemoryStore):
    """Answers the release of one deployment's lease only while its gate is open."""

    def __init__(self, clock):
        super().__init__(clock)
        self.gated: DeploymentId | None = None
        self.waiting = False
        self.gate = asyncio.Event()

    async def release_lease(self, deployment, *arguments):
        if deployment == self.gated:
            self.waiting = True
            await self.gate.wait()
        await super().release_lease(deployment, *arguments)


class Spawned:
    """The tasks of one rig. `end` fails if one of them failed."""

    def __init__(self):
        self.tasks = []

    def spawn(self, work, name):
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def end(self):
        for task in self.tasks:
            task.cancel()
        ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        assert [error for error in ended if isinstance(error, Exception)] == []


def make_health(clock=None) -> StoreHealth:
    return StoreHealth(clock or SystemClock(), ControllerMetrics(CollectorRegistry()))


def make_ingest(window_store=None, **changes) -> Ingest:
    """Return an ingest of the deployment `demo` that counts nothing, with some values changed."""
    values: dict[str, Any] = {
        "window_steps": 50,
        "max_pending": 64,
        "stride": 1,
        "accepted": lambda steps: None,
        "rejected": lambda reason, steps: None,
        "dropped": lambda rank, steps: None,
        "incomplete": IncompleteGroups(),
        "check": LoadCheck(50),
    }
    clock, name = SystemClock(), DeploymentId("demo")
    store = window_store or MemoryStore(clock, capacity=50)
    return Ingest(name, store, clock, **(values | changes))


def make_registry(
    store,
    spawn,
    *,
    clock=None,
    planner=None,
    settings=None,
    address="here:1",
    max_deployments=8,
    max_new_deployments=8,
    memory_bytes=1 << 30,
    windows=None,
) -> DeploymentRegistry:
    clock, metrics = StoreClock(clock or SystemClock()), ControllerMetrics(CollectorRegistry())
    health = StoreHealth(clock, metrics)
    shared = SharedServices(store, windows or store, clock, metrics, health, planner, spawn)  # type: ignore[arg-type]
    options = deployment_options(settings or Settings(), address)
    return DeploymentRegistry(
        options,
        shared,
        max_deployments=max_deployments,
        max_new_deployments=max_new_deployments,
        memory_bytes=memory_bytes,
        max_streams=(settings or Settings()).grpc.max_streams,
    )


class Replica:
    """One replica on a store; its ranks answer when they are asked."""

    def __init__(
        self,
        store,
        name,
        *,
        max_deployments=8,
        max_new_deployments=8,
        memory_bytes=1 << 30,
        windows=None,
        clock=None,
        **planner,
    ):
        settings = Settings()
        lease_s = deadline(1.0)  # A test that keeps the loop busy for seconds renews nothing.
        leader = replace(
            settings.leader, replica_id=name, replicas=2, lease_s=lease_s, renew_s=0.05
        )
        # Nor may a lease outlast the time without ranks after which it is given up.
        ingest = replace(
            settings.ingest, rank_lease_s=max(settings.ingest.rank_lease_s, 4 * lease_s)
        )
        changed = {"planner": replace(settings.planner, **planner), "leader": leader}
        settings = settings.model_copy(update={**changed, "ingest": ingest})
        self.tasks, self.store = Spawned(), store
        self.registry = make_registry(
            store,
            self.tasks.spawn,
            settings=settings,
            address=f"{name}:1",
            max_deployments=max_deployments,
            max_new_deployments=max_new_deployments,
            memory_bytes=memory_bytes,
            windows=windows,
            clock=clock,
        )
        self.operations = OperatorService(self.registry)

    @property
    def health(self):
        return self.registry.shared.health

    @property
    def member(self):
        return self.registry.deployments[DEMO]

    async def lead(self, generation="g1", first=1, highest_term=0, **changes):
        """Lead two ranks and wait until they reported their state; return their sessions."""
        changes["highest_term"] = highest_term
        hellos = [hello_of(rank, generation, first, **changes) for rank in range(2)]
        sessions = await attach_ranks(self.registry, hellos, first, self.tasks.spawn, answer)
        await until(lambda: self.member.control.state == "ready")
        return sessions

    async def yield_lease(self, sessions):
        await self.member.keeper.yield_lease("a test")
        for session in sessions:
            session.lost()
        await until(lambda: self.member.control.leader is None)

    async def lose(self, store, other="b", *, seen=True):
        """Lose the lease to another replica that leads for a moment without ranks.

        Args:
            seen: this replica sees the other lead, and sends its ranks to it.

        Returns:
            The other's term, once this replica leads again.
        """
        await store.release_lease(DEMO, self.member.keeper.lease)
        lease = await store.acquire_lease(DEMO, other, 60.0, 0)
        leader = {"replica_id": other, "address": f"{other}:1"}
        await store.store_document(DEMO, "leader", leader, lease.term)
        if seen:
            await until(lambda: self.member.control.leader is None)
        await store.release_lease(DEMO, lease)
        self.member.keeper.want()
        await until(
            lambda: (
                self.member.keeper.leading
                and self.member.control.leader is not None
                and self.member.leadership.term > lease.term
            )
        )
        return lease.term

    async def reasons(self):
        return [row["reason"] for row in await self.operations.decisions(DEMO, 100)]


async def attach_ranks(registry, hellos, first_stream, spawn, serve):
    """Register ranks, and then serve the stream of each; return their sessions."""
    streams = [
        RankStream(number, "peer", capacity=4096) for number, _ in enumerate(hellos, first_stream)
    ]
    sessions = [await registry.attach(*pair) for pair in zip(hellos, streams, strict=True)]
    assert all(sessions)
    for rank, (stream, session) in enumerate(zip(streams, sessions, strict=True)):
        spawn(serve(rank, stream, session), f"rank-{rank}")
    return sessions


async def answer(rank, stream, session):
    """Answer each question with the state at the start of a rank."""
    hello = session.hello
    while (message := await stream.next()) is not None:
        if isinstance(message, QueryState):
            state = state_of(
                rank,
                query=message.query,
                placement=Placement.initial(hello.shape),
                checksums=(5,) * hello.shape.num_layers * hello.shape.num_logical_experts,
                identity=hello.identity,
            )
            session.received(state)


@asynccontextmanager
async def replicas(*names, store=None, **options):
    store = store or MemoryStore(SystemClock())
    made = [Replica(store, name, **options) for name in names]
    try:
        yield (*made, store)
    finally:
        for replica in made:
            await replica.tasks.end()
            assert not replica.registry.failures._newest, "a task of a deployment failed"


def report(rank, first, end, generation, incarnation):
    """Return a report of steps [first, end) with one token for each slot and step."""
    steps = step_table([StepMeta(step, 0, Phase.DECODE, 3) for step in range(first, end)])
    counts = np.ones((end - first, 2, 3), np.int32)
    identity = (DEMO, Generation(generation), EpRank(rank), incarnation)
    return LoadReport(*identity, CountingSide.DESTINATION, steps, counts)


def feed(replica, first, end, generation="g1", incarnation=1):
    """Report steps [first, end) from both ranks."""
    for rank in range(2):
        replica.member.loads.ingest.take(
            report(rank, first, end, generation, incarnation), lambda _: None
        )
