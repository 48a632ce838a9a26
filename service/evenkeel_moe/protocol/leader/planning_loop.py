"""The cycles of planning: begins each one and uses the planner's answer.

Every cycle ends in one recorded decision with a Reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.plan import Plan, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol.control_messages import (
    ControlAction,
    CycleDecided,
    PersistDecision,
    RunCycle,
)
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor


class PlanningLoop:
    """The planning cycles of one deployment under one term.

    Args:
        since: monotonic seconds from which the time to the first cycle counts.
        deadline_s: a RunCycle that is not answered by then counts as a failed planner.
        numbers: numbers for the RunCycles. No earlier term of this replica has used them, so that a
            late answer to a cycle of that term is not taken for one of this term.
    """

    def __init__(
        self,
        executor: PlanExecutor,
        policy: DeploymentPolicy,
        *,
        since: float,
        deadline_s: float,
        numbers: Iterator[int],
    ) -> None:
        self.executor = executor
        self.policy = policy
        self.deadline_s = deadline_s
        self.hold = Hold()
        """The hold on automatic plans (R16)."""
        self.frozen_until = 0.0
        """Unix seconds."""
        self.last: Mapping[str, object] | None = None
        """The newest decision row."""
        self._last_cycle_at = since
        self._numbers = numbers
        self._number = 0
        self._began: float | None = None
        """The start of the cycle under way; None if there is none."""
        self._cycle_policy = policy
        """The policy at the start of the cycle under way."""

    def tick(self, now: float, blocked_by: Reason | None) -> list[ControlAction]:
        """Begin a cycle if it is time; `blocked_by` is the reason why no plan can begin now."""
        if self._began is not None and now - self._began >= self.deadline_s:
            self._began = None
            return [self.decide(Reason.PLANNER_FAILED, now, numbers={"waited_s": self.deadline_s})]
        # The start of the last cycle is kept, not the time of the next one, so that a new `cycle_s`
        # counts at once.
        if now < self._last_cycle_at + self.policy.cycle_s or self._began is not None:
            return []
        self._last_cycle_at = now
        reason = blocked_by or self._refusal(now)
        if reason is Reason.PLAN_PROPOSED:
            return [self._wait_for_approval(now)]
        if reason is not None:
            return [self.decide(reason, now)]
        group, generation = self.executor.group, self.executor.membership.generation
        assert group is not None and generation is not None
        self._number = next(self._numbers)
        self._began = now
        self._cycle_policy = self.policy
        return [
            RunCycle(self._number, group.epoch, group.placement, generation, group.weights_version)
        ]

    def _wait_for_approval(self, now: float) -> PersistDecision:
        """Return the row of a cycle that waits for the approval of a proposal."""
        waiting = self.executor.records.proposal()
        assert waiting is not None
        numbers = {}
        if waiting.plan.expires_at is not None:
            numbers["expires_in_s"] = waiting.plan.expires_at - now - self.executor.unix_offset_s
        return self.decide(Reason.PLAN_PROPOSED, now, waiting.plan, numbers)

    def _refusal(self, now: float) -> Reason | None:
        """Return the reason why no new automatic plan may be made now."""
        executor, records = self.executor, self.executor.records
        closed = self.closed(now)
        if closed is not None:
            return closed
        if self.policy.mode is Mode.AUTO and self.hold.because is not None:
            return self.hold.because
        if records.active is not None:
            return Reason.PLAN_IN_PROGRESS
        # A proposal left from `propose` mode must not block `auto`: the next plan makes it stale.
        if self.policy.mode is Mode.PROPOSE and records.proposal() is not None:
            return Reason.PLAN_PROPOSED
        quorum = executor.membership.quorum(now)
        if not quorum.ok and self.policy.mode is not Mode.OBSERVE:
            return quorum.reason
        return None

    def closed(self, now: float) -> Reason | None:
        """Return the reason if a freeze or the schedule lets no plan begin now."""
        unix = now + self.executor.unix_offset_s
        if unix < self.frozen_until:
            return Reason.FROZEN
        return None if self.policy.schedule.is_open(unix) else Reason.OUTSIDE_SCHEDULE

    def take(
        self, event: CycleDecided, now: float, blocked_by: Reason | None
    ) -> list[ControlAction]:
        """Record the planner's answer, and its plan if there is one that may begin."""
        if event.cycle != self._number or self._began is None:
            return []
        self._began = None
        plan, executor = event.plan, self.executor
        reason = event.reason if plan is None else self._answer_refusal(plan, now, blocked_by)
        if reason is not None:
            return [self.decide(reason, now, numbers=event.numbers, shadow=event.shadow)]
        assert plan is not None
        refusal, unix = executor.plan_problem(plan), now + executor.unix_offset_s
        auto = self.policy.mode is Mode.AUTO
        if refusal is not None:
            decided, detail = refusal
            entered = executor.records.add(plan, PlanPhase.REFUSED, decided, unix, detail=detail)
        else:
            decided = Reason.PLAN_STARTED if auto else Reason.PLAN_PROPOSED
            phase = PlanPhase.APPROVED if auto else PlanPhase.PROPOSED
            by = "auto" if auto else ""
            entered = executor.records.add(plan, phase, plan.reason, unix, by=by)
        return [entered, self.decide(decided, now, plan, event.numbers, event.shadow)]

    def _answer_refusal(self, plan: Plan, now: float, blocked_by: Reason | None) -> Reason | None:
        """Return the reason why the planner's plan is not entered."""
        if self.policy.mode is Mode.OBSERVE:
            return Reason.OBSERVE_MODE
        reason = blocked_by or self._refusal(now)
        if reason is not None:
            return reason
        if self.policy != self._cycle_policy:
            return Reason.POLICY_CHANGED  # Its limits, gates or mode may forbid this plan.
        executor = self.executor
        if executor.is_stale(plan, 0) or executor.is_of_other_generation(plan):
            return Reason.STALE_BASE
        return None

    def decide(
        self,
        reason: Reason,
        now: float,
        plan: Plan | None = None,
        numbers: Mapping[str, float] | None = None,
        shadow: Mapping[str, Any] | None = None,
    ) -> PersistDecision:
        """Return one row of the decision log; it has `shadow` only if there are shadow policies."""
        self.last = {
            "at": now + self.executor.unix_offset_s,
            "reason": reason.value,
            "plan_id": plan.plan_id if plan is not None else None,
            "numbers": dict(numbers or {}),
            **({"shadow": dict(shadow)} if shadow else {}),
        }
        return PersistDecision(self.last)
