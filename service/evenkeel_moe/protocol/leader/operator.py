"""The requests an operator may make of a deployment, and the reasons to refuse them.

A method either raises and has changed nothing, or returns the actions for the shell, as
`DeploymentControl.handle` does. A call that returned may be repeated.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evenkeel_moe.errors import Conflict, InfeasiblePlan, NotFound, Reason, Unavailable
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.quantities import duration_text
from evenkeel_moe.protocol.control_messages import (
    AutomaticPlansResumed,
    CancelWave,
    ControlAction,
    PlansFrozen,
    PolicySet,
)
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.plan_validation import placement_at
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.transitions import ControlState

_RECOVERED = (ControlState.READY, ControlState.MIGRATING)

Answer = tuple[PlanRecord, list[ControlAction]]


class Operator:
    """An operator of one deployment.

    All methods raise Unavailable (NOT_LEADER) unless this replica leads the deployment. Those that
    make or start plans also raise it (RECOVERING, RANKS_MISSING) until all ranks have answered.
    """

    def __init__(self, control: DeploymentControl) -> None:
        self.control = control

    def submit(
        self,
        plan: Plan,
        now: float,
        *,
        approve: bool = False,
        by: str = "",
        request_digest: str | None = None,
    ) -> Answer:
        """Enter a plan made by hand or for a rollback; start it at once if `approve`.

        The same id with the same digest returns the existing record. A rollback holds `auto` mode.

        Raises:
            Conflict: ID_REUSED, STALE_BASE, and with `approve` OBSERVE_MODE, OBSERVE_ONLY,
                SEPARATE_APPROVAL, PLAN_IN_PROGRESS, FROZEN or OUTSIDE_SCHEDULE.
            InfeasiblePlan: the plan breaks an invariant (R17).
        """
        _, planning_loop = self._recovered()
        records = self.control.records
        known = records.same_request(plan.plan_id, request_digest)
        if known is not None:
            return known, []
        self.check(plan)
        if approve:
            self._require_another_approver(plan, by, by)
            self._require_free(plan, now)
        phase = PlanPhase.APPROVED if approve else PlanPhase.PROPOSED
        unix = now + self.control.unix_offset_s
        actions: list[ControlAction] = [
            records.add(plan, phase, plan.reason, unix, digest=request_digest, by=by)
        ]
        actions += records.drop_excess(unix)
        if plan.kind is PlanKind.ROLLBACK and planning_loop.hold.because is None:
            hold = replace(planning_loop.hold, because=Reason.HELD_AFTER_ROLLBACK)
            planning_loop.hold = hold
            actions.append(self.control.document())
        actions += self.control.advance_plan(now)
        return records.get(plan.plan_id), self.control.write_retry.order(actions)

    def check(self, plan: Plan) -> Plan:
        """Return a plan that could be entered now.

        Raises:
            Conflict: GENERATION_CHANGED, STALE_BASE.
            InfeasiblePlan: the plan breaks an invariant (R17).
        """
        executor, _ = self._recovered()
        if executor.is_of_other_generation(plan):
            raise Conflict(f"planned for {plan.generation}", Reason.GENERATION_CHANGED)
        if executor.is_stale(plan, 0):
            raise Conflict(f"planned on epoch {plan.base_epoch}", Reason.STALE_BASE)
        refusal = executor.plan_problem(plan)
        if refusal is not None:
            raise InfeasiblePlan(refusal[1], refusal[0])
        return plan

    def repeat(
        self, plan_id: PlanId, request_digest: str
    ) -> tuple[PlanRecord | None, list[ControlAction]]:
        """Return the plan that this request created before; None if its id is new.

        Writes that failed at the first request are tried again.

        Raises:
            Conflict: another request created the plan of this id.
        """
        known = self.control.records.same_request(plan_id, request_digest)
        return known, self.control.write_retry.order([], flush=known is not None)

    def approve(self, plan_id: PlanId, by: str, now: float) -> Answer:
        """Start a proposed plan.

        Raises:
            NotFound: no such plan.
            Conflict: STALE_BASE if the epoch moved (R16), EXPIRED, WRONG_PHASE, OBSERVE_MODE,
                OBSERVE_ONLY, SEPARATE_APPROVAL, PLAN_IN_PROGRESS, FROZEN, OUTSIDE_SCHEDULE.
        """
        executor, _ = self._recovered()
        records = self.control.records
        record = records.get(plan_id)
        plan, unix = record.plan, now + self.control.unix_offset_s
        if record.reason in (Reason.STALE_BASE, Reason.EXPIRED):
            raise Conflict(f"plan {plan_id} ended: {record.error}", record.reason)
        if record.phase is not PlanPhase.PROPOSED:
            raise Conflict(f"plan {plan_id} is {record.phase}")
        if executor.is_stale(plan, 0):
            raise Conflict(f"plan {plan_id} was made on epoch {plan.base_epoch}", Reason.STALE_BASE)
        if plan.expires_at is not None and unix >= plan.expires_at:
            raise Conflict(f"plan {plan_id} ran out at {plan.expires_at:.0f}", Reason.EXPIRED)
        self._require_another_approver(plan, record.made_by, by)
        self._require_free(plan, now)
        change = records.change(record, "approved", unix, phase=PlanPhase.APPROVED, by=by)
        actions = [change, *self.control.advance_plan(now)]
        return records.get(plan_id), self.control.write_retry.order(actions)

    def cancel(self, plan_id: PlanId, by: str, now: float) -> Answer:
        """Stop a plan: at once before all votes are in, else before its next wave (R16).

        Raises:
            NotFound: no such plan.
            Conflict: WRONG_PHASE if it has ended.
        """
        executor, _ = self._leading()
        records, write_retry = self.control.records, self.control.write_retry
        record = records.get(plan_id)
        if record.phase.terminal:
            raise Conflict(f"plan {plan_id} is {record.phase}")
        unix = now + self.control.unix_offset_s
        if records.cancel_requested(record):
            return record, write_retry.order([], flush=True)
        actions: list[ControlAction] = [records.change(record, "cancel_requested", unix, by=by)]
        record = records.get(plan_id)
        if executor.runs(record):
            actions += self.control.handle(CancelWave(Reason.CANCELLED), now)
        elif record.phase is PlanPhase.PROPOSED or self.control.state in _RECOVERED:
            actions.append(records.end(record, Reason.CANCELLED, unix))
            actions += self.control.advance_plan(now)
        return records.get(plan_id), write_retry.order(actions)

    def rollback_target(self, to_epoch: Epoch | None) -> tuple[Epoch, Placement]:
        """Return the epoch and placement a rollback leads to.

        Without `to_epoch` it is the placement before the plan that led to the current epoch.

        Raises:
            NotFound: the epoch is not recorded, for instance after a flushed store (R15).
            Conflict: it is the current epoch.
        """
        self._recovered()
        history, current = self.control.history, self.control.epoch
        assert current is not None
        earlier = self._earlier_epochs()
        epoch = self.rollback_epoch() if to_epoch is None else to_epoch
        if epoch is None:
            raise NotFound("no earlier placement is recorded")
        if epoch == current:
            raise Conflict(f"epoch {epoch} is the current one", Reason.NO_CHANGE)
        if epoch not in earlier:
            raise NotFound(f"no placement of epoch {epoch} is recorded; there are {earlier}")
        return epoch, history[epoch]

    def rollback_epoch(self) -> Epoch | None:
        """Return the epoch a rollback without a named epoch leads to; None if there is none."""
        earlier = self._earlier_epochs()
        return self._before_last_plan(earlier) if earlier else None

    def _earlier_epochs(self) -> list[Epoch]:
        current = self.control.epoch
        return sorted(e for e in self.control.history if current is not None and e < current)

    def _before_last_plan(self, earlier: list[Epoch]) -> Epoch:
        """Return the recorded base of the plan that led to the current epoch, else the newest.

        The maps are compared, because after a cold start epochs begin at 0 again. After a warm one
        the group is still where a plan of an earlier generation led.
        """
        history, current = self.control.history, self.control.epoch
        assert current is not None
        for record in reversed(self.control.records.by_id.values()):
            plan, waves = record.plan, record.waves_committed
            leads_here = plan.base_epoch + waves == current and plan.base_epoch in earlier
            if (
                leads_here
                and history[plan.base_epoch] == plan.base
                and history.get(current) == placement_at(plan, waves)
            ):
                return plan.base_epoch
        return earlier[-1]

    def resume(self, now: float) -> list[ControlAction]:
        """Let plans begin again: end a freeze, and the hold on automatic plans."""
        self._leading()
        return self.control.handle(AutomaticPlansResumed(), now)

    def freeze(self, seconds: float, now: float) -> list[ControlAction]:
        """Begin no plan for that many seconds; 0 ends the freeze. A plan that has begun goes on."""
        self._leading()
        until = now + self.control.unix_offset_s + seconds if seconds > 0 else 0.0
        return self.control.handle(PlansFrozen(until), now)

    def set_policy(
        self, policy: DeploymentPolicy, document: Mapping[str, Any], now: float
    ) -> list[ControlAction]:
        """Use this policy from the next cycle on; `document` is the policy as it is stored.

        A policy that is locked in mode observe cancels the plan that runs.
        """
        self._leading()
        actions = self.control.handle(PolicySet(policy, document), now)
        active = self.control.records.active
        if policy.locked and active is not None:
            actions += self.cancel(active.plan.plan_id, "observe_lock", now)[1]
        return actions

    # --- preconditions ----------------------------------------------------------------------------

    def _leading(self) -> tuple[PlanExecutor, PlanningLoop]:
        control = self.control
        if control.executor is None:
            raise Unavailable("this replica does not lead the deployment", Reason.NOT_LEADER)
        assert control.planning_loop is not None
        return control.executor, control.planning_loop

    def _recovered(self) -> tuple[PlanExecutor, PlanningLoop]:
        leading = self._leading()
        if self.control.state is ControlState.WAITING_FOR_RANKS:
            raise Unavailable("the ranks have not all connected", Reason.RANKS_MISSING)
        if self.control.state is ControlState.RECOVERING:
            raise Unavailable("the ranks are being asked where they stand", Reason.RECOVERING)
        return leading

    def _require_another_approver(self, plan: Plan, maker: str | None, approver: str) -> None:
        """Refuse a plan by hand that its maker approves, or whose maker is not known."""
        if not self.control.policy.separate_approval or plan.kind is not PlanKind.MANUAL:
            return
        if maker is None or maker == approver:
            raise Conflict(
                f"plan {plan.plan_id} was made by {maker or 'an unknown token'}, and with"
                f" separate_approval another token than its maker's must approve it",
                Reason.SEPARATE_APPROVAL,
            )

    def _require_free(self, plan: Plan, now: float) -> None:
        """Refuse a plan under the lock of mode observe, on ranks that observe, or beside another.

        A freeze and the schedule do not stop a rollback.
        """
        if self.control.policy.locked:
            raise Conflict(
                "the mode is observe and observe_lock is set, so nothing may move weights; an admin"
                " can set another mode, or observe_lock to false",
                Reason.OBSERVE_MODE,
            )
        observers = self.control.membership.observers
        if observers:
            raise Conflict(
                f"ranks {observers} only observe and refuse every plan: start all ranks of a group"
                " with EVENKEEL_RANK__MODE=place",
                Reason.OBSERVE_ONLY,
            )
        active = self.control.records.active
        if active is not None:
            raise plan_in_progress(active)
        if plan.kind is PlanKind.ROLLBACK:
            return
        _, planning_loop = self._leading()
        unix = now + self.control.unix_offset_s
        if unix < planning_loop.frozen_until:
            wait = duration_text(planning_loop.frozen_until - unix)
            raise Conflict(
                f"paused for another {wait}; `evenkeel resume -d {self.control.deployment}` ends"
                " that",
                Reason.FROZEN,
            )
        opens_at = self.control.policy.schedule.opens_at(unix)
        if opens_at != unix:
            assert opens_at is not None
            wait = duration_text(opens_at - unix)
            raise Conflict(f"the schedule opens in {wait}", Reason.OUTSIDE_SCHEDULE)


def plan_in_progress(active: PlanRecord) -> Conflict:
    """Return the refusal of a plan while another one runs."""
    plan = active.plan
    cancel = f"`evenkeel plan cancel {plan.plan_id} -d {plan.deployment}`"
    return Conflict(
        f"plan {plan.plan_id} is {active.phase}: wait for it, or {cancel}", Reason.PLAN_IN_PROGRESS
    )
