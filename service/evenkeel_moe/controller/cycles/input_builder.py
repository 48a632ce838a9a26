"""Collects the planner's inputs from the machine, the loads and the ranks of a deployment."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.controller.cycles.cycle_budget import CycleBudget
from evenkeel_moe.controller.cycles.cycle_inputs import (
    CycleSettings,
    PlanBase,
    last_plan_ended,
    merge_phases,
    plan_failures,
    price,
    steps_since_move,
)
from evenkeel_moe.controller.cycles.plan_gains import calibration_of
from evenkeel_moe.controller.cycles.rank_costs import RankCosts
from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.calibration import NOT_CALIBRATED, Calibration
from evenkeel_moe.planning.decision.cycle import CycleInputs
from evenkeel_moe.planning.decision.gates import GateMemory, GateSettings
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.ports.operations import PlanRequest
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.telemetry.slow_ranks import SlowRanks

_log = structlog.get_logger(__name__)
_PACE_S = 5.0
"""Seconds in which the time between steps is measured."""


@dataclass(eq=False, repr=False)
class InputBuilder:
    """The planner's inputs of one deployment."""

    control: DeploymentState
    loads: GroupLoads
    ranks: RankSessions
    clock: Clock
    settings: CycleSettings
    budget: CycleBudget
    gate_memory: GateMemory = field(default_factory=GateMemory, init=False)
    """The state of the gates after the last cycle; each cycle replaces it."""
    cost: CostModel | None = field(default=None, init=False)
    """The cost model of the newest inputs; None before the first."""
    calibration: Calibration = field(default=NOT_CALIBRATED, init=False)
    """By what plans delivered, in the newest inputs."""
    _slow: SlowRanks = field(default_factory=SlowRanks, init=False)
    _costs: RankCosts = field(init=False)
    _dispatch_warning: str = field(default="", init=False)
    """The newest warning that was logged; empty if nothing disagrees."""

    def __post_init__(self) -> None:
        self._costs = RankCosts(self.control, self.loads, self.ranks, self.clock)

    def forget(self) -> None:
        """Start again: the windows begin again for another generation."""
        self.gate_memory = GateMemory()
        self.cost = None

    def build(
        self,
        base: PlanBase,
        policy: str,
        limits: PlanLimits,
        phases: tuple[Phase, ...] = tuple(Phase),
        *,
        request: PlanRequest | None = None,
        closed_by: Reason | None = None,
    ) -> CycleInputs:
        """Return the inputs for a policy; `request` is an operator's, or None.

        `closed_by` says why no plan may begin; the cycle then only measures.

        Raises:
            Unavailable: the ranks have not all connected.
        """
        control, ingest, settings = self.control, self.loads.ingest, self.settings
        membership, now = control.membership, self.clock.monotonic()
        shape = membership.shape
        if shape is None:
            raise Unavailable("the ranks have not all connected", Reason.RANKS_MISSING)
        found = ingest.windows(settings.plan_steps)
        windows = [window for phase, window in found.items() if phase in phases]
        load, source = merge_phases(windows, shape, settings.plan_steps)
        failed_plans, ended_at = self._plan_history()
        target = None if request is None else request.target
        curves = target is None and find_policy(policy).inputs.curves
        objective = self._objective(shape, base, limits, load, curves)
        self.calibration = calibration_of(control.records.by_id.values(), objective.cost.source)
        return CycleInputs(
            load=load,
            shape=shape,
            topology=self.loads.topology(),
            current=base.placement,
            policy=policy,
            settings=GateSettings.from_thresholds(control.policy.thresholds),
            staging_bytes=membership.staging_bytes(),
            now_unix=self.clock.unix(),
            mode=control.policy.mode,
            ranks_fresh=sum(membership.fresh(rank, now) for rank in membership.members),
            newest_step_age_s=math.nan if ingest.newest_at is None else now - ingest.newest_at,
            findings=self.loads.findings() or (),
            memory=self.gate_memory,
            manual=request is not None,
            closed_by=closed_by,
            target=target,
            last_plan_ended_unix=ended_at,
            failed_plans=failed_plans,
            steps_since_move=steps_since_move(windows, base.epoch, settings.plan_steps),
            step_s=ingest.step_times.newest_s(_PACE_S),
            source_load=source,
            objective=objective,
            calibration=self.calibration,
            max_evaluations=self.budget.limit(policy),
            threads=settings.threads,
            policy_options=control.policy.policy_options,
            replica_budget=control.policy.replica_budget,
            recent_steps=settings.recent_steps,
        )

    def _objective(
        self,
        shape: ModelShape,
        base: PlanBase,
        limits: PlanLimits,
        load: NDArray[np.uint32],
        curves: bool,
    ) -> Objective:
        cost = self.cost = self._costs.choose(
            base, shape, load, self.control.policy.cost, curves=curves
        )
        self._log_slow_ranks()
        return replace(
            self.settings.objective,
            cost=cost,
            copy_cost=price(
                cost, self.loads.times.seconds_per_token(), shape.bytes_per_expert, self.settings
            ),
            limits=limits,
            dispatch=self._dispatch(),
            fill_slots=self.control.membership.slots_stay_filled(),
        )

    def _dispatch(self) -> DispatchModel:
        """Return the model of the dispatcher; log what disagrees with it, once."""
        choice = self.loads.dispatch_choice()
        if choice.warning and choice.warning != self._dispatch_warning:
            _log.warning(
                "dispatch_disagrees", deployment=self.control.deployment, detail=choice.warning
            )
        self._dispatch_warning = choice.warning
        return choice.model

    def _log_slow_ranks(self) -> None:
        members = self.control.membership.members
        hellos = {rank: one.hello for rank, one in members.items()}
        self._slow.update(self.control.deployment, self.loads.times.speed_factors(), hellos)

    def _plan_history(self) -> tuple[int, float | None]:
        """Count the plans that failed in a row; return also when the last plan ended [Unix s]."""
        records = self.control.records.by_id.values()
        failed, failed_at = plan_failures(records)
        times = [at for at in (last_plan_ended(records), failed_at) if at is not None]
        return failed, max(times, default=None)
