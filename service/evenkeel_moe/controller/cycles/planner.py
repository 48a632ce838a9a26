"""Plans for one deployment: automatic cycles, manual plans, rollbacks and recommendations.

The work itself runs in the planner's processes.
"""

from dataclasses import dataclass
from functools import partial

import structlog

from evenkeel_moe.controller.cycles.cycle_budget import CycleBudget
from evenkeel_moe.controller.cycles.cycle_inputs import CycleSettings, PlanBase, finite
from evenkeel_moe.controller.cycles.input_builder import InputBuilder
from evenkeel_moe.controller.cycles.manual_plans import ManualPlanner
from evenkeel_moe.controller.cycles.plan_gains import PlanGains
from evenkeel_moe.controller.cycles.recommendation import Recommender, ShadowPolicies
from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.controller.ranks.kv_caches import KvCaches
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.telemetry.swap_stalls import SwapStalls

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class DeploymentPlanner:
    """The planner of one deployment."""

    control: DeploymentState
    loads: GroupLoads
    ranks: RankSessions
    kv: KvCaches
    inbox: MachineInbox
    shared: SharedServices
    settings: CycleSettings

    def __post_init__(self) -> None:
        control, loads, shared = self.control, self.loads, self.shared
        budget = CycleBudget(
            self.settings.deadline_s, partial(shared.metrics.planner_ran, control.deployment)
        )
        builder = self.builder = InputBuilder(
            control, loads, self.ranks, shared.clock, self.settings, budget
        )
        self.gains = PlanGains(control, loads, self.inbox, shared.clock)
        self.stalls = SwapStalls()
        self._shadows = ShadowPolicies(control, shared)
        self.manual = ManualPlanner(control, builder, self.inbox, self.stalls, shared)
        self.recommender = Recommender(control, builder, self.kv, self._shadows, shared)

    def forget(self) -> None:
        """Start again: the windows begin again for another generation."""
        self.builder.forget()
        self.gains.forget()
        self.stalls.forget()
        self._shadows.forget()
        self.recommender.forget()

    def begin_cycle(self, action: ctl.RunCycle) -> None:
        """Run a cycle in the background; it always ends with `CycleDecided`."""
        name = f"cycle-{self.control.deployment}-{action.cycle}"
        self.shared.spawn(self._run_cycle(action), name)

    async def _run_cycle(self, action: ctl.RunCycle) -> None:
        deployment, clock = self.control.deployment, self.shared.clock
        began = clock.monotonic()
        decided = ctl.CycleDecided(action.cycle, action.closed_by or Reason.PLANNER_FAILED)
        try:
            decided = await self._decide(action)
        except EvenkeelError as error:
            _log.error("cycle_failed", deployment=deployment, error=str(error))
            decided = ctl.CycleDecided(action.cycle, action.closed_by or error.reason)
        except Exception:  # The machine waits for the end of the cycle, however it ends.
            _log.exception("cycle_failed", deployment=deployment)
        finally:
            self.shared.metrics.cycle_ended(deployment, clock.monotonic() - began)
            self.inbox.post(decided)

    async def _decide(self, action: ctl.RunCycle) -> ctl.CycleDecided:
        deployment, policy = self.control.deployment, self.control.policy
        store_fault = Reason.STORE_UNAVAILABLE if self.shared.health.fault else None
        closed_by = action.closed_by or store_fault
        if not self.shared.planner.begin():
            # The machine's deadline for a cycle must not count the compiling of kernels.
            return ctl.CycleDecided(action.cycle, closed_by or Reason.PLANNER_STARTING)
        base = PlanBase(
            deployment, action.generation, action.weights_version, action.epoch, action.placement
        )
        inputs = self.builder.build(base, policy.policy, policy.limits, closed_by=closed_by)
        result = await self.builder.budget.run(self.shared.planner, inputs)
        shadow = self._shadows.rows()
        if action.generation == self.control.generation:  # Else all began again meanwhile.
            self.builder.gate_memory = result.memory
            if result.split is not None:
                self._shadows.score(inputs, result.split, action.epoch)
        if result.detail:
            _log.warning(
                "cycle_stopped", deployment=deployment, reason=result.reason, detail=result.detail
            )
        numbers = finite(result.numbers)
        if not result.passed or result.target is None:
            reason = closed_by or result.reason
            return ctl.CycleDecided(action.cycle, reason, numbers=numbers, shadow=shadow)
        unix = self.shared.clock.unix()
        plan = base.plan(
            result.target,
            result.waves,
            kind=PlanKind.AUTOMATIC,
            policy=policy.policy,
            reason=result.reason,
            created_at=unix,
            expires_at=unix + policy.proposal_ttl_s if policy.mode is Mode.PROPOSE else None,
            numbers=numbers,
            stalls=self.stalls,
            cost_source=inputs.objective.cost.source,
        )
        return ctl.CycleDecided(action.cycle, result.reason, plan, numbers, shadow)
