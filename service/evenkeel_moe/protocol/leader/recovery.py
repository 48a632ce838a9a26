"""What a leader does before it plans: ask all ranks, end waves found on them, bring records up (R12, R15)."""

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.protocol.control_messages import (
    Alert,
    ControlAction,
    PersistEpoch,
    PersistOutcome,
    SendToRank,
)
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.plan_validation import placement_at
from evenkeel_moe.protocol.leader.query_round import Disagreement, GroupState, QueryRound
from evenkeel_moe.protocol.messages import QueryState, RankState

__all__ = ["Recovery"]


class Recovery:
    """Rounds of questions to all ranks until they make one group that holds no wave.

    Args:
        executor: where waves found on the ranks are ended, and whose records are brought up.
        again_s: wait before asking anew after the ranks disagreed; deadline_s: then it alerts.
    """

    def __init__(self, executor: PlanExecutor, *, again_s: float, deadline_s: float) -> None:
        self.executor = executor
        self.again_s = again_s
        self.deadline_s = deadline_s
        self.round: QueryRound | None = None
        """The round under way; None while a found wave is being ended, and when there is nothing to ask."""
        self.query = 0
        """Newest query number used under this term, heartbeats included."""
        self.settled_query = 0
        """Answers to this query and later ones were given after the group was last known to be at rest."""
        self.over = True
        """All ranks answered and agree; false from `begin` on."""
        self.disagreement: Disagreement | None = None
        self._began_at = 0.0
        self._alerted: Reason | None = None

    # --- predicates: one rule each ----------------------------------------------------------------

    def all_answered(self, round: QueryRound) -> bool:
        """R15: no plan before all R ranks of the generation answered."""
        return not round.missing

    def word_of_ranks(self, group: GroupState) -> GroupState:
        """R12, R15: the ranks are the truth about epoch and map; the store is a hint."""
        return group

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[ControlAction]:
        """Ask all ranks anew, whatever was under way."""
        if self.over:
            self._began_at, self._alerted = now, None
        self.over = False
        self.disagreement = None
        self.query += 1
        self.round = QueryRound(self.query, frozenset(self.executor.membership.members))
        return self._ask(now)

    def tick(self, now: float) -> list[ControlAction]:
        """Resend questions, ask anew after a disagreement, and say so when it takes long."""
        round = self.round
        actions: list[ControlAction] = []
        if round is not None and round.again_at is not None:
            if now >= round.again_at:
                disagreement = self.disagreement
                actions += self.begin(now)
                self.disagreement = disagreement
        elif round is not None and now >= round.resend_at:
            actions += self._ask(now)
        if not self.over and now - self._began_at >= self.deadline_s:
            missing = list(round.missing) if round is not None else []
            actions += self._alert(Reason.RECOVERY_DEADLINE, f"no answer from ranks {missing}")
        return actions

    def obstacle(self, now: float) -> Disagreement:
        """Why it is not over yet, or has not begun."""
        quorum = self.executor.membership.quorum(now)
        if quorum.reason is Reason.RANKS_MISSING:
            return Disagreement(quorum.reason, quorum.detail)
        if self.disagreement is not None:
            return self.disagreement
        missing = list(self.round.missing) if self.round is not None else []
        return Disagreement(Reason.RECOVERY_DEADLINE, f"no answer from ranks {missing}")

    def question(self, rank: EpRank) -> SendToRank | None:
        """The round's question again, for a rank that has a new stream; None if it has answered."""
        round = self.round
        member = self.executor.membership.members.get(rank)
        if round is None or member is None or rank not in round.missing:
            return None
        query = QueryState(
            self.executor.leader, want_placement=True, want_checksums=True, query=round.query
        )
        return SendToRank(rank, member.stream, query)

    def _ask(self, now: float) -> list[ControlAction]:
        assert self.round is not None
        self.round.resend_at = now + self.executor.timing.resend_s
        questions = (self.question(rank) for rank in self.round.missing)
        return [question for question in questions if question is not None]

    def answer(self, state: RankState, now: float) -> list[ControlAction]:
        """Take one rank's answer; the last one ends the round."""
        round = self.round
        if round is None or round.again_at is not None:
            return []
        round.take(state)
        if not round.answers or not self.all_answered(round):
            return []
        wave = round.held_wave()
        if wave is not None:
            self.round = None
            self.query += 1
            return self.executor.recover(wave, self.query, now)
        group = round.group()
        if isinstance(group, Disagreement):
            round.again_at = now + self.again_s
            self.disagreement = group
            return self._alert(group.reason, group.detail)
        self.round, self.over = None, True
        self.settled_query = self.query + 1
        return [*self._bring_up(self.word_of_ranks(group)), *self._reconcile(now)]

    def after_wave(self, now: float) -> list[ControlAction]:
        """A found wave may have ended: ask all ranks again, until none holds anything."""
        if self.over or self.round is not None or self.executor.running:
            return []
        return self.begin(now)

    # --- records ----------------------------------------------------------------------------------

    def _bring_up(self, group: GroupState) -> list[ControlAction]:
        """Records follow the ranks; history above their epoch belongs to a life that is gone."""
        executor, known = self.executor, self.executor.history
        generation = executor.membership.generation
        assert generation is not None
        executor.group = group
        executor.weights_moved = False
        if known.get(group.epoch) == group.placement and max(known) == group.epoch:
            return []
        executor.history = {
            epoch: placement for epoch, placement in known.items() if epoch < group.epoch
        }
        executor.history[group.epoch] = group.placement
        return [PersistEpoch(generation, group.epoch, group.placement)]

    def end_old_plans(self, now: float) -> list[ControlAction]:
        """R1: plans of an earlier generation end; what is left of their waves died with it."""
        executor, records = self.executor, self.executor.records
        executor.coordinator = None
        unix = now + executor.unix_offset_s
        detail = f"the group restarted as {executor.membership.generation}"
        actions: list[ControlAction] = []
        for record in records.open:
            if not executor.is_of_other_generation(record.plan):
                continue
            actions += self._count_swapped(record, unix)
            record = records.get(record.plan.plan_id)
            ended = records.complete(record, unix) or records.end(
                record, Reason.GENERATION_CHANGED, unix, detail
            )
            actions.append(ended)
        return actions

    def _count_swapped(self, record: PlanRecord, unix: float) -> list[ControlAction]:
        """Waves that no rank lived to acknowledge: a group that comes up where they lead has swapped them (R12)."""
        plan, records = record.plan, self.executor.records
        hellos = [member.hello for member in self.executor.membership.members.values()]
        stands = {(hello.epoch, hello.placement_digest) for hello in hellos}
        waves = hellos[0].epoch - plan.base_epoch
        unheard = records.has_begun(record) and record.waves_committed < waves <= len(plan.waves)
        if not unheard or stands != {(hellos[0].epoch, placement_at(plan, waves).digest)}:
            return []
        detail = f"the ranks came back at epoch {hellos[0].epoch}"
        return [
            records.change(record, "wave_committed", unix, waves_committed=waves, detail=detail),
            *(
                PersistOutcome(plan.key(index), True, Reason.COMMITTED)
                for index in range(record.waves_committed, waves)
            ),
        ]

    def _reconcile(self, now: float) -> list[ControlAction]:
        """Hold every open plan against where the group is."""
        records, actions, active = self.executor.records, [], self.executor.records.active
        for record in records.open:
            if record.phase is PlanPhase.PROPOSED:
                continue
            actions += self._reconcile_one(
                record, record is active, now + self.executor.unix_offset_s
            )
        return actions

    def _reconcile_one(self, record: PlanRecord, newest: bool, unix: float) -> list[ControlAction]:
        executor, records, plan = self.executor, self.executor.records, record.plan
        group = executor.group
        assert group is not None
        if plan.weights_version != group.weights_version:
            return [records.end(record, Reason.WEIGHTS_VERSION_CHANGED, unix)]
        waves = group.epoch - plan.base_epoch
        if (
            not newest
            or not 0 <= waves <= len(plan.waves)
            or placement_at(plan, waves).digest != group.placement.digest
        ):
            return [
                records.end(record, Reason.STALE_BASE, unix, f"the group is at epoch {group.epoch}")
            ]
        actions: list[ControlAction] = []
        if waves != record.waves_committed:
            change = records.change(
                record, "recovered", unix, waves_committed=waves, detail=f"epoch {group.epoch}"
            )
            actions.append(change)
            record = change.record
        if waves < len(plan.waves) and plan.key(waves) in executor.found_gone:
            return [*actions, records.end(record, Reason.WAVE_DROPPED, unix, "ended by a recovery")]
        return [*actions, *executor.settle(record, unix)]

    def _alert(self, reason: Reason, detail: str) -> list[ControlAction]:
        """Once per reason and recovery."""
        if self._alerted is reason:
            return []
        self._alerted = reason
        return [Alert(reason, detail)]
