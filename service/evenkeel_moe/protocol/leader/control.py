"""What one controller replica does for one deployment: lead, recover, plan, migrate.

Rule 1: which event may move which state lives in `tables.CONTROL`; a method named there does one
move. Rules R1-R17 are in docs/protocol.md. The shell feeds events to `handle` one at a time,
carries the actions out in order (see `control_messages`) and reads the public attributes.

What operators ask for comes by `operator.Operator`.
"""

from itertools import count

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, PlanRecord
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import (
    ControlAction,
    FromRank,
    PersistAction,
    SendToRank,
)
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.leader.query_round import GroupState
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.leader.write_retry import WriteRetry
from evenkeel_moe.protocol.messages import (
    Hello,
    Leader,
    QueryState,
    RankState,
    StagingProgress,
    TermRefused,
    Tick,
)
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.protocol.transitions import CONTROL, IGNORED, ILLEGAL, VIOLATION, ControlState

__all__ = ["DeploymentControl"]


_FLUSHING = (Tick, ctl.AutomaticPlansResumed)
"""Events after which writes that failed earlier are tried again, even if there is nothing new to write."""


class DeploymentControl:
    """One deployment on one controller replica.

    Args:
        unix_offset_s: Unix seconds less the monotonic `now` of `handle`; records carry Unix time.
    """

    executor_type = PlanExecutor
    recovery_type = Recovery
    membership_type = Membership

    def __init__(
        self,
        deployment: DeploymentId,
        *,
        timing: ControlTiming | None = None,
        policy: DeploymentPolicy | None = None,
        unix_offset_s: float = 0.0,
    ) -> None:
        self.deployment = deployment
        self.timing = timing or ControlTiming()
        self.unix_offset_s = unix_offset_s
        self.policy = policy or DeploymentPolicy()
        """The policy operators set last."""
        self._cycle_numbers = count(1)
        self._become_follower()

    def _become_follower(self) -> None:
        self.state = ControlState.FOLLOWER
        self.leader: Leader | None = None
        """This replica with its term; None unless leading."""
        self.membership = self.membership_type(self.deployment, lease_s=self.timing.rank_lease_s)
        self.records = PlanRecords()
        """Plan records; empty unless leading."""
        self.executor: PlanExecutor | None = None
        self.recovery: Recovery | None = None
        self.planning_loop: PlanningLoop | None = None
        """These three are None exactly in FOLLOWER."""
        self._asked_at = float("-inf")
        self._lost: set[EpRank] = set()
        self._write_retry = WriteRetry()
        self._sends: tuple[SendToRank, ...] = ()
        """Of the newest batch with writes what goes out only if all are stored."""

    # --- reading ------------------------------------------------------------------------------------

    @property
    def group(self) -> GroupState | None:
        """Epoch, placement, weights version and checksums the ranks agree on; None before they told."""
        return self.executor.group if self.executor is not None else None

    @property
    def epoch(self) -> Epoch | None:
        """The committed epoch; None before the ranks told it."""
        return self.group.epoch if self.group is not None else None

    @property
    def placement(self) -> Placement | None:
        """The committed placement; None before the ranks told it."""
        return self.group.placement if self.group is not None else None

    @property
    def generation(self) -> Generation | None:
        """The registered generation."""
        return self.membership.generation

    @property
    def history(self) -> dict[Epoch, Placement]:
        """Recorded placements by epoch up to the committed one; short after a flushed store (R15)."""
        return self.executor.history if self.executor is not None else {}

    @property
    def coordinator(self) -> Coordinator | None:
        """The newest wave's machine, ended or not."""
        return self.executor.coordinator if self.executor is not None else None

    @property
    def active_plan(self) -> PlanRecord | None:
        """The accepted plan that has not ended."""
        return self.records.active

    @property
    def held(self) -> bool:
        """Whether automatic plans wait for `resume` after a rollback (R16)."""
        return self.planning_loop is not None and self.planning_loop.held

    @property
    def frozen_until(self) -> float:
        """Unix seconds until which no plan begins; 0 when not frozen."""
        return self.planning_loop.frozen_until if self.planning_loop is not None else 0.0

    def state_reason(self, now: float) -> tuple[Reason, str]:
        """Why the machine is in its state, for people."""
        match self.state:
            case ControlState.FOLLOWER:
                return Reason.NOT_LEADER, "another replica leads, or none yet"
            case ControlState.RECOVERING:
                disagreement = self.recovery.disagreement if self.recovery is not None else None
                if disagreement is not None:
                    return disagreement.reason, disagreement.detail
                return Reason.RECOVERING, "asking all ranks where they stand"
            case ControlState.MIGRATING if self.records.active is not None:
                record = self.records.active
                return record.reason, f"plan {record.plan.plan_id} is {record.phase}"
            case _:
                quorum = self.membership.quorum(now)
                return quorum.reason, quorum.detail

    # --- events -------------------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> list[ControlAction]:
        """Take one event and return what the shell must do, persists first.

        Args:
            event: `FromRank` or a local event of the table.
            now: monotonic seconds.

        Raises:
            IllegalEvent: a local event the table forbids; never for what a rank sent.
        """
        kind = type(event)
        if isinstance(event, FromRank):
            kind = type(event.message)
            known = kind is Hello or self.state is ControlState.FOLLOWER
            if not known and not self.membership.heard(
                event.rank, event.incarnation, event.stream, now
            ):
                return []
        return self.outgoing(self._dispatch(kind, event, now), flush=kind in _FLUSHING)

    def _dispatch(self, kind: type, event: object, now: float) -> list[ControlAction]:
        cell = CONTROL.get((self.state, kind), ILLEGAL)
        if cell is IGNORED:
            return []
        if cell is VIOLATION:
            return [ctl.Alert(Reason.MALFORMED, f"{self.state}, yet {event}")]
        if cell is ILLEGAL:
            raise IllegalEvent("control", self.state, event)
        actions: list[ControlAction] = getattr(self, cell)(event, now)
        return actions

    # --- leadership (R2, R13) -----------------------------------------------------------------------

    def _lead(self, event: ctl.LeaseAcquired, now: float) -> list[ControlAction]:
        self.leader = event.leader
        self.policy = event.stored.policy or self.policy
        self.records.load(event.stored.plans)
        timing = self.timing
        self.executor = self.executor_type(
            event.leader,
            self.membership,
            self.records,
            timing.wave,
            batch_deadline_s=timing.batch_deadline_s,
            max_bytes_per_s=timing.max_bytes_per_s,
            unix_offset_s=self.unix_offset_s,
        )
        self.executor.history = dict(event.stored.epochs)
        self.recovery = self.recovery_type(
            self.executor, again_s=timing.ask_again_s, deadline_s=timing.recovery_deadline_s
        )
        self.planning_loop = PlanningLoop(
            self.executor,
            self.policy,
            since=now,
            deadline_s=timing.cycle_deadline_s,
            numbers=self._cycle_numbers,
        )
        self.planning_loop.held, self.planning_loop.frozen_until = (
            event.stored.held,
            event.stored.frozen_until,
        )
        self.state = ControlState.WAITING_FOR_RANKS
        loss = event.stored.loss
        return [] if loss is None else [ctl.PersistDecision(loss)]

    def _follow(self, _event: object, _now: float) -> list[ControlAction]:
        """R13: stop sending and drop everything; the next leader asks the ranks."""
        self._become_follower()
        return []

    def _refused(self, event: FromRank, _now: float) -> list[ControlAction]:
        refused = event.message
        assert isinstance(refused, TermRefused) and self.leader is not None
        known = refused.leader
        if known == self.leader or not self.is_behind(known.term + 1):
            return []  # An answer to an earlier term of ours.
        return self._step_down(known.term)

    def _step_down(self, known_term: int) -> list[ControlAction]:
        self._become_follower()
        return [ctl.RaiseTerm(known_term)]

    def is_behind(self, known_term: int) -> bool:
        """R2: a leader's term is above what the store knows and what any rank knows."""
        return self.leader is None or self.leader.term < known_term

    # --- membership (R1) ----------------------------------------------------------------------------

    def _turn_away(self, event: FromRank, _now: float) -> list[ControlAction]:
        return [
            ctl.CloseStream(
                event.rank, event.stream, Reason.NOT_LEADER, "this replica does not lead"
            )
        ]

    def _hello(self, event: FromRank, now: float) -> list[ControlAction]:
        hello = event.message
        assert isinstance(hello, Hello) and self.leader is not None and self.recovery is not None
        registered = self.membership.register(hello, event.stream, now)
        if not registered.accepted:
            return [ctl.CloseStream(event.rank, event.stream, registered.reason, registered.detail)]
        if self.is_behind(hello.highest_term):
            return self._step_down(hello.highest_term)
        if registered.new_generation:
            self.state = ControlState.RECOVERING
            self._lost.clear()
            return [*self.recovery.end_old_plans(now), *self.recovery.begin(now)]
        if hello.identity.generation != self.membership.generation:
            return []
        self._lost.discard(event.rank)
        question = self.recovery.question(event.rank)
        if question is not None:
            return [question]
        return self._to_wave(ctl.RankConnected(event.rank, event.incarnation, event.stream), now)

    def _heard(self, event: ctl.RankHeard, now: float) -> list[ControlAction]:
        self.membership.heard(event.rank, event.incarnation, event.stream, now)
        return []

    def _troubled(self, event: ctl.RankTroubled, _now: float) -> list[ControlAction]:
        self.membership.troubled(event.rank, event.stream, event.trouble)
        return []

    def _closed(self, event: ctl.StreamClosed, _now: float) -> list[ControlAction]:
        self.membership.closed(event.rank, event.stream)
        return []

    # --- what ranks say -----------------------------------------------------------------------------

    def _note(self, event: FromRank, now: float) -> list[ControlAction]:
        state = event.message
        assert isinstance(state, RankState)
        self.membership.report(state)
        if state.identity.generation != self.generation:
            return []  # A life of a group that is still gathering.
        return self._to_wave(ctl.GroupProgress(self.membership.step()), now)

    def _query_answer(self, event: FromRank, now: float) -> list[ControlAction]:
        state = event.message
        assert isinstance(state, RankState) and self.recovery is not None
        actions = [*self._note(event, now), *self._to_wave(event, now)]
        if state.identity.generation == self.generation:
            actions += self.recovery.answer(state, now)
        return actions + self._settle(now)

    def _check(self, event: FromRank, now: float) -> list[ControlAction]:
        """A heartbeat's answer: does the rank still stand where the records say?"""
        state, executor, recovery, group = event.message, self.executor, self.recovery, self.group
        assert isinstance(state, RankState) and executor and recovery and group
        actions = [*self._note(event, now), *self._to_wave(event, now)]
        if state.identity.generation != self.generation:
            return actions
        if state.weights_version != group.weights_version and not executor.weights_moved:
            executor.weights_moved = True
            actions += self._to_wave(ctl.CancelWave(Reason.WEIGHTS_VERSION_CHANGED), now)
        at_rest = not executor.running and state.query >= recovery.settled_query
        elsewhere = (
            state.epoch != group.epoch
            or state.wave is not None
            or state.placement_digest != group.placement.digest
        )
        if at_rest and (elsewhere or executor.weights_moved):
            actions += self._recover_anew(now)
        return actions

    def _recover_anew(self, now: float) -> list[ControlAction]:
        assert self.recovery is not None
        self.state = ControlState.RECOVERING
        return self.recovery.begin(now)

    def _staged(self, event: FromRank, _now: float) -> list[ControlAction]:
        assert isinstance(event.message, StagingProgress) and self.executor is not None
        self.executor.progress(event.rank, event.message)
        return []

    # --- waves --------------------------------------------------------------------------------------

    def _to_wave(self, event: object, now: float) -> list[ControlAction]:
        """Give the wave an event; late ones of an ended wave find its machine ended."""
        executor, recovery = self.executor, self.recovery
        assert executor is not None and recovery is not None
        was_running = executor.running
        if isinstance(event, ctl.CancelWave) and not was_running:
            return []
        actions = executor.take(event, now)
        if was_running and not executor.running:
            recovery.settled_query = recovery.query + 1
            actions += self._next_wave(now)
        return actions

    def _next_wave(self, now: float) -> list[ControlAction]:
        """The wave ended on all ranks: ask anew, begin the next, or be done."""
        assert self.recovery is not None
        if self.state is ControlState.RECOVERING:
            return self.recovery.after_wave(now)
        return self.carry_on(now)

    def carry_on(self, now: float) -> list[ControlAction]:
        """Begin the active plan's next wave if none runs; READY when there is no active plan."""
        executor, record = self.executor, self.records.active
        if self.state not in (ControlState.READY, ControlState.MIGRATING):
            return []
        assert executor is not None
        if executor.running:
            return []
        actions: list[ControlAction] = []
        if record is not None and not executor.weights_moved:
            closed = self._may_not_begin(record, now)
            if closed is None:
                actions = executor.begin_wave(record, now, may_persist=not self._write_retry)
            else:
                actions = executor.wait(record, closed, "accepted before, and not begun yet", now)
        self.state = ControlState.READY if self.records.active is None else ControlState.MIGRATING
        return actions

    def _may_not_begin(self, record: PlanRecord, now: float) -> Reason | None:
        """A freeze and the schedule hold what has not begun, but for a rollback; a plan under way goes on."""
        assert self.planning_loop is not None
        if record.plan.kind is PlanKind.ROLLBACK or self.records.has_begun(record):
            return None
        return self.planning_loop.closed(now)

    def _settle(self, now: float) -> list[ControlAction]:
        """Leave RECOVERING when the recovery is over."""
        assert self.recovery is not None
        if self.state is not ControlState.RECOVERING or not self.recovery.over:
            return []
        self.state = ControlState.READY
        return self.carry_on(now)

    # --- what operators set -------------------------------------------------------------------------

    def _set_policy(self, event: ctl.PolicySet, _now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        self.policy = self.planning_loop.policy = event.policy
        return [ctl.PersistDocument("policy", event.document)]

    def _freeze(self, event: ctl.PlansFrozen, _now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        self.planning_loop.frozen_until = event.until
        return [self.document()]

    def _resume(self, _event: object, _now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        if not self.planning_loop.held:
            return []  # Asked again, perhaps because the first answer was lost.
        self.planning_loop.held = False
        return [self.document()]

    # --- time ---------------------------------------------------------------------------------------

    def _step_clock(self, event: ctl.ClockStepped, _now: float) -> list[ControlAction]:
        self.unix_offset_s = event.unix_offset_s
        if self.executor is not None:
            self.executor.unix_offset_s = event.unix_offset_s
        return []

    def _tick_waiting(self, _event: object, now: float) -> list[ControlAction]:
        actions = [*self._housekeeping(now), *self._note_waiting(now)]
        return [*actions, *self._tick_cycles(now, Reason.RANKS_MISSING)]

    def _tick_recovering(self, event: object, now: float) -> list[ControlAction]:
        assert self.recovery is not None
        actions = [*self._housekeeping(now), *self._to_wave(event, now), *self.recovery.tick(now)]
        actions += self._note_waiting(now)
        return [*actions, *self._tick_cycles(now, Reason.RECOVERING)]

    def _note_waiting(self, now: float) -> list[ControlAction]:
        """R14: a plan that waits for the ranks to be asked says so; where a wave was found, the wave does."""
        executor, recovery, record = self.executor, self.recovery, self.records.active
        assert executor is not None and recovery is not None
        if record is None or executor.running:
            return []
        obstacle = recovery.obstacle(now)
        return executor.wait(record, obstacle.reason, obstacle.detail, now)

    def _tick_ready(self, event: object, now: float) -> list[ControlAction]:
        return self._tick_migrating(event, now)

    def _tick_migrating(self, event: object, now: float) -> list[ControlAction]:
        executor = self.executor
        assert executor is not None
        actions = [*self._housekeeping(now), *self._to_wave(event, now)]
        unix = now + self.unix_offset_s
        actions += self.records.sweep(lambda record: executor.is_stale(record.plan, 0), unix)
        actions += self.carry_on(now)
        hindrance = Reason.STORE_UNAVAILABLE if self._write_retry else None
        return [*actions, *self._tick_cycles(now, hindrance)]

    def _tick_cycles(self, now: float, hindrance: Reason | None) -> list[ControlAction]:
        return self.planning_loop.tick(now, hindrance) if self.planning_loop is not None else []

    def _housekeeping(self, now: float) -> list[ControlAction]:
        """Keep heartbeats going, notice who went and came back."""
        actions: list[ControlAction] = []
        generation = self.generation
        for rank, member in self.membership.members.items():
            identity = member.hello.identity
            present = self.membership.is_fresh(member, now) and identity.generation == generation
            if present and rank in self._lost:
                self._lost.discard(rank)
                actions += self._to_wave(
                    ctl.RankConnected(rank, identity.incarnation, member.stream), now
                )
            elif not present and rank not in self._lost:
                self._lost.add(rank)
                actions += self._to_wave(ctl.RankLost(rank), now)
        due = self._asked_at + self.timing.question_s(at_rest=self.state is ControlState.READY)
        if now >= due and self.leader is not None and self.recovery is not None:
            self._asked_at = now
            self.recovery.query += 1
            query = QueryState(self.leader, query=self.recovery.query)
            for rank, member in self.membership.everyone.items():
                actions.append(SendToRank(rank, member.stream, query))
        return actions

    def _cycle_decided(self, event: ctl.CycleDecided, now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        hindrance = Reason.STORE_UNAVAILABLE if self._write_retry else None
        actions = self.planning_loop.take(event, now, hindrance)
        return [*actions, *self.carry_on(now)]

    def _cycle_overtaken(self, event: ctl.CycleDecided, now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        migrating = self.state is ControlState.MIGRATING
        return self.planning_loop.take(
            event, now, Reason.PLAN_IN_PROGRESS if migrating else Reason.RECOVERING
        )

    def _unsaved(self, event: ctl.PersistFailed, _now: float) -> list[ControlAction]:
        """Kept, and tried again with the next write or tick; no wave begins before. What was to go out with them did not."""
        current = (self._current(action) for action in event.failed)
        self._write_retry.keep(action for action in current if action is not None)
        if self.coordinator is not None:
            self.coordinator.not_sent(self._sends)
        self._sends = ()
        return []

    def _current(self, action: PersistAction) -> PersistAction | None:
        """What to write in place of a write that failed, perhaps a while ago; None if it is outdated."""
        if isinstance(action, ctl.PersistPlan):
            plan_id = action.record.plan.plan_id
            return ctl.PersistPlan(self.records.by_id.get(plan_id, action.record))
        if isinstance(action, ctl.PersistEpoch):
            here = action.generation == self.generation and action.epoch == self.epoch
            return action if here else None
        if isinstance(action, ctl.PersistDocument) and action.name == self.document().name:
            return self.document()
        return action

    def document(self) -> ctl.PersistDocument:
        """What operators set besides the policy."""
        return ctl.PersistDocument(
            "control", {"held": self.held, "frozen_until": self.frozen_until}
        )

    def outgoing(self, actions: list[ControlAction], *, flush: bool = False) -> list[ControlAction]:
        """A batch as the shell needs it: what is not stored yet first, and all persists before sends."""
        persists = [action for action in actions if isinstance(action, PersistAction)]
        if not persists and not (flush and self._write_retry):
            return actions
        others = [action for action in actions if not isinstance(action, PersistAction)]
        self._sends = tuple(a for a in others if isinstance(a, SendToRank) and a.decides)
        return [*self._write_retry.release(persists), *others]
