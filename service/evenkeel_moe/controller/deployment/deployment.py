"""One deployment on this replica: its machine with everything the machine reaches."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.cycles.cycle_inputs import CycleSettings
from evenkeel_moe.controller.cycles.planning import Planning
from evenkeel_moe.controller.deployment.action_executor import ControlHands, StoreHealth
from evenkeel_moe.controller.deployment.connectivity import Reach
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.leadership.leases import LeaseKeeper
from evenkeel_moe.controller.leadership.operator_state import Orders, StandingOrders
from evenkeel_moe.controller.leadership.takeover import Taken, take_over
from evenkeel_moe.controller.policy_document import shape_document, shape_from_document
from evenkeel_moe.controller.ranks.session import Session
from evenkeel_moe.controller.tasks import end_tasks
from evenkeel_moe.driver import Driver
from evenkeel_moe.errors import Conflict, EvenkeelError, PeerViolation, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.ports import Clock, DeploymentStore, Lease, WindowStore
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.operator import Operator
from evenkeel_moe.protocol.messages import ControllerMessage, Hello, Leader, Prepare, Tick
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.telemetry.balance import Balance
from evenkeel_moe.wire.link import FlowControl, NotLeader, Registration, RegistrationOutcome

__all__ = ["Deployment", "DeploymentOptions", "Outside"]

_log = structlog.get_logger(__name__)
_TICK_S = 0.25
"""Fine enough for what machines wait for, half a second at least; a tick of each deployment costs a quarter of a millisecond."""
_LEASE_WAIT_S = 3.0
_REGISTER_TRIES = 3
_CLOCK_STEP_S = 1.0
"""More than clocks drift apart between two looks."""


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """Settings as one deployment needs them."""

    replica_id: str
    advertise: str
    """host:port by which ranks reach this replica."""
    alone: bool
    """There is no other replica."""
    lease_s: float
    renew_s: float
    timing: ControlTiming
    policy: DeploymentPolicy
    """Until an operator sets another."""
    cycle: CycleSettings
    window_steps: int
    max_pending: int
    flow: FlowControl


@dataclass(frozen=True, slots=True)
class Outside:
    """What all deployments of a replica share."""

    store: DeploymentStore
    windows: WindowStore
    clock: Clock
    metrics: ControllerMetrics
    health: StoreHealth
    planner: PlannerPool
    spawn: "Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]"
    """Run a named task to its end or the controller's; a failure ends the controller."""


