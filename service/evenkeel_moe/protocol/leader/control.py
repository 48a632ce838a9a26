"""The leader's machine of one deployment: it recovers, plans and migrates.

The table `transitions.CONTROL` decides which event may change which state. Rules R1 to R17 are in
docs/protocol.md. The shell passes events to `handle` one at a time, carries the actions out in
order (see `control_messages`) and reads the public attributes.
"""

from dataclasses import replace
from typing import get_args

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import ControlAction, FromRank, PersistAction
from evenkeel_moe.protocol.leader.deployment_state import Leading
from evenkeel_moe.protocol.leader.liveness import Liveness
from evenkeel_moe.protocol.leader.operator_requests import OperatorRequests
from evenkeel_moe.protocol.leader.undelivered import IN_A_ROW, undelivered_in_a_row
from evenkeel_moe.protocol.messages import (
    Hello,
    MovedAnswers,
    ParticipantState,
    RankState,
    StagingProgress,
    TermRefused,
    Tick,
)
from evenkeel_moe.protocol.terms import is_credible_term
from evenkeel_moe.protocol.transitions import (
    CONTROL,
    IGNORED,
    ILLEGAL,
    NOT_READY,
    ControlState,
)

_FLUSHING = (Tick, *get_args(ctl.OperatorRequest))
"""Events after which failed writes are tried again, even if there is nothing new to write."""


