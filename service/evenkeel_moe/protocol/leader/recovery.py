"""The recovery of a new leader, before it plans (R12, R15).

It asks all ranks for their state, ends waves found on them, and brings the records up to date.
"""

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.protocol.control_messages import (
    Alert,
    ControlAction,
    PersistEpoch,
    SendToRank,
    WaveEnded,
)
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.plan_validation import placement_at
from evenkeel_moe.protocol.leader.query_round import Disagreement, GroupState, QueryRound
from evenkeel_moe.protocol.messages import QueryState, RankState


class Recovery:
    """Rounds of questions to all ranks, until all agree on one state and none holds a wave.

    Args:
        executor: ends the waves found on the ranks; its records and group state are updated.
    """

    def __init__(self, executor: PlanExecutor) -> None:
        self.executor = executor
        self.timing = executor.timing
        self.round: QueryRound | None = None
        """The round under way; None while a found wave is ended, and when the recovery is over."""
        self.query = 0
        """The newest query number used under this term, heartbeats included."""
        self.settled_query = 0
        """Answers to this and later queries were given after the group was last seen at rest."""
        self.over = True
        """True if all ranks have answered and agree; False from `begin` on."""
        self.disagreement: Disagreement | None = None
        self._began_at = 0.0
        self._alerted: Reason | None = None

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[ControlAction]:
        """Begin a new round of questions to all ranks."""
        if self.over:
            self._began_at, self._alerted = now, None
        self.over = False
        self.disagreement = None
        self.query += 1
        members = self.executor.membership.members
        reloaded = any(member.checksums_digest is None for member in members.values())
        self.round = QueryRound(self.query, frozenset(members), all_checksums=reloaded)
        return self._ask(now)

    def tick(self, now: float) -> list[ControlAction]:
        """Repeat questions, begin a new round after a disagreement, alert after the deadline."""
        current = self.round
        actions: list[ControlAction] = []
        if current is not None and current.repeat_at is not None:
            if now >= current.repeat_at:
                disagreement = self.disagreement
                actions += self.begin(now)
                self.disagreement = disagreement
        elif current is not None and now >= current.resend_at:
            self.disagreement = None  # Of the round before; this one waits for answers.
            actions += self._ask(now)
        if current is not None and now - self._began_at >= self.timing.recovery_deadline_s:
            actions += self._alert(self.disagreement or self._no_answer(current))
        return actions

    def obstacle(self, now: float) -> Disagreement:
        """Return the reason why the recovery is not over, or has not begun."""
        quorum = self.executor.membership.quorum(now)
        if quorum.reason is Reason.RANKS_MISSING:
            return Disagreement(quorum.reason, quorum.detail)
        return self.disagreement or self._no_answer(self.round)

    def _no_answer(self, current: QueryRound | None) -> Disagreement:
        missing = list(current.missing) if current is not None else []
        return Disagreement(Reason.RECOVERY_DEADLINE, f"no answer from ranks {missing}")

    def question(self, rank: EpRank) -> SendToRank | None:
        """Return the round's question for a rank; None if the rank has answered it."""
        current = self.round
        member = self.executor.membership.members.get(rank)
        if current is None or member is None or rank in current.answers:
            return None
        is_witness = rank == current.witness
        question = QueryState(
            self.executor.leader,
            want_placement=is_witness,
            want_checksums=is_witness or current.all_checksums,
            query=current.query,
        )
        return SendToRank(rank, member.stream, question)

    def _ask(self, now: float) -> list[ControlAction]:
        assert self.round is not None
        self.round.resend_at = now + self.timing.wave.resend_s
        questions = (self.question(rank) for rank in self.round.missing)
        return [question for question in questions if question is not None]

    def answer(self, state: RankState, now: float) -> list[ControlAction]:
        """Take one rank's answer; the last answer ends the round."""
        current = self.round
        if current is None or current.repeat_at is not None:
            return []
        if not current.all_checksums and self._has_reloaded(state):
            return self.begin(now)  # R4: its Hello told the checksums of other weights.
        current.take(state)
        if not current.complete:
            return []  # R15: no plan before all R ranks of the generation have answered.
        wave = current.held_wave()
        if wave is not None:
            self.round = None
            self.query += 1
            return self.executor.recover(wave, self.query, now)
        group = current.group_state()
        if isinstance(group, Disagreement):
            current.repeat_at = now + self.timing.ask_again_s
            self.disagreement = group
            return self._alert(group)
        self.round, self.over = None, True
        self.settled_query = self.query + 1
        return [*self._bring_up(group), *self._reconcile_all(current, now)]

    def _has_reloaded(self, state: RankState) -> bool:
        member = self.executor.membership.members.get(state.identity.rank)
        return member is not None and member.checksums_digest is None

    # --- records ----------------------------------------------------------------------------------

    def _bring_up(self, group: GroupState) -> list[ControlAction]:
        """R12, R15: take the state the ranks report; the stored one is only a hint.

        Recorded epochs above the group's belong to another history. All do if the group is neither
        at a recorded placement nor one epoch ahead: at most one wave commits before its record.
        """
        executor, known = self.executor, self.executor.history
        generation = executor.membership.generation
        assert generation is not None
        executor.group = group
        executor.weights_changed = False
        newest = max(known, default=group.epoch)
        is_recorded = known.get(group.epoch) == group.placement
        if is_recorded and newest == group.epoch:
            return []
        begins = bool(known) and not is_recorded and group.epoch != newest + 1
        earlier = {} if begins else {e: map_ for e, map_ in known.items() if e < group.epoch}
        executor.history = {**earlier, group.epoch: group.placement}
        return [PersistEpoch(generation, group.epoch, group.placement, begins)]

    def end_old_plans(self, now: float) -> list[ControlAction]:
        """R1: end the plans of an earlier generation; their waves ended with its ranks.

        Nothing is known of the new group until its ranks have told where they stand (R15).
        """
        executor, records = self.executor, self.executor.records
        last, executor.coordinator = executor.coordinator, None
        executor.group, executor.staged = None, {}
        dropped = last.wave if last is not None and last.is_dropped else None
        unix = now + executor.unix_offset_s
        detail = f"the group restarted as {executor.membership.generation}"
        actions: list[ControlAction] = []
        for record in records.open:
            if not executor.is_of_other_generation(record.plan):
                continue
            if record.plan.key(record.waves_committed) != dropped:
                actions += self._count_swapped(record, unix)
            record = records.get(record.plan.plan_id)
            ended = records.complete(record, unix) or records.end(
                record, Reason.GENERATION_CHANGED, unix, detail
            )
            actions.append(ended)
        return actions

    def _count_swapped(self, record: PlanRecord, unix: float) -> list[ControlAction]:
        """Count a wave that all ranks swapped, and none lived to acknowledge (R12).

        It is known from the epoch and placement at which the group comes up again. Another group of
        the same name may have both by another plan, so it is asked only for a wave on which all
        ranks agreed, and that was not dropped.
        """
        if not record.wave_agreed:
            return []
        plan, waves, records = record.plan, record.waves_committed + 1, self.executor.records
        hellos = [member.hello for member in self.executor.membership.members.values()]
        found = {(hello.epoch, hello.placement_digest) for hello in hellos}
        epoch = plan.base_epoch + waves
        if found != {(epoch, placement_at(plan, waves).digest)}:
            return []
        detail = f"the ranks came back at epoch {epoch}"
        return [
            records.change(record, "wave_committed", unix, waves_committed=waves, detail=detail),
            WaveEnded(plan.key(waves - 1), True, Reason.COMMITTED),
        ]

    def _reconcile_all(self, answered: QueryRound, now: float) -> list[ControlAction]:
        """R4: end the plans of other weights; compare accepted ones with the state of the group."""
        records, unix = self.executor.records, now + self.executor.unix_offset_s
        actions: list[ControlAction] = []
        active = records.active
        for record in records.open:
            if self.executor.is_of_other_weights(record.plan):
                actions.append(records.end(record, Reason.WEIGHTS_VERSION_CHANGED, unix))
            elif record.phase is not PlanPhase.PROPOSED:
                actions += self._reconcile(record, record is active, answered, unix)
        return actions

    def _reconcile(
        self, record: PlanRecord, newest: bool, answered: QueryRound, unix: float
    ) -> list[ControlAction]:
        executor, records, plan = self.executor, self.executor.records, record.plan
        group = executor.group
        assert group is not None
        waves = group.epoch - plan.base_epoch
        detail = f"the group is at epoch {group.epoch}"
        # Another plan's wave, or the engine itself, may have led to the same epoch and map.
        if (
            not newest
            or not 0 <= waves <= len(plan.waves)
            or placement_at(plan, waves).digest != group.placement.digest
            or (waves > record.waves_committed and not answered.may_follow(plan.key(waves - 1)))
        ):
            return [records.end(record, Reason.STALE_BASE, unix, detail)]
        actions: list[ControlAction] = []
        if waves != record.waves_committed:
            detail = f"epoch {group.epoch}"
            found = range(record.waves_committed, waves)
            change = records.change(record, "recovered", unix, waves_committed=waves, detail=detail)
            actions += [change, *(WaveEnded(plan.key(i), True, Reason.COMMITTED) for i in found)]
            record = change.record
        if plan.key(waves) in executor.aborted_found:
            return [*actions, records.end(record, Reason.WAVE_DROPPED, unix, "ended by a recovery")]
        return [*actions, *executor.settle(record, unix)]

    def _alert(self, obstacle: Disagreement) -> list[ControlAction]:
        """Raise an alert, once for each reason in a recovery."""
        if self._alerted is obstacle.reason:
            return []
        self._alerted = obstacle.reason
        return [Alert(obstacle.reason, obstacle.detail)]
