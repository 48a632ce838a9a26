"""The control loop's rhythm: every cycle ends in one recorded decision with a Reason."""

from collections.abc import Iterator, Mapping
from typing import Any

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.plan import Plan, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol.control_messages import (
    ControlAction,
    CycleDecided,
    PersistDecision,
    RunCycle,
)
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor

__all__ = ["PlanningLoop"]


class PlanningLoop:
    """When to look, and what becomes of what the planner answers.

    Args:
        since: when the time to the first cycle begins to count.
        deadline_s: a RunCycle not answered by then counts as a failed planner.
        numbers: of the RunCycles; of no earlier term of this replica, whose planner may still answer.
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
        self.held = False
        """Automatic plans wait for `resume` after a rollback (R16)."""
        self.frozen_until = 0.0
        """Unix seconds."""
        self.last: Mapping[str, object] | None = None
        """The newest decision row."""
        self._looked_at = since
        self._numbers = numbers
        self._number = 0
        self._began: float | None = None
        self._asked_under = policy
        """What the cycle under way plans by."""

    def tick(self, now: float, hindrance: Reason | None) -> list[ControlAction]:
        """Begin a cycle if it is time. `hindrance`: why the machine cannot plan now."""
        if self._began is not None and now - self._began >= self.deadline_s:
            self._began = None
            return [self.decide(Reason.PLANNER_FAILED, now, numbers={"waited_s": self.deadline_s})]
        # Not a time fixed a cycle ahead: another `cycle_s` counts from when it is set.
        if now < self._looked_at + self.policy.cycle_s or self._began is not None:
            return []
        self._looked_at = now
        reason = hindrance or self._gate(now)
        if reason is not None:
            return [self.decide(reason, now)]
        executor = self.executor
        group, generation = executor.group, executor.membership.generation
        assert group is not None and generation is not None
        self._number = next(self._numbers)
        self._began = now
        self._asked_under = self.policy
        return [
            RunCycle(self._number, group.epoch, group.placement, generation, group.weights_version)
        ]

    def _gate(self, now: float) -> Reason | None:
        """What an operator or an open plan holds against a new one."""
        executor = self.executor
        closed = self.closed(now)
        if closed is not None:
            return closed
        if self.policy.mode is Mode.AUTO and self.held:
            return Reason.HELD_AFTER_ROLLBACK
        if executor.records.active is not None:
            return Reason.PLAN_IN_PROGRESS
        # A proposal left from `propose` mode must not hold up `auto`: the next plan makes it stale.
        if self.policy.mode is Mode.PROPOSE and executor.records.proposal() is not None:
            return Reason.PLAN_PROPOSED
        quorum = executor.membership.quorum(now)
        if not quorum.ok and self.policy.mode is not Mode.OBSERVE:
            return quorum.reason
        return None

    def closed(self, now: float) -> Reason | None:
        """Whether no plan may begin now, by a freeze or the schedule."""
        unix = now + self.executor.unix_offset_s
        if unix < self.frozen_until:
            return Reason.FROZEN
        return None if self.policy.schedule.is_open(unix) else Reason.OUTSIDE_SCHEDULE

    def take(
        self, event: CycleDecided, now: float, hindrance: Reason | None
    ) -> list[ControlAction]:
        """Record what a cycle came to; enter its plan if one came and may be."""
        if event.cycle != self._number or self._began is None:
            return []
        self._began = None
        plan, executor = event.plan, self.executor
        if plan is None:
            return [self.decide(event.reason, now, numbers=event.numbers, shadow=event.shadow)]
        if self.policy.mode is Mode.OBSERVE:
            return [
                self.decide(Reason.OBSERVE_MODE, now, numbers=event.numbers, shadow=event.shadow)
            ]
        reason = hindrance or self._gate(now)
        if reason is None and self.policy != self._asked_under:
            reason = (
                Reason.POLICY_CHANGED
            )  # Its limits, gates or mode may not allow what was planned.
        if reason is None and (
            executor.is_stale(plan, 0) or plan.generation != executor.membership.generation
        ):
            reason = Reason.STALE_BASE
        if reason is not None:
            return [self.decide(reason, now, numbers=event.numbers, shadow=event.shadow)]
        refusal, unix = executor.plan_problem(plan), now + executor.unix_offset_s
        if refusal is not None:
            refused = executor.records.add(
                plan, PlanPhase.REFUSED, refusal[0], unix, detail=refusal[1]
            )
            return [refused, self.decide(refusal[0], now, plan, event.numbers, event.shadow)]
        auto = self.policy.mode is Mode.AUTO
        phase = PlanPhase.APPROVED if auto else PlanPhase.PROPOSED
        decided = Reason.PLAN_STARTED if auto else Reason.PLAN_PROPOSED
        entered = executor.records.add(plan, phase, plan.reason, unix, by="auto" if auto else "")
        return [entered, self.decide(decided, now, plan, event.numbers, event.shadow)]

    def decide(
        self,
        reason: Reason,
        now: float,
        plan: Plan | None = None,
        numbers: Mapping[str, float] | None = None,
        shadow: Mapping[str, Any] | None = None,
    ) -> PersistDecision:
        """One row of the decision log; `shadow` only where there are shadow policies."""
        self.last = {
            "at": now + self.executor.unix_offset_s,
            "reason": reason.value,
            "plan_id": plan.plan_id if plan is not None else None,
            "numbers": dict(numbers or {}),
            **({"shadow": dict(shadow)} if shadow else {}),
        }
        return PersistDecision(self.last)
