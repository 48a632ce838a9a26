"""The leader's machine of one deployment: it recovers, plans and migrates.

The table `transitions.CONTROL` decides which event may change which state. Rules R1 to R17 are in
docs/protocol.md. The shell passes events to `handle` one at a time, carries the actions out in
order (see `control_messages`) and reads the public attributes. Operators use `operator.Operator`.
"""

from dataclasses import replace

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.plan import PlanKind, PlanPhase, PlanRecord
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import ControlAction, FromRank, PersistAction
from evenkeel_moe.protocol.leader.liveness import Liveness
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.leader.rank_notes import RankNotes
from evenkeel_moe.protocol.leader.undelivered import IN_A_ROW, undelivered_in_a_row
from evenkeel_moe.protocol.messages import Hello, RankState, StagingProgress, TermRefused, Tick
from evenkeel_moe.protocol.terms import is_credible_term
from evenkeel_moe.protocol.transitions import CONTROL, IGNORED, ILLEGAL, VIOLATION, ControlState

_FLUSHING = (Tick, ctl.AutomaticPlansResumed)
"""Events after which failed writes are tried again, even if there is nothing new to write."""


class DeploymentControl(RankNotes):
    """The moves of one deployment on one controller replica."""

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> list[ControlAction]:
        """Take one event and return the actions for the shell, writes first.

        Args:
            event: `FromRank` or a local event of the table.
            now: monotonic seconds.

        Raises:
            IllegalEvent: the table forbids a local event; never raised for a rank's message.
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
        if cell is VIOLATION:
            return [ctl.Alert(Reason.MALFORMED, f"{self.state}, yet {event}")]
        if cell is ILLEGAL:
            raise IllegalEvent("control", self.state, event)
        return list(getattr(self, cell)(event, now))

    # --- leadership (R2, R13) ---------------------------------------------------------------------

    def _lead(self, event: ctl.LeaseAcquired, now: float) -> list[ControlAction]:
        stored, timing = event.stored, self.timing
        self.leader = event.leader
        self.policy = stored.policy or self.policy
        self.records.load(stored.plans)
        self.executor = self.executor_type(
            event.leader,
            self.membership,
            self.records,
            timing.wave,
            batch_deadline_s=timing.batch_deadline_s,
            max_bytes_per_s=timing.max_bytes_per_s,
            unix_offset_s=self.unix_offset_s,
        )
        self.executor.history = dict(stored.epochs)
        self.recovery = self.recovery_type(
            self.executor, again_s=timing.ask_again_s, deadline_s=timing.recovery_deadline_s
        )
        self.liveness = Liveness(self.membership, self.recovery, timing)
        self.planning_loop = PlanningLoop(
            self.executor,
            self.policy,
            since=now,
            deadline_s=timing.cycle_deadline_s,
            numbers=self._cycle_numbers,
        )
        self.planning_loop.hold = stored.hold
        self.planning_loop.frozen_until = stored.frozen_until
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
        hello, recovery, liveness = event.message, self.recovery, self.liveness
        assert isinstance(hello, Hello) and recovery is not None and liveness is not None
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
            return [*closes, *recovery.end_old_plans(now), *recovery.begin(now)]
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
        return self._to_wave(ctl.GroupProgress(self.membership.step()), now)

    def _query_answer(self, event: FromRank, now: float) -> list[ControlAction]:
        state = event.message
        assert isinstance(state, RankState) and self.recovery is not None
        actions = [*self._note_state(event, now), *self._to_wave(event, now)]
        if state.identity.generation == self.generation:
            actions += self.recovery.answer(state, now)
        return actions + self._end_recovery(now)

    def _check_state(self, event: FromRank, now: float) -> list[ControlAction]:
        """Compare a rank's answer to a heartbeat with the recorded state of the group."""
        state, executor, recovery, group = event.message, self.executor, self.recovery, self.group
        assert isinstance(state, RankState) and executor and recovery and group
        actions = [*self._note_state(event, now), *self._to_wave(event, now)]
        if state.identity.generation != self.generation:
            return actions
        if state.weights_version != group.weights_version:
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
        assert isinstance(event.message, StagingProgress) and self.executor is not None
        self.executor.progress(event.rank, event.message)
        return []

    # --- waves ------------------------------------------------------------------------------------

    def _to_wave(self, event: object, now: float) -> list[ControlAction]:
        """Pass an event to the newest wave's machine, which may have ended."""
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
        """The wave has ended on all ranks: ask all ranks again, or go on with the plan.

        If a rank refused the wave as stale, or swapped to another map, plans on the recorded epoch
        would all end in the same way.
        """
        assert self.executor is not None and self.recovery is not None
        if self.state is not ControlState.RECOVERING and not self.executor.found_stale:
            return self.advance_plan(now)
        self.state = ControlState.RECOVERING
        return self.recovery.begin(now)

    def advance_plan(self, now: float) -> list[ControlAction]:
        """Begin the active plan's next wave if none runs; READY if there is no active plan."""
        executor, record = self.executor, self.records.active
        if self.state not in (ControlState.READY, ControlState.MIGRATING):
            return []
        assert executor is not None
        if executor.running:
            return []
        actions: list[ControlAction] = []
        if record is not None and not executor.weights_changed:
            closed = self._closed_for(record, now)
            if closed is None:
                actions = executor.begin_wave(record, now, may_persist=not self.write_retry)
            else:
                actions = executor.wait(record, closed, "accepted before, and not begun yet", now)
        active = self.records.active is not None
        self.state = ControlState.MIGRATING if active else ControlState.READY
        return actions

    def _closed_for(self, record: PlanRecord, now: float) -> Reason | None:
        """Return the reason if a freeze or the schedule stops a plan.

        They do not stop a rollback, nor a plan that has begun.
        """
        assert self.planning_loop is not None
        if record.plan.kind is PlanKind.ROLLBACK or self.records.has_begun(record):
            return None
        return self.planning_loop.closed(now)

    def _end_recovery(self, now: float) -> list[ControlAction]:
        """Leave RECOVERING if the recovery is over."""
        assert self.recovery is not None
        if not self.recovery.over:
            return []
        self.state = ControlState.READY
        return self.advance_plan(now)

    # --- requests of operators --------------------------------------------------------------------

    def _set_policy(self, event: ctl.PolicySet, _now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        self.policy = self.planning_loop.policy = event.policy
        return [ctl.PersistDocument("policy", event.document)]

    def _freeze(self, event: ctl.PlansFrozen, _now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        self.planning_loop.frozen_until = event.until
        return [self.document()]

    def _resume(self, _event: object, now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        hold = self.planning_loop.hold
        if hold.because is None and not self.frozen_until:
            return []  # A repeated request: its caller may have missed the first answer.
        self.planning_loop.frozen_until = 0.0
        if hold.because is not None:
            stopped = hold.because is Reason.GAINS_NOT_DELIVERED
            since = now + self.unix_offset_s if stopped else hold.judged_from
            self.planning_loop.hold = Hold(None, since)
        return [self.document()]

    # --- time -------------------------------------------------------------------------------------

    def _step_clock(self, event: ctl.ClockStepped, _now: float) -> list[ControlAction]:
        self.unix_offset_s = event.unix_offset_s
        if self.executor is not None:
            self.executor.unix_offset_s = event.unix_offset_s
        return []

    def _tick_waiting(self, _event: object, now: float) -> list[ControlAction]:
        actions = [*self._watch_ranks(now), *self._wait_for_ranks(now)]
        return [*actions, *self._tick_planning(now, Reason.RANKS_MISSING)]

    def _tick_recovering(self, event: object, now: float) -> list[ControlAction]:
        assert self.recovery is not None
        actions = [*self._watch_ranks(now), *self._to_wave(event, now), *self.recovery.tick(now)]
        actions += self._wait_for_ranks(now)
        return [*actions, *self._tick_planning(now, Reason.RECOVERING)]

    def _tick_recovered(self, event: object, now: float) -> list[ControlAction]:
        executor, unix = self.executor, now + self.unix_offset_s
        assert executor is not None
        actions = [*self._watch_ranks(now), *self._to_wave(event, now)]
        actions += self.records.sweep(lambda record: executor.is_stale(record.plan, 0), unix)
        actions += self.advance_plan(now)
        return [*actions, *self._tick_planning(now, self._store_fault())]

    def _tick_planning(self, now: float, blocked_by: Reason | None) -> list[ControlAction]:
        assert self.planning_loop is not None
        return self.planning_loop.tick(now, blocked_by)

    def _wait_for_ranks(self, now: float) -> list[ControlAction]:
        """R14: let the active plan wait for the recovery; a found wave reports for itself."""
        executor, recovery, record = self.executor, self.recovery, self.records.active
        assert executor is not None and recovery is not None
        if record is None or executor.running:
            return []
        obstacle = recovery.obstacle(now)
        return executor.wait(record, obstacle.reason, obstacle.detail, now)

    def _watch_ranks(self, now: float) -> list[ControlAction]:
        """Tell the wave which ranks were lost or came back, and ask all ranks if it is time."""
        assert self.liveness is not None
        actions: list[ControlAction] = []
        for event in self.liveness.changes(now):
            actions += self._to_wave(event, now)
        at_rest = self.state is ControlState.READY
        return [*actions, *self.liveness.questions(now, at_rest=at_rest)]

    # --- planning ---------------------------------------------------------------------------------

    def _cycle_decided(self, event: ctl.CycleDecided, now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        actions = self.planning_loop.take(event, now, self._store_fault())
        return [*actions, *self.advance_plan(now)]

    def _cycle_overtaken(self, event: ctl.CycleDecided, now: float) -> list[ControlAction]:
        assert self.planning_loop is not None
        migrating = self.state is ControlState.MIGRATING
        blocked_by = Reason.PLAN_IN_PROGRESS if migrating else Reason.RECOVERING
        return self.planning_loop.take(event, now, blocked_by)

    def _plan_measured(self, event: ctl.PlanMeasured, now: float) -> list[ControlAction]:
        """Enter the measured gain of a plan, once."""
        record = self.records.by_id.get(event.plan_id)
        if record is None or record.phase is not PlanPhase.COMMITTED or record.delivered:
            return []
        change = self.records.measured(record, event.delivered, now + self.unix_offset_s)
        return [change, *self._stop_undelivered()]

    def _stop_undelivered(self) -> list[ControlAction]:
        """Hold automatic plans after three in a row that delivered too little."""
        loop = self.planning_loop
        assert loop is not None
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
            is_current = action.generation == self.generation and action.epoch == self.epoch
            return action if is_current else None
        if isinstance(action, ctl.PersistDocument) and action.name == self.document().name:
            return self.document()
        return action
