"""The cycles of planning: begins each one and uses the planner's answer.

Every cycle ends in one recorded decision with a Reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase
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
        numbers: numbers for the RunCycles. No earlier term of this replica has used them, so that a
            late answer to a cycle of that term is not taken for one of this term.
    """

    def __init__(
        self,
        executor: PlanExecutor,
        policy: DeploymentPolicy,
        *,
        since: float,
        numbers: Iterator[int],
    ) -> None:
        self.executor = executor
        self.policy = policy
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

    def tick(
        self, now: float, *, unknown: Reason | None, fault: Reason | None
    ) -> list[ControlAction]:
        """Begin a cycle if it is time. One in which no plan may begin measures the balance.

        Args:
            now: monotonic seconds.
            unknown: the reason why the ranks' placement is not known; None if it is.
            fault: a fault of the store, because of which no plan may begin; None if there is none.
        """
        deadline_s = self.executor.timing.cycle_deadline_s
        if self._began is not None and now - self._began >= deadline_s:
            self._began = None
            return [self.decide(Reason.PLANNER_FAILED, now, numbers={"waited_s": deadline_s})]
        # The start of the last cycle is kept, not the time of the next one, so that a new `cycle_s`
        # counts at once.
        if now < self._last_cycle_at + self.policy.cycle_s or self._began is not None:
            return []
        self._last_cycle_at = now
        if unknown is not None:
            return [self.decide(unknown, now)]
        group, generation = self.executor.group, self.executor.membership.generation
        assert group is not None and generation is not None
        self._number = next(self._numbers)
        self._began = now
        self._cycle_policy = self.policy
        return [
            RunCycle(
                self._number,
                group.epoch,
                group.placement,
                generation,
                group.weights_version,
                fault or self._refusal(now),
            )
        ]

    def _refusal(self, now: float) -> Reason | None:
        """Return the reason why no new automatic plan may be made now."""
        executor, records = self.executor, self.executor.records
        closed = self.closed(now, PlanKind.AUTOMATIC)
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

    def closed(self, now: float, kind: PlanKind) -> Reason | None:
        """Return the reason if a freeze, the schedule or retiring ranks let no plan begin now.

        They do not stop a rollback (R16), and retiring ranks do not stop their evacuation.
        """
        unix = now + self.executor.unix_offset_s
        if kind is PlanKind.ROLLBACK:
            return None
        if unix < self.frozen_until:
            return Reason.FROZEN
        if not self.policy.schedule.is_open(unix):
            return Reason.OUTSIDE_SCHEDULE
        retiring = self.hold.retiring is not None and kind is not PlanKind.EVACUATION
        return Reason.RESIZING if retiring else None

    def take(
        self, event: CycleDecided, now: float, blocked_by: Reason | None
    ) -> list[ControlAction]:
        """Record the planner's answer, and its plan if there is one that may begin."""
        if event.cycle != self._number or self._began is None:
            return []
        self._began = None
        plan, executor = event.plan, self.executor
        reason = event.reason if plan is None else self._answer_refusal(plan, now, blocked_by)
        if reason is not None or plan is None:
            return [self._decide_without_plan(reason or event.reason, event, now)]
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

    def _decide_without_plan(
        self, reason: Reason, event: CycleDecided, now: float
    ) -> PersistDecision:
        """Return the row of a cycle that enters no plan; it names a proposal that it waits for."""
        waiting = self.executor.records.proposal() if reason is Reason.PLAN_PROPOSED else None
        plan, numbers = None, dict(event.numbers)
        if waiting is not None:
            plan = waiting.plan
            if plan.expires_at is not None:
                numbers["expires_in_s"] = plan.expires_at - now - self.executor.unix_offset_s
        return self.decide(reason, now, plan, numbers, event.shadow)

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
        return Reason.WEIGHTS_VERSION_CHANGED if executor.is_of_other_weights(plan) else None

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
