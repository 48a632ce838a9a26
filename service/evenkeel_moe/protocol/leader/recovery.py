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
from evenkeel_moe.protocol.leader.plan_executor import Migration
from evenkeel_moe.protocol.leader.plan_validation import placement_at
from evenkeel_moe.protocol.leader.state_query import Disagreement, Fleet, Survey
from evenkeel_moe.protocol.messages import QueryState, RankState

__all__ = ["Recovery"]


class Recovery:
    """Rounds of questions to all ranks until they make one fleet that holds no wave.

    Args:
        migration: where waves found on the ranks are ended, and whose records are brought up.
        again_s: wait before asking anew after the ranks disagreed; deadline_s: then it alerts.
    """

    def __init__(self, migration: Migration, *, again_s: float, deadline_s: float) -> None:
        self.migration = migration
        self.again_s = again_s
        self.deadline_s = deadline_s
        self.survey: Survey | None = None
        """The round under way; None while a found wave is being ended, and when there is nothing to ask."""
        self.query = 0
        """Newest query number used under this term, heartbeats included."""
        self.settled_query = 0
        """Answers to this query and later ones were given after the fleet was last known to be at rest."""
        self.over = True
        """All ranks answered and agree; false from `begin` on."""
        self.disagreement: Disagreement | None = None
        self._began_at = 0.0
        self._alerted: Reason | None = None

    # --- predicates: one rule each ----------------------------------------------------------------

    def all_answered(self, survey: Survey) -> bool:
        """R15: no plan before all R ranks of the generation answered."""
        return not survey.missing

    def word_of_ranks(self, fleet: Fleet) -> Fleet:
        """R12, R15: the ranks are the truth about epoch and map; the store is a hint."""
        return fleet

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[ControlAction]:
        """Ask all ranks anew, whatever was under way."""
        if self.over:
            self._began_at, self._alerted = now, None
        self.over = False
        self.disagreement = None
        self.query += 1
        self.survey = Survey(self.query, frozenset(self.migration.membership.members))
        return self._ask(now)

    def tick(self, now: float) -> list[ControlAction]:
        """Resend questions, ask anew after a disagreement, and say so when it takes long."""
        survey = self.survey
        actions: list[ControlAction] = []
        if survey is not None and survey.again_at is not None:
            if now >= survey.again_at:
                disagreement = self.disagreement
                actions += self.begin(now)
                self.disagreement = disagreement
        elif survey is not None and now >= survey.resend_at:
            actions += self._ask(now)
        if not self.over and now - self._began_at >= self.deadline_s:
            missing = list(survey.missing) if survey is not None else []
            actions += self._alert(Reason.RECOVERY_DEADLINE, f"no answer from ranks {missing}")
        return actions

    def obstacle(self, now: float) -> Disagreement:
        """Why it is not over yet, or has not begun."""
        quorum = self.migration.membership.quorum(now)
        if quorum.reason is Reason.RANKS_MISSING:
            return Disagreement(quorum.reason, quorum.detail)
        if self.disagreement is not None:
            return self.disagreement
        missing = list(self.survey.missing) if self.survey is not None else []
        return Disagreement(Reason.RECOVERY_DEADLINE, f"no answer from ranks {missing}")

    def question(self, rank: EpRank) -> SendToRank | None:
        """The survey's question again, for a rank that has a new stream; None if it has answered."""
        survey = self.survey
        member = self.migration.membership.members.get(rank)
        if survey is None or member is None or rank not in survey.missing:
            return None
        query = QueryState(
            self.migration.leader, want_placement=True, want_checksums=True, query=survey.query
        )
        return SendToRank(rank, member.stream, query)

    def _ask(self, now: float) -> list[ControlAction]:
        assert self.survey is not None
        self.survey.resend_at = now + self.migration.timing.resend_s
        questions = (self.question(rank) for rank in self.survey.missing)
        return [question for question in questions if question is not None]

    def answer(self, state: RankState, now: float) -> list[ControlAction]:
        """Take one rank's answer; the last one ends the round."""
        survey = self.survey
        if survey is None or survey.again_at is not None:
            return []
        survey.take(state)
        if not survey.answers or not self.all_answered(survey):
            return []
        wave = survey.held_wave()
        if wave is not None:
            self.survey = None
            self.query += 1
            return self.migration.recover(wave, self.query, now)
        fleet = survey.fleet()
        if isinstance(fleet, Disagreement):
            survey.again_at = now + self.again_s
            self.disagreement = fleet
            return self._alert(fleet.reason, fleet.detail)
        self.survey, self.over = None, True
        self.settled_query = self.query + 1
        return [*self._bring_up(self.word_of_ranks(fleet)), *self._reconcile(now)]

    def after_wave(self, now: float) -> list[ControlAction]:
        """A found wave may have ended: ask all ranks again, until none holds anything."""
        if self.over or self.survey is not None or self.migration.running:
            return []
        return self.begin(now)

    # --- records ----------------------------------------------------------------------------------

    def _bring_up(self, fleet: Fleet) -> list[ControlAction]:
        """Records follow the ranks; history above their epoch belongs to a life that is gone."""
        migration, known = self.migration, self.migration.history
        generation = migration.membership.generation
        assert generation is not None
        migration.fleet = fleet
        migration.weights_moved = False
        if known.get(fleet.epoch) == fleet.placement and max(known) == fleet.epoch:
            return []
        migration.history = {
            epoch: placement for epoch, placement in known.items() if epoch < fleet.epoch
        }
        migration.history[fleet.epoch] = fleet.placement
        return [PersistEpoch(generation, fleet.epoch, fleet.placement)]

    def end_old_plans(self, now: float) -> list[ControlAction]:
        """R1: plans of an earlier generation end; what is left of their waves died with it."""
        migration, book = self.migration, self.migration.book
        migration.coordinator = None
        unix = now + migration.unix_offset_s
        detail = f"the group restarted as {migration.membership.generation}"
        actions: list[ControlAction] = []
        for record in book.open:
            if not migration.is_of_other_generation(record.plan):
                continue
            actions += self._count_swapped(record, unix)
            record = book.get(record.plan.plan_id)
            ended = book.complete(record, unix) or book.end(
                record, Reason.GENERATION_CHANGED, unix, detail
            )
            actions.append(ended)
        return actions

    def _count_swapped(self, record: PlanRecord, unix: float) -> list[ControlAction]:
        """Waves that no rank lived to acknowledge: a group that comes up where they lead has swapped them (R12)."""
        plan, book = record.plan, self.migration.book
        hellos = [member.hello for member in self.migration.membership.members.values()]
        stands = {(hello.epoch, hello.placement_digest) for hello in hellos}
        waves = hellos[0].epoch - plan.base_epoch
        unheard = book.has_begun(record) and record.waves_committed < waves <= len(plan.waves)
        if not unheard or stands != {(hellos[0].epoch, placement_at(plan, waves).digest)}:
            return []
        detail = f"the ranks came back at epoch {hellos[0].epoch}"
        return [
            book.change(record, "wave_committed", unix, waves_committed=waves, detail=detail),
            *(
                PersistOutcome(plan.key(index), True, Reason.COMMITTED)
                for index in range(record.waves_committed, waves)
            ),
        ]

    def _reconcile(self, now: float) -> list[ControlAction]:
        """Hold every open plan against where the fleet is."""
        book, actions, active = self.migration.book, [], self.migration.book.active
        for record in book.open:
            if record.phase is PlanPhase.PROPOSED:
                continue
            actions += self._reconcile_one(
                record, record is active, now + self.migration.unix_offset_s
            )
        return actions

    def _reconcile_one(self, record: PlanRecord, newest: bool, unix: float) -> list[ControlAction]:
        migration, book, plan = self.migration, self.migration.book, record.plan
        fleet = migration.fleet
        assert fleet is not None
        if plan.weights_version != fleet.weights_version:
            return [book.end(record, Reason.WEIGHTS_VERSION_CHANGED, unix)]
        waves = fleet.epoch - plan.base_epoch
        if (
            not newest
            or not 0 <= waves <= len(plan.waves)
            or placement_at(plan, waves).digest != fleet.placement.digest
        ):
            return [
                book.end(record, Reason.STALE_BASE, unix, f"the fleet is at epoch {fleet.epoch}")
            ]
        actions: list[ControlAction] = []
        if waves != record.waves_committed:
            change = book.change(
                record, "recovered", unix, waves_committed=waves, detail=f"epoch {fleet.epoch}"
            )
            actions.append(change)
            record = change.record
        if waves < len(plan.waves) and plan.key(waves) in migration.found_gone:
            return [*actions, book.end(record, Reason.WAVE_DROPPED, unix, "ended by a recovery")]
        return [*actions, *migration.settle(record, unix)]

    def _alert(self, reason: Reason, detail: str) -> list[ControlAction]:
        """Once per reason and recovery."""
        if self._alerted is reason:
            return []
        self._alerted = reason
        return [Alert(reason, detail)]
