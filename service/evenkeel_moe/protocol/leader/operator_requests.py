"""The requests an operator may make of a deployment, and the reasons to refuse them.

A request either raises and has changed nothing, or returns the actions for the shell. One that
returned may be repeated.
"""

from dataclasses import replace

from evenkeel_moe.errors import Conflict, Reason
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import ControlAction
from evenkeel_moe.protocol.leader.plan_moves import PlanMoves


class OperatorRequests(PlanMoves):
    """The handlers of operators' requests.

    The table refuses requests with Unavailable (NOT_LEADER) unless this replica leads the
    deployment, and those that make or start plans also (RECOVERING, RANKS_MISSING) until all ranks
    have answered.
    """

    # --- plans ------------------------------------------------------------------------------------

    def _submit(self, event: ctl.PlanSubmitted, now: float) -> list[ControlAction]:
        """Enter a plan made by hand or for a rollback. A rollback holds `auto` mode.

        Raises:
            Conflict: ID_REUSED, as `check_plan`, and with `approve` OBSERVE_MODE, OBSERVE_ONLY,
                SEPARATE_APPROVAL, LIMIT_EXCEEDED, PLAN_IN_PROGRESS, FROZEN or OUTSIDE_SCHEDULE.
            InfeasiblePlan: the plan breaks an invariant (R17).
        """
        leading, records, plan, by = self.as_leader, self.records, event.plan, event.by
        if records.same_request(plan.plan_id, event.request_digest) is not None:
            return []
        self.check_plan(plan)
        if event.approve:
            self._require_another_approver(plan, by, by)
            self._require_within_limits(plan, event.bounded)
            self.require_free(plan.kind, now)
        actions: list[ControlAction] = []
        loop = leading.planning_loop
        if plan.kind is PlanKind.ROLLBACK and loop.hold.because is None:
            loop.hold = replace(loop.hold, because=Reason.HELD_AFTER_ROLLBACK)
            # Before the plan: a rollback stored without its hold could be undone by `auto`.
            actions.append(self.document())
        phase = PlanPhase.APPROVED if event.approve else PlanPhase.PROPOSED
        unix, digest = now + self.unix_offset_s, event.request_digest
        actions.append(records.add(plan, phase, plan.reason, unix, digest=digest, by=by))
        actions += records.drop_excess(unix)
        return [*actions, *self.advance_plan(now)]

    def _repeat(self, event: ctl.RequestRepeated, _now: float) -> list[ControlAction]:
        """Let failed writes be tried again.

        Raises:
            Conflict: another request created the plan of this id.
        """
        self.records.same_request(event.plan_id, event.request_digest)
        return []

    def _approve(self, event: ctl.PlanApproved, now: float) -> list[ControlAction]:
        """Start a proposed plan.

        Raises:
            NotFound: no such plan.
            Conflict: STALE_BASE if the epoch moved (R16), WEIGHTS_VERSION_CHANGED after a reload
                (R4), EXPIRED, WRONG_PHASE, OBSERVE_MODE, OBSERVE_ONLY, SEPARATE_APPROVAL,
                LIMIT_EXCEEDED, PLAN_IN_PROGRESS, FROZEN, OUTSIDE_SCHEDULE.
        """
        plan_id, by = event.plan_id, event.by
        record = self.records.get(plan_id)
        plan, unix = record.plan, now + self.unix_offset_s
        if record.reason in (Reason.STALE_BASE, Reason.WEIGHTS_VERSION_CHANGED, Reason.EXPIRED):
            raise Conflict(f"plan {plan_id} ended: {record.error}", record.reason)
        if record.phase is not PlanPhase.PROPOSED:
            raise Conflict(f"plan {plan_id} is {record.phase_text}")
        if self.as_leader.executor.is_stale(plan, 0):
            raise Conflict(f"plan {plan_id} was made on epoch {plan.base_epoch}", Reason.STALE_BASE)
        if plan.expires_at is not None and unix >= plan.expires_at:
            raise Conflict(f"plan {plan_id} ran out at {plan.expires_at:.0f}", Reason.EXPIRED)
        self._require_another_approver(plan, record.made_by, by)
        self._require_within_limits(plan, event.bounded)
        self.require_free(plan.kind, now)
        change = self.records.change(
            record, "approved", unix, phase=PlanPhase.APPROVED, by=by, approved_by=by
        )
        return [change, *self.advance_plan(now)]

    def _cancel(self, event: ctl.PlanCancelled, now: float) -> list[ControlAction]:
        """Stop a plan: at once before all votes are in, else before its next wave (R16).

        Raises:
            NotFound: no such plan.
            Conflict: WRONG_PHASE if it has ended.
        """
        records = self.records
        record = records.get(event.plan_id)
        if record.phase.terminal:
            raise Conflict(f"plan {event.plan_id} is {record.phase_text}")
        unix = now + self.unix_offset_s
        if record.cancel_requested:
            return []
        change = records.change(
            record, "cancel_requested", unix, by=event.by, cancel_requested=True
        )
        record = change.record
        if self.as_leader.executor.runs(record):
            return [change, *self._to_wave(ctl.CancelWave(Reason.CANCELLED), now)]
        if record.phase is PlanPhase.PROPOSED or self.recovered:
            ended = records.end(record, Reason.CANCELLED, unix)
            return [change, ended, *self.advance_plan(now)]
        return [change]

    # --- settings ---------------------------------------------------------------------------------

    def _retire(self, event: ctl.RanksRetired, now: float) -> list[ControlAction]:
        """Let ranks retire, and start their evacuation.

        Raises:
            Conflict: RESIZING if other ranks retire already, STALE_BASE if the group has another
                number of ranks or another placement; else as `_submit` and `require_free`.
            InfeasiblePlan: as `_submit`.
        """
        loop = self.as_leader.planning_loop
        before = loop.hold.retiring
        if before is not None and before != event.retiring:
            raise Conflict(
                f"ranks {list(before.ranks)} retire already: wait until they have left, or"
                f" `evenkeel resume -d {self.deployment}`",
                Reason.RESIZING,
            )
        shape = self.membership.shape
        assert shape is not None
        if shape.num_ranks != event.retiring.num_ranks:
            raise Conflict(
                f"the group has {shape.num_ranks} ranks, not {event.retiring.num_ranks}",
                Reason.STALE_BASE,
            )
        actions: list[ControlAction] = []
        if event.evacuation is None:
            if event.base != self.placement:
                words = "the placement has changed: an expert may live on these ranks alone"
                raise Conflict(words, Reason.STALE_BASE)
            self.require_free(PlanKind.EVACUATION, now)
        else:
            actions = self._submit(event.evacuation, now)
        loop.hold = replace(loop.hold, retiring=event.retiring)
        return [self.document(), *actions]

    def _end_retirement(self) -> list[ControlAction]:
        """End a retirement of ranks once the group has another number of ranks."""
        loop, shape = self.as_leader.planning_loop, self.membership.shape
        retiring = loop.hold.retiring
        if retiring is None or shape is None or shape.num_ranks == retiring.num_ranks:
            return []
        loop.hold = replace(loop.hold, retiring=None)
        return [self.document()]

    def _set_policy(self, event: ctl.PolicySet, now: float) -> list[ControlAction]:
        """Use this policy from the next cycle on.

        A policy that is locked in mode observe cancels the plan that runs.
        """
        self.policy = self.as_leader.planning_loop.policy = event.policy
        actions: list[ControlAction] = [ctl.PersistDocument("policy", event.document)]
        active = self.records.active
        if event.policy.locked and active is not None:
            actions += self._cancel(ctl.PlanCancelled(active.plan.plan_id, "observe_lock"), now)
        return actions

    def _freeze(self, event: ctl.PlansFrozen, now: float) -> list[ControlAction]:
        until = now + self.unix_offset_s + event.seconds
        self.as_leader.planning_loop.frozen_until = until if event.seconds > 0 else 0.0
        return [self.document()]

    def _resume(self, _event: object, now: float) -> list[ControlAction]:
        """Let plans begin again: end a freeze, a retirement, and the hold on automatic plans."""
        loop = self.as_leader.planning_loop
        because = loop.hold.because
        if because is None and not loop.frozen_until and loop.hold.retiring is None:
            return []  # A repeated request: its caller may have missed the first answer.
        loop.frozen_until = 0.0
        if because is not None or loop.hold.retiring is not None:
            stopped = because is Reason.GAINS_NOT_DELIVERED
            since = now + self.unix_offset_s if stopped else loop.hold.judged_from
            loop.hold = Hold(None, since)
        return [self.document()]

    # --- preconditions ----------------------------------------------------------------------------

    def _require_another_approver(self, plan: Plan, maker: str | None, approver: str) -> None:
        """Refuse a plan by hand that its maker approves, or whose maker is not known."""
        if not self.policy.separate_approval or plan.kind is not PlanKind.MANUAL:
            return
        if maker is None or maker == approver:
            raise Conflict(
                f"plan {plan.plan_id} was made by {maker or 'an unknown token'}, and with"
                f" separate_approval another token than its maker's must approve it",
                Reason.SEPARATE_APPROVAL,
            )

    def _require_within_limits(self, plan: Plan, bounded: bool) -> None:
        """Refuse a plan beyond the limits in force, which may be lower than when it was made."""
        words = self.policy.limits.exceeded(plan.waves, plan.target.slots_per_rank)
        if bounded and words is not None:
            raise Conflict(
                f"plan {plan.plan_id} {words}; role admin may exceed it", Reason.LIMIT_EXCEEDED
            )
