"""Builds the parts of one deployment on this replica, connects them and starts them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.cycles.cycle_inputs import CycleSettings
from evenkeel_moe.controller.cycles.planner import DeploymentPlanner
from evenkeel_moe.controller.deployment.action_executor import ActionExecutor
from evenkeel_moe.controller.deployment.action_log import ActionLog
from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.ingest.group_memory import GroupMemory, group_memory
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.leadership.leadership import Leadership
from evenkeel_moe.controller.leadership.leases import LeaseKeeper
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.controller.ranks.kv_caches import KvCaches
from evenkeel_moe.controller.ranks.rank_sessions import RankSession, RankSessions
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.controller.tasks import end_tasks
from evenkeel_moe.driver import Driver
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import TOKENS
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.messages import Ack, Hello, Leader, Prepare, Tick
from evenkeel_moe.protocol.terms import is_credible_term
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.settings import LeaderSettings
from evenkeel_moe.telemetry.load_check import LoadCheck
from evenkeel_moe.wire.link import FlowControl, Registration, RegistrationOutcome

_log = structlog.get_logger(__name__)
TICK_S = 0.25
"""Seconds between ticks. Machines wait for half a second at least; a tick costs a quarter of a
millisecond for each deployment."""
LEASE_WAIT_S = 3.0
"""Longest wait until it is known who leads."""
_ATTEMPTS = 3
"""Attempts to register a rank, each after a wait for the lease."""
_CLOCK_STEP_S = 1.0
"""More than clocks drift apart between two ticks."""
_DECISIONS = 1024
"""Decision rows in memory."""


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """The settings of one deployment."""

    leader: LeaderSettings
    advertise: str
    """host:port by which ranks reach this replica."""
    timing: ControlTiming
    policy: DeploymentPolicy
    """In force until an operator sets another."""
    cycle: CycleSettings
    window_steps: int
    max_pending: int
    flow: FlowControl

    def memory_of(self, shape: ModelShape) -> GroupMemory:
        """Return the most memory that a deployment of a shape takes."""
        return group_memory(
            shape,
            window_steps=self.window_steps,
            max_pending=self.max_pending,
            plan_steps=self.cycle.plan_steps,
            threads=self.cycle.threads,
        )


@dataclass(frozen=True, eq=False, repr=False)
class RankRegistration:
    """Answers the Hello of each new stream."""

    control: DeploymentControl
    leadership: Leadership
    ranks: RankSessions
    loads: GroupLoads
    inbox: MachineInbox
    admit: Callable[[Hello, RankStream], bool]

    async def attach(self, hello: Hello, stream: RankStream) -> RankSession | None:
        """Register the stream of a rank; return None if it was turned away."""
        session = self.ranks.open(hello, stream)
        try:
            return await self._register_or_redirect(session)
        except BaseException:
            # The rank hung up while the lease was sought: nobody else would end this session.
            session.lost()
            raise

    async def _register_or_redirect(self, session: RankSession) -> RankSession | None:
        stream, keeper = session.stream, self.leadership.keeper
        # This Hello may name a higher term, for which the lease is taken again in between.
        for _ in range(_ATTEMPTS):
            await keeper.decided(LEASE_WAIT_S)
            if not keeper.leading or stream.closed:
                break
            try:
                await self.inbox.call(lambda now: (None, self._register(session, now)))
            except Unavailable:
                # The rank is registered all the same; the machine stores its records later.
                _log.info(
                    "registered_without_store",
                    deployment=self.control.deployment,
                    rank=session.rank,
                )
            if session.registered:
                return session
        if not stream.closed:
            stream.close(await self.leadership.leader_address())
        session.lost()
        return None

    def _register(self, session: RankSession, now: float) -> Sequence[ctl.ControlAction]:
        """Give the machine a Hello. The answer goes out before anything else on the stream."""
        # Asked again: other groups may have been completed while the lease was sought.
        if self.control.leader is None or not self.admit(session.hello, session.stream):
            return ()
        actions = self.control.handle(session.event(session.hello), now)
        refused = any(
            isinstance(action, ctl.CloseStream) and action.stream == session.stream.number
            for action in actions
        )
        leader = self.control.leader
        if refused or leader is None:
            return actions
        session.registered = True
        self.loads.declare_shape(session.hello.shape)
        session.stream.send(self._accepted(session.hello, leader))
        return actions

    def _accepted(self, hello: Hello, leader: Leader) -> Registration:
        observing = not hello.migrates
        timing = self.control.timing
        return Registration(
            outcome=RegistrationOutcome.OBSERVE_ONLY if observing else RegistrationOutcome.ACCEPTED,
            heartbeat_interval_s=timing.heartbeat_s,
            lease_s=timing.rank_lease_s,
            flow=self.ranks.flow,
            reason=Reason.OBSERVE_ONLY if observing else None,
            detail="the rank does not offer to migrate" if observing else "",
            leader=leader,
            highest_step=self.loads.ingest.highest_step(
                hello.identity.rank, hello.identity.generation
            ),
        )


@dataclass(eq=False, repr=False)
class Connectivity:
    """Gives the lease up when no rank is heard, and keeps the streams of a follower open.

    Args:
        alone: there is no other replica that could reach the ranks.
    """

    control: DeploymentState
    keeper: LeaseKeeper
    ranks: RankSessions
    shared: SharedServices
    alone: bool
    _sent_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._heard_at = self.shared.clock.monotonic()

    def check(self) -> None:
        """Give the lease up if no rank was heard for a whole lease; call a few times a second."""
        now = self.shared.clock.monotonic()
        if not self.keeper.leading or self.control.membership.any_fresh(now):
            self._heard_at = now
        if not self.alone and now - self._heard_at > self.control.timing.rank_lease_s:
            self._heard_at = now
            self.shared.spawn(self._yield_lease(), f"yield-{self.control.deployment}")

    async def _yield_lease(self) -> None:
        await self.keeper.yield_lease(
            "no rank was heard for a whole lease: another replica may reach them"
        )
        self.ranks.close_all()

    def keep_streams(self) -> None:
        """As a follower, send something now and then: ranks leave a controller that is silent."""
        now = self.shared.clock.monotonic()
        if (
            self.control.state is ControlState.FOLLOWER
            and now - self._sent_at >= self.control.timing.heartbeat_s
        ):
            self._sent_at = now
            self.ranks.repeat_flow()


class Deployment:
    """The parts of one deployment. Nothing happens before `start`.

    Args:
        deployment: its name.
        options: its settings.
        shared: the services of this replica.
        lasting: the store has records of it, as far as is known.
    """

    def __init__(
        self,
        deployment: DeploymentId,
        options: DeploymentOptions,
        shared: SharedServices,
        *,
        lasting: bool = True,
    ) -> None:
        clock = shared.clock
        self.deployment = deployment
        self.clock = clock
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_DECISIONS)
        """Rows of the decision log, newest last, for when the store cannot be asked."""
        control = self.control = DeploymentControl(
            deployment,
            timing=options.timing,
            policy=options.policy,
            unix_offset_s=clock.unix() - clock.monotonic(),
        )
        self.inbox = MachineInbox(control, clock, lambda: self.driver)
        loads = self.loads = _build_loads(control, options, shared)
        ranks = self.ranks = RankSessions(
            self.inbox,
            loads.ingest,
            clock,
            options.timing,
            options.flow,
            options.leader.renew_s,
            self._swapped,
            partial(shared.metrics.rank_displaced, deployment),
        )
        self._kv = KvCaches(control, ranks, shared)
        self.leadership = Leadership(
            control,
            shared,
            options.leader,
            options.advertise,
            self.inbox,
            loads,
            ranks,
            self._kv,
            self.decisions,
            lasting,
        )
        self.planner = DeploymentPlanner(
            control, loads, ranks, self._kv, self.inbox, shared, options.cycle
        )
        self.executor = self._build_executor(shared)
        self.driver = Driver(
            control, self.executor, clock, tick=Tick(), tick_s=TICK_S, after=self.follow_machine
        )
        self.registration = RankRegistration(
            control, self.leadership, ranks, loads, self.inbox, shared.admit
        )
        self._connectivity = Connectivity(
            control, self.keeper, ranks, shared, options.leader.replicas == 1
        )
        self._options = options
        self._shared = shared
        self._tasks: list[asyncio.Task[None]] = []

    def _swapped(self, ack: Ack) -> None:
        if ack.swap_s > 0:  # A repeated acknowledgement has 0, which measures nothing.
            self._shared.metrics.swap_stall(self.deployment, ack.swap_s)
        self.planner.stalls.measured(ack.wave, ack.swap_s)

    def _expect_wave(self, prepare: Prepare) -> None:
        self.loads.expect_wave(prepare)
        shape = self.control.membership.shape
        if shape is not None:
            self.planner.stalls.begins(prepare.wave, prepare.body, shape.slots_per_rank)
        if prepare.wave.wave_index == 0:
            self.planner.gains.plan_begins(prepare.wave.plan_id)

    def _build_executor(self, shared: SharedServices) -> ActionExecutor:
        return ActionExecutor(
            shared,
            self.leadership,
            self.ranks,
            ActionLog(self.control, shared.clock, shared.metrics, self.decisions),
            expect_wave=self._expect_wave,
            begin_cycle=self.planner.begin_cycle,
        )

    @property
    def keeper(self) -> LeaseKeeper:
        """The lease."""
        return self.leadership.keeper

    @property
    def is_new(self) -> bool:
        """True while its ranks were never all here, and the store has no records of it."""
        return not self.keeper.lasting and self.loads.ingest.generation is None

    @property
    def memory(self) -> GroupMemory | None:
        """The most memory it takes; None before it has windows or restores them."""
        shape = self.loads.ingest.shape
        return None if shape is None else self._options.memory_of(shape)

    def turns_away(self, hello: Hello, stream: RankStream) -> bool:
        """Return True if a rank would be refused now, or sent to the replica that leads."""
        leader, now = self.control.leader, self.clock.monotonic()
        return leader is None or (
            not is_credible_term(hello.highest_term, leader.term)
            or self.control.membership.refusal(
                hello, stream.number, now, certified=stream.certified
            )
            is not None
        )

    def start(self) -> None:
        """Start to drive the machine, and to seek the lease when it is wanted."""
        self._tasks = [
            self._shared.spawn(self.driver.run(), f"driver-{self.deployment}"),
            self._shared.spawn(self.keeper.run(), f"lease-{self.deployment}"),
        ]

    async def stop(self, *, forget: bool = False) -> None:
        """End the tasks and give the lease up; records and windows stay in the store.

        Args:
            forget: this replica does not take the deployment up again when it restarts.
        """
        await end_tasks(self._tasks)
        self.driver.close()
        self.loads.ingest.close()
        await self.leadership.release(forget=forget)

    async def store_windows(self) -> None:
        """Bring the stored windows and KV caches up to date if this replica leads.

        Raises:
            Unavailable: the store is out of reach; a later call stores what is missing.
            Conflict: another replica leads.
        """
        if self.keeper.leading and self.keeper.lasting:
            await self.loads.store_windows(lambda: self.leadership.term)
            await self._kv.store_told(lambda: self.leadership.term)

    async def measure_plans(self) -> None:
        """Measure what committed plans delivered, where enough steps have run since."""
        if self.keeper.leading:
            await self.planner.gains.measure(self.planner.builder.cost or TOKENS)

    def follow_machine(self) -> None:
        """Bring the parts in line with the machine; called after every batch of its actions."""
        self._follow_clock()
        self._connectivity.check()
        self.ranks.repeat_troubles()
        self.leadership.remember_operator_state()
        if self.loads.follow_generation():
            self.ranks.begin_generation()
            self.planner.forget()
        self.loads.follow_placement()
        self._connectivity.keep_streams()

    def _follow_clock(self) -> None:
        """Tell the machine when the clock of the store was set, or ran on while the machine slept.

        What expires or waits by Unix time must go by the clock as it is now.
        """
        offset = self.clock.unix() - self.clock.monotonic()
        step_s = offset - self.control.unix_offset_s
        if abs(step_s) > _CLOCK_STEP_S:
            _log.warning("clock_stepped", deployment=self.deployment, seconds=round(step_s, 3))
            self.inbox.tell(ctl.ClockStepped(offset))


def _build_loads(
    control: DeploymentControl, options: DeploymentOptions, shared: SharedServices
) -> GroupLoads:
    deployment, metrics = control.deployment, shared.metrics
    ingest = Ingest(
        deployment,
        shared.windows,
        shared.clock,
        window_steps=options.window_steps,
        max_pending=options.max_pending,
        stride=options.flow.stride,
        accepted=partial(metrics.reports_received, deployment),
        rejected=partial(metrics.reports_rejected, deployment),
        dropped=partial(metrics.steps_dropped, deployment),
        incomplete=shared.incomplete,
        check=LoadCheck(options.cycle.plan_steps),
    )
    return GroupLoads(
        control,
        shared.store,
        ingest,
        options.cycle.plan_steps,
        options.cycle.objective.dispatch,
        shared.health,
        lambda shape: shared.may_restore(options.memory_of(shape)),
    )