class DeploymentControl(OperatorRequests):
    """The moves of one deployment on one controller replica."""

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> list[ControlAction]:
        """Take one event and return the actions for the shell, writes first.

        Args:
            event: `FromRank` or a local event of the table.
            now: monotonic seconds.

        Raises:
            IllegalEvent: the table forbids a local event; never raised for a rank's message.
            EvenkeelError: an operator's request is refused, and nothing has changed.
        """
        kind = type(event)
        if isinstance(event, FromRank):
            kind = type(event.message)
            rank, incarnation, stream = event.rank, event.incarnation, event.stream
            unchecked = kind is Hello or self.state is ControlState.FOLLOWER
            if not unchecked and not self.membership.heard(rank, incarnation, stream, now):
                return []
        return self.write_retry.order(self._dispatch(kind, event, now), flush=kind in _FLUSHING)

    def _dispatch(self, kind: type, event: object, now: float) -> list[ControlAction]:
        cell = CONTROL.get((self.state, kind), ILLEGAL)
        if cell is IGNORED:
            return []
        if cell is NOT_READY:
            raise self.unavailable()
        if cell is ILLEGAL:
            raise IllegalEvent("control", self.state, event)
        return list(getattr(self, cell)(event, now))

    # --- leadership (R2, R13) ---------------------------------------------------------------------

    def _lead(self, event: ctl.LeaseAcquired, now: float) -> list[ControlAction]:
        stored = event.stored
        self.policy = stored.policy or self.policy
        self.records.load(stored.plans)
        executor = self.executor_type(
            event.leader,
            self.membership,
            self.records,
            self.timing,
            unix_offset_s=self.unix_offset_s,
        )
        executor.history = dict(stored.epochs)
        recovery = self.recovery_type(executor)
        planning_loop = self.planning_type(
            executor, self.policy, since=now, numbers=self._cycle_numbers
        )
        planning_loop.hold = stored.hold
        planning_loop.frozen_until = stored.frozen_until
        self.leading = Leading(executor, recovery, Liveness(recovery), planning_loop)
        self.state = ControlState.WAITING_FOR_RANKS
        return [] if stored.loss is None else [ctl.PersistDecision(stored.loss)]

    def _follow(self, _event: object, _now: float) -> list[ControlAction]:
        """R13: send nothing more and forget everything; the next leader asks the ranks."""
        self._become_follower()
        return []

    def _term_refused(self, event: FromRank, _now: float) -> list[ControlAction]:
        refused = event.message
        assert isinstance(refused, TermRefused) and self.leader is not None
        if (known := refused.leader) == self.leader or not self.is_behind(known.term + 1):
            return []  # An answer to an earlier term of this replica.
        return self._refuse_term(event, known.term) or self._step_down(known.term)

    def _step_down(self, known_term: int) -> list[ControlAction]:
        self._become_follower()
        return [ctl.RaiseTerm(known_term)]

    def is_behind(self, known_term: int) -> bool:
        """R2: the term must be above the one in the store and above all that ranks know."""
        assert self.leader is not None
        return self.leader.term < known_term

    def _refuse_term(self, event: FromRank, known_term: int) -> list[ControlAction]:
        """R2: close the stream of a rank that names an incredible term."""
        assert self.leader is not None
        if is_credible_term(known_term, self.leader.term):
            return []
        detail = f"term {known_term} cannot follow from term {self.leader.term}"
        return [ctl.CloseStream(event.rank, event.stream, Reason.LIMIT_EXCEEDED, detail)]

    # --- membership (R1) --------------------------------------------------------------------------

    def _refuse_hello(self, event: FromRank, _now: float) -> list[ControlAction]:
        why = Reason.NOT_LEADER, "this replica does not lead"
        return [ctl.CloseStream(event.rank, event.stream, *why)]

    def _hello(self, event: FromRank, now: float) -> list[ControlAction]:
        hello, recovery, liveness = (
            event.message,
            self.as_leader.recovery,
            self.as_leader.liveness,
        )
        assert isinstance(hello, Hello)
        if refused := self._refuse_term(event, hello.highest_term):
            return refused
        admission = self.membership.register(hello, event.stream, now, certified=event.certified)
        closes: list[ControlAction] = [*admission.closes]
        if not admission.accepted:
            return closes
        if self.is_behind(hello.highest_term):
            return [*closes, *self._step_down(hello.highest_term)]
        if admission.new_generation:
            self.state = ControlState.RECOVERING
            liveness.begin_generation()
            resized = self._end_retirement()
            return [*closes, *resized, *recovery.end_old_plans(now), *recovery.begin(now)]
        if hello.identity.generation != self.membership.generation:
            return closes
        liveness.connected(event.rank)
        if question := recovery.question(event.rank):
            return [*closes, question]
        connected = ctl.RankConnected(event.rank, event.incarnation, event.stream)
        return [*closes, *self._to_wave(connected, now)]

    # --- messages of ranks ------------------------------------------------------------------------

    def _note_state(self, event: FromRank, now: float) -> list[ControlAction]:
        state = event.message
        assert isinstance(state, RankState)
        self.membership.report(state)
        if state.identity.generation != self.generation:
            return []  # A rank of a group that is still gathering.
        members = self.membership.members.values()
        moves = state.state is ParticipantState.SWAPPING and not any(m.trouble for m in members)
        swapping = state.wave if moves else None
        return self._to_wave(ctl.GroupProgress(self.membership.step(), swapping), now)

    def _query_answer(self, event: FromRank, now: float) -> list[ControlAction]:
        state = event.message
        assert isinstance(state, RankState)
        actions = [*self._note_state(event, now), *self._to_wave(event, now)]
        if state.identity.generation == self.generation:
            actions += self.as_leader.recovery.answer(state, now)
        return actions + self._end_recovery(now)

    def _check_state(self, event: FromRank, now: float) -> list[ControlAction]:
        """Compare a rank's answer to a heartbeat with the recorded state of the group."""
        state, group = event.message, self.group
        executor, recovery = self.as_leader.executor, self.as_leader.recovery
        assert isinstance(state, RankState) and group is not None
        actions = [*self._note_state(event, now), *self._to_wave(event, now)]
        if state.identity.generation != self.generation:
            return actions
        # A rank tells its state unasked after a reload. One that left no checksums is repeated with
        # the same version.
        repeated = state.query == 0 and not group.checksums
        if repeated or state.weights_version != group.weights_version:
            executor.weights_changed = True
            actions += self._to_wave(ctl.CancelWave(Reason.WEIGHTS_VERSION_CHANGED), now)
        # An answer to an older question may tell a map from before the last wave ended.
        differs = state.query >= recovery.settled_query and (
            state.epoch != group.epoch
            or state.wave is not None
            or state.placement_digest != group.placement.digest
        )
        if not executor.running and (differs or executor.weights_changed):
            self.state = ControlState.RECOVERING
            actions += recovery.begin(now)
        return actions

    def _staged(self, event: FromRank, _now: float) -> list[ControlAction]:
        assert isinstance(event.message, StagingProgress)
        self.as_leader.executor.progress(event.rank, event.message)
        return []

    def _answered(self, event: FromRank, now: float) -> list[ControlAction]:
        assert isinstance(event.message, MovedAnswers)
        return self.as_leader.executor.answered(event.rank, event.message, now)

    # --- notes of ranks that lead to no action ----------------------------------------------------

    def _heard(self, event: ctl.RankHeard, now: float) -> list[ControlAction]:
        self.membership.heard(event.rank, event.incarnation, event.stream, now)
        return []

    def _troubled(self, event: ctl.RankTroubled, _now: float) -> list[ControlAction]:
        self.membership.troubled(event.rank, event.stream, event.trouble)
        return []

    def _stopped(self, event: ctl.RankStopped, _now: float) -> list[ControlAction]:
        self.membership.stopped(event.rank, event.stream)
        return []

    def _closed(self, event: ctl.StreamClosed, now: float) -> list[ControlAction]:
        self.membership.closed(event.rank, event.stream, now)
        return []

    # --- time -------------------------------------------------------------------------------------

    def _step_clock(self, event: ctl.ClockStepped, _now: float) -> list[ControlAction]:
        self.unix_offset_s = event.unix_offset_s
        if self.leading is not None:
            self.leading.executor.unix_offset_s = event.unix_offset_s
        return []

    def _tick_waiting(self, _event: object, now: float) -> list[ControlAction]:
        actions = [*self._watch_ranks(now), *self._wait_for_ranks(now)]
        return [*actions, *self._tick_planning(now, Reason.RANKS_MISSING)]

    def _tick_recovering(self, event: object, now: float) -> list[ControlAction]:
        actions = [*self._watch_ranks(now), *self._to_wave(event, now)]
        actions += self.as_leader.recovery.tick(now)
        actions += self._wait_for_ranks(now)
        return [*actions, *self._tick_planning(now, Reason.RECOVERING)]

    def _tick_recovered(self, event: object, now: float) -> list[ControlAction]:
        executor, unix = self.as_leader.executor, now + self.unix_offset_s
        actions = [*self._watch_ranks(now), *self._to_wave(event, now)]
        actions += self.records.sweep(lambda record: executor.is_stale(record.plan, 0), unix)
        actions += self.advance_plan(now)
        return [*actions, *self._tick_planning(now)]

    def _tick_planning(self, now: float, unknown: Reason | None = None) -> list[ControlAction]:
        loop = self.as_leader.planning_loop
        return loop.tick(now, unknown=unknown, fault=self._store_fault())

    def _wait_for_ranks(self, now: float) -> list[ControlAction]:
        """R14: let the active plan wait for the recovery; a found wave reports for itself."""
        leading, record = self.as_leader, self.records.active
        if record is None or leading.executor.running:
            return []
        obstacle = leading.recovery.obstacle(now)
        return leading.executor.wait(record, obstacle.reason, obstacle.detail, now)

    def _watch_ranks(self, now: float) -> list[ControlAction]:
        """Tell the wave which ranks were lost or came back, and ask all ranks if it is time."""
        liveness = self.as_leader.liveness
        actions: list[ControlAction] = []
        for event in liveness.changes(now):
            actions += self._to_wave(event, now)
        at_rest = self.state is ControlState.READY
        return [*actions, *liveness.questions(now, at_rest=at_rest)]

    # --- planning ---------------------------------------------------------------------------------

    def _cycle_decided(self, event: ctl.CycleDecided, now: float) -> list[ControlAction]:
        actions = self.as_leader.planning_loop.take(event, now, self._store_fault())
        return [*actions, *self.advance_plan(now)]

    def _cycle_overtaken(self, event: ctl.CycleDecided, now: float) -> list[ControlAction]:
        migrating = self.state is ControlState.MIGRATING
        blocked_by = Reason.PLAN_IN_PROGRESS if migrating else Reason.RECOVERING
        return self.as_leader.planning_loop.take(event, now, blocked_by)

    def _plan_measured(self, event: ctl.PlanMeasured, now: float) -> list[ControlAction]:
        """Enter the measured gain of a plan, once."""
        record = self.records.by_id.get(event.plan_id)
        if record is None or record.phase is not PlanPhase.COMMITTED or record.delivered:
            return []
        change = self.records.measured(record, event.delivered, now + self.unix_offset_s)
        return [change, *self._stop_undelivered()]

    def _stop_undelivered(self) -> list[ControlAction]:
        """Hold automatic plans after three in a row that delivered too little."""
        loop = self.as_leader.planning_loop
        if loop.policy.mode is not Mode.AUTO or loop.hold.because is not None:
            return []
        missed = undelivered_in_a_row(self.records.by_id.values(), loop.hold.judged_from)
        if len(missed) < IN_A_ROW:
            return []
        loop.hold = replace(loop.hold, because=Reason.GAINS_NOT_DELIVERED)
        plans = ", ".join(record.plan.plan_id for record in reversed(missed))
        detail = f"less than half of the promised lower bound was delivered by plans {plans}"
        return [self.document(), ctl.Alert(Reason.GAINS_NOT_DELIVERED, detail)]

    # --- failed writes ----------------------------------------------------------------------------

    def _store_fault(self) -> Reason | None:
        return Reason.STORE_UNAVAILABLE if self.write_retry else None

    def _persist_failed(self, event: ctl.PersistFailed, _now: float) -> list[ControlAction]:
        """Keep the writes for the next write or tick. No wave begins before they are stored."""
        skipped = self.write_retry.failed(event.failed, self._current)
        if self.coordinator is not None:
            self.coordinator.peers.not_sent(skipped)
        return []

    def _current(self, action: PersistAction) -> PersistAction | None:
        """Return what is to be written now in place of a failed write; None if it is outdated."""
        if isinstance(action, ctl.PersistPlan):
            plan_id = action.record.plan.plan_id
            return ctl.PersistPlan(self.records.by_id.get(plan_id, action.record))
        if isinstance(action, ctl.PersistEpoch):
            group, generation = self.group, self.generation
            if group is None or generation is None:
                return action  # The group may come back where it was: the next round tells.
            is_current = (action.epoch, action.placement) == (group.epoch, group.placement)
            return replace(action, generation=generation) if is_current else None
        if isinstance(action, ctl.PersistDocument) and action.name == self.document().name:
            return self.document()
        return action