class Deployment:
    """Everything of one deployment. `run_tasks` must be running for anything to happen."""

    def __init__(
        self, deployment: DeploymentId, options: DeploymentOptions, outside: Outside
    ) -> None:
        self.deployment = deployment
        self.options = options
        self.outside = outside
        clock = outside.clock
        self.unix_offset_s = clock.unix() - clock.monotonic()
        self.control = DeploymentControl(
            deployment,
            timing=options.timing,
            policy=options.policy,
            unix_offset_s=self.unix_offset_s,
        )
        self.operator = Operator(self.control)
        self.flow = options.flow
        """How ranks are to report now; see `pace`."""
        self.shape: ModelShape | None = None
        """As the ranks declared; before they do, as stored. None: never known."""
        self.sessions: dict[int, Session] = {}
        """Open streams by number."""
        self.balance = Balance(options.cycle.plan_steps, self.split)
        self.ingest = Ingest(
            deployment,
            outside.windows,
            clock,
            window_steps=options.window_steps,
            max_pending=options.max_pending,
            stride=options.flow.stride,
            accepted=lambda steps: outside.metrics.reports_received(deployment, steps),
            rejected=lambda reason, steps: outside.metrics.reports_rejected(
                deployment, reason, steps
            ),
            dropped=lambda rank, steps: outside.metrics.steps_dropped(deployment, rank, steps),
        )
        self.hands = ControlHands(
            deployment,
            outside.store,
            outside.health,
            clock,
            outside.metrics,
            self,
            lambda plan_id: next(
                (r for r in self.control.records.by_id.values() if r.plan.plan_id == plan_id), None
            ),
        )
        self.driver: Driver[ctl.ControlAction] = Driver(
            self.control, self.hands, clock, tick=Tick(), tick_s=_TICK_S, after=self._follow_machine
        )
        self.keeper = LeaseKeeper(
            deployment,
            options.replica_id,
            outside.store,
            clock,
            lease_s=options.lease_s,
            renew_s=options.renew_s,
            alone=options.alone,
            won=self._won,
            lost=lambda: self.driver.post(ctl.LeaseLost()),
            outrun=self._outrun,
        )
        self.planning = Planning(self)
        self._orders = StandingOrders(options.replica_id, options.policy)
        self._tasks: list[asyncio.Task[None]] = []
        self.reach = Reach(self)
        self._seen_at = clock.monotonic()
        self._term = 0
        self._settled_at: tuple[Epoch, str] | None = None
        self._restored = False
        self._shape_unstored = False

    # --- tasks ------------------------------------------------------------------------------------

    def run_tasks(self) -> None:
        """Start the machine's loop and the lease's."""
        self._tasks = [
            self.outside.spawn(self.driver.run(), f"driver-{self.deployment}"),
            self.outside.spawn(self.keeper.run(), f"lease-{self.deployment}"),
        ]

    async def leave(self, *, forgotten: bool = False) -> None:
        """End what `run_tasks` started and give the lease up; records and windows stay in the store. `forgotten`: this
        replica does not take the deployment up again when it restarts."""
        await end_tasks(self._tasks)
        if forgotten and self.keeper.leading:
            nobody = {"replica_id": "", "address": ""}
            with contextlib.suppress(Unavailable, Conflict):
                await self.outside.store.store_document(
                    self.deployment, "leader", nobody, self._term
                )
                await self.outside.store.unlist(self.deployment)
        await self.keeper.release()

    def pace(self, flow: FlowControl) -> None:
        """Have the ranks report so from now on; a new stride begins behind the newest step."""
        newest = self.ingest.newest_step
        from_step = 0 if newest is None or flow.stride == 1 else newest + 1
        self._tell_flow(replace(flow, from_step=from_step))

    def _tell_flow(self, flow: FlowControl) -> None:
        self.flow = flow
        self.ingest.sample(flow.stride, flow.from_step)
        for session in self.sessions.values():
            if session.registered:
                session.stream.send(flow)

    def split(self) -> SplitModel:
        """How tokens split over replicas, for gauges as for gates."""
        return SplitModel(self.options.cycle.objective.dispatch, self.planning.topology())

    def idle_s(self) -> float:
        """How long no rank has had a stream here."""
        return 0.0 if self.sessions else self.outside.clock.monotonic() - self._seen_at

    def seen(self) -> None:
        """A rank had a stream here until now."""
        self._seen_at = self.outside.clock.monotonic()

    async def store_windows(self) -> None:
        """Bring the store up to date with the windows.

        Raises:
            Unavailable: the store is out of reach; nothing is lost that the windows hold.
        """
        if not self.keeper.leading:
            return
        await self.ingest.store()
        generation = self.ingest.generation
        if self._shape_unstored and self.shape is not None and generation is not None:
            body = shape_document(generation, self.shape)
            self._shape_unstored = False  # Before it is: another group may register meanwhile.
            try:
                await self.outside.store.store_document(self.deployment, "shape", body, self.term)
            except BaseException:
                self._shape_unstored = True
                raise

    # --- leadership -------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """Term to write under; the last one held when none is."""
        return self._term

    @property
    def machine_term(self) -> int:
        """Term the machine leads under. A lease lost and won again is known here before the machine hears of it: what it
        decides until then may not be stored under the later term, whose records were read already."""
        leader = self.control.leader
        return self._term if leader is None else leader.term

    async def _won(self, lease: Lease) -> None:
        """Load what is stored, then let the machine lead, and show it the ranks that are here."""
        store, deployment, me = self.outside.store, self.deployment, self.options.replica_id
        for session in self.sessions.values():
            self._orders.ranks_know(session.hello.highest_term)
        taken = await take_over(store, deployment, lease.term, self._orders)
        self._shape_unstored |= taken.led_by is None
        if not self._restored or taken.led_by not in (None, me):
            await self._restore()
        leader = {"replica_id": me, "address": self.options.advertise}
        await store.store_document(deployment, "leader", leader, lease.term)
        self._term = lease.term
        self.driver.post(ctl.LeaseAcquired(Leader(me, lease.term), self._stored(taken)))
        for session in self.sessions.values():
            if session.registered:
                self.driver.post(session.event(session.hello))

    def _stored(self, taken: Taken) -> ctl.StoredRecords:
        """The records the machine begins to lead with; a loss of the store is logged."""
        recalled = taken.recalled
        if not recalled.loss:
            return taken.records
        _log.error("store_came_back_empty", deployment=self.deployment, detail=recalled.loss)
        return replace(taken.records, loss=recalled.row(self.outside.clock.unix()))

    def tell(self, event: ctl.RankHeard | ctl.RankTroubled | ctl.ClockStepped) -> None:
        """Give the machine an event that leads to no action, at once.

        The driver's queue waits while a batch is being stored: a rank that is heard meanwhile must not be
        taken for lost, nor a clock for right that was set.
        """
        actions = self.control.handle(event, self.outside.clock.monotonic())
        assert not actions

    async def _restore(self) -> None:
        """Take back the windows, also where another led meanwhile: what is in memory ends where it began."""
        known = shape_from_document(
            await self.outside.store.fetch_document(self.deployment, "shape")
        )
        if known is not None:
            steps = await self._restore_windows(*known)
            _log.info(
                "window_restored", deployment=self.deployment, steps=steps, generation=known[0]
            )
        rows = await self.outside.store.fetch_decisions(self.deployment, 100)
        self.hands.decisions.clear()
        self.hands.decisions.extendleft(dict(row) for row in rows)
        self._restored = True

    async def _restore_windows(self, generation: Generation, shape: ModelShape) -> int:
        ingest = self.ingest
        if generation != ingest.generation:
            here_now = {session.hello.identity.generation for session in self.sessions.values()}
            if here_now == {ingest.generation}:
                return 0  # The group restarted, and the store has not been told: its window is of before.
            ingest.leave_generation()
        here = dict(ingest.rings) if ingest.generation is not None else {}
        # Until the machine settles reports wait: they may be of the generation that was here before.
        ingest.unsettle()
        self._settled_at = None
        if ingest.generation is None:
            self._shape_unstored = False
        steps = await ingest.restore(generation, shape)
        for phase, ring in here.items():  # What came here and was not stored.
            for part in ring.parts():
                steps += len(ingest.rings[phase].append(part))
        self.shape = self.shape or shape
        return steps

    def _outrun(self, _winner: Lease) -> None:
        """Another replica leads: the ranks are sent to it."""
        if any(session.registered for session in self.sessions.values()):
            self.outside.spawn(self._send_away(), f"send-away-{self.deployment}")

    async def _send_away(self) -> None:
        answer = await self.leader_address()
        for session in list(self.sessions.values()):
            if session.registered and not self.keeper.leading:
                session.stream.close(answer)

    async def leader_address(self) -> NotLeader:
        """Where ranks should go instead."""
        winner = self.keeper.winner
        try:
            body = await self.outside.store.fetch_document(self.deployment, "leader") or {}
        except Unavailable:
            body = {}
        if (
            winner is not None
            and body.get("replica_id") == winner.holder != self.options.replica_id
        ):
            return NotLeader(winner.holder, str(body.get("address", "")), self.options.renew_s)
        return NotLeader(winner.holder if winner else "", "", self.options.renew_s)

    # --- ranks ------------------------------------------------------------------------------------

    async def attach(self, hello: Hello, stream: RankStream) -> Session | None:
        """Register a rank's stream; None when it was turned away."""
        session = Session(self, hello, stream)
        self.sessions[stream.number] = session
        try:
            return await self._register_within(session)
        except BaseException:
            # The rank hung up while the lease was sought: nobody else will end this session.
            session.lost()
            raise

    async def _register_within(self, session: Session) -> Session | None:
        stream = session.stream
        # The lease may be taken anew in between, for the term that this very Hello tells of.
        for _ in range(_REGISTER_TRIES):
            await self.keeper.decided(_LEASE_WAIT_S)
            if not self.keeper.leading or stream.closed:
                break
            try:
                await self.driver.call(lambda now: (None, self._register(session, now)))
            except Unavailable:
                # Registered all the same: what could not be stored is tried again.
                _log.info("registered_without_store", deployment=self.deployment, rank=session.rank)
            if session.registered:
                return session
        if not stream.closed:
            stream.close(await self.leader_address())
        session.lost()
        return None

    def _register(self, session: Session, now: float) -> Sequence[ctl.ControlAction]:
        """Show the machine a Hello. The answer goes out before anything else on the stream."""
        if self.control.leader is None:
            return ()
        actions = self.control.handle(session.event(session.hello), now)
        refused = any(
            isinstance(action, ctl.CloseStream) and action.stream == session.stream.number
            for action in actions
        )
        if refused or self.control.leader is None:
            return actions
        session.registered = True
        hello, timing = session.hello, self.options.timing
        observing = "migrate" not in hello.capabilities
        self.shape = self.shape or hello.shape
        session.stream.send(
            Registration(
                outcome=RegistrationOutcome.OBSERVE_ONLY
                if observing
                else RegistrationOutcome.ACCEPTED,
                heartbeat_interval_s=timing.heartbeat_s,
                lease_s=timing.rank_lease_s,
                flow=self.flow,
                reason=Reason.OBSERVE_ONLY if observing else None,
                detail="the rank does not offer to migrate" if observing else "",
                leader=self.control.leader,
                highest_step=self.ingest.highest_step(
                    hello.identity.rank, hello.identity.generation
                ),
            )
        )
        return actions

    def refusal(self, reason: Reason, detail: str) -> Registration:
        """The answer to a rank that cannot be taken."""
        timing = self.options.timing
        return Registration(
            RegistrationOutcome.REFUSED,
            timing.heartbeat_s,
            timing.rank_lease_s,
            self.flow,
            reason,
            detail,
        )

    # --- what the hands reach -----------------------------------------------------------------------

    def send(self, rank: int, stream: int, message: ControllerMessage) -> None:
        """Send on a stream if it is there."""
        session = self.sessions.get(stream)
        if session is not None and session.rank == rank:
            session.stream.send(message)

    def turn_away(self, stream: int, reason: Reason, detail: str) -> None:
        """Refuse a stream and close it."""
        session = self.sessions.get(stream)
        if session is None:
            return
        _log.warning(
            "rank_refused",
            deployment=self.deployment,
            rank=session.rank,
            reason=reason,
            detail=detail,
        )
        if reason is Reason.NOT_LEADER:
            session.stream.close(NotLeader("", "", self.options.renew_s))
        else:
            session.stream.close(self.refusal(reason, detail))

    def expect_wave(self, prepare: Prepare) -> None:
        """A wave goes out: some rank may report steps under its map before it says that it swapped."""
        placement = self.control.placement
        if placement is None or self.control.epoch != prepare.base_epoch:
            return
        try:
            after = placement.with_rows(prepare.body.layers, prepare.body.rows)
            self.ingest.expect(Epoch(prepare.base_epoch + 1), after)
        except EvenkeelError as error:
            _log.error("wave_map_unusable", deployment=self.deployment, error=str(error))

    def raise_term(self, at_least: int) -> None:
        """Take the lease anew above a term that ranks know."""
        self._orders.ranks_know(at_least)
        self.keeper.raise_term(at_least)

    def fenced(self, why: str) -> None:
        """A write was refused: another replica has the lease, or we have it under a later term."""
        if self.machine_term == self._term:
            self.keeper.drop(why)

    def begin_cycle(self, action: ctl.RunCycle) -> None:
        """Plan in the background."""
        self.outside.spawn(
            self.planning.run_cycle(action), f"cycle-{self.deployment}-{action.cycle}"
        )

    # --- what follows the machine's state -----------------------------------------------------------

    def _follow_clock(self) -> None:
        """Unix time is stepped, and goes on while a machine sleeps: what expires or waits by it must go by it as it is now."""
        clock = self.outside.clock
        offset = clock.unix() - clock.monotonic()
        if abs(offset - self.unix_offset_s) > _CLOCK_STEP_S:
            _log.warning(
                "clock_stepped",
                deployment=self.deployment,
                seconds=round(offset - self.unix_offset_s, 3),
            )
            self.unix_offset_s = offset
            self.tell(ctl.ClockStepped(offset))

    def _follow_machine(self) -> None:
        """After every batch: telemetry needs the generation and the map the machine settled on."""
        self._follow_clock()
        self.reach.check()
        for session in self.sessions.values():
            if session.trouble:  # A machine that leads again knows its ranks by their Hellos alone.
                session.tell_trouble()
        control, ingest = self.control, self.ingest
        if control.leader is not None:
            orders = Orders(control.policy, control.held, control.frozen_until)
            self._orders.remember(control.leader.term, orders)
        shape, generation = control.membership.shape, control.generation
        if generation is not None and shape is not None and generation != ingest.generation:
            ingest.begin_generation(generation, shape)
            if self.flow.from_step:
                # A step of the former group: the new ranks would send all steps up to it, only to have them dropped.
                self._tell_flow(replace(self.flow, from_step=0))
            self.shape = shape
            self.balance.clear()
            self.planning.forget()
            self._settled_at = None
            self._shape_unstored = True
        if control.state is ControlState.FOLLOWER:
            self.reach.keep_streams()
            return  # Loads are counted on under the last map while the lease is sought.
        if control.state in (ControlState.READY, ControlState.MIGRATING):
            epoch, placement = control.epoch, control.placement
            assert epoch is not None and placement is not None
            if (epoch, placement.digest) != self._settled_at:
                self._settled_at = (epoch, placement.digest)
                for earlier in sorted(e for e in control.history if e < epoch)[-3:]:
                    known = control.history[earlier]
                    if shape is not None and known.sizes == shape.sizes:
                        ingest.expect(earlier, known)
                ingest.settle(epoch, placement)
        elif self._settled_at is not None:
            self._settled_at = None
            ingest.unsettle()

    def malformed(self, session: Session, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        """A report that cannot be right: counted, and answered so that it is not sent again. Its rank lives."""
        session.tell_heard()
        session.stream.send(self.ingest.malformed(EpRank(session.rank), violation, steps))
