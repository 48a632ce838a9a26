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
    merge_phases,
    plan_history,
    price,
    steps_since_move,
)
from evenkeel_moe.controller.cycles.plan_gains import calibration_of
from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostModel, CostSource
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import CostChoice
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.calibration import NOT_CALIBRATED, Calibration
from evenkeel_moe.planning.decision.cycle import CycleInputs
from evenkeel_moe.planning.decision.gates import GateMemory, GateSettings
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.ports.operations import PlanRequest
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.telemetry.cost_choice import ChosenCost, KnownCosts, RankNumbers, choose_cost
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
    _source: CostSource | None = field(default=None, init=False)
    """The source of the cost model that was logged last."""
    _dispatch_warning: str = field(default="", init=False)
    """The newest warning that was logged; empty if nothing disagrees."""

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
        failed_plans, ended_at = plan_history(control.records.by_id.values())
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
        cost = self.cost = self.cost_in_force(
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

    def cost_in_force(
        self,
        base: PlanBase,
        shape: ModelShape,
        load: NDArray[np.uint32],
        asked: CostChoice,
        *,
        curves: bool = False,
    ) -> CostModel:
        """Return the cost model in force, and log a change of its source.

        Args:
            base: the placement that the ranks use.
            shape: of the deployment.
            load: (T, L, E) tokens, at whose mean the models are compared.
            asked: the operator's choice.
            curves: True for a policy that plans on the ranks' curves.
        """
        times = self.loads.times
        times.update(
            self.loads.ingest.parts(),
            base.placement,
            base.epoch,
            self.loads.split(),
            self.control.history,
        )
        each = max(1, load.shape[0] * load.shape[1] * shape.num_ranks)
        choice = choose_cost(
            KnownCosts(
                shape=shape,
                ranks=[self._told(EpRank(rank)) for rank in range(shape.num_ranks)],
                fit=times.fit(),
                tokens_per_rank=float(load.sum()) / each,
                active_per_rank=float(np.count_nonzero(load)) / each,
                now_unix=self.clock.unix(),
                dispatch=self.loads.split().dispatch,
            ),
            asked,
            curves=curves,
        )
        self._log_source(choice)
        return choice.model

    def _told(self, rank: EpRank) -> RankNumbers:
        member = self.control.membership.members.get(rank)
        if member is None:
            return RankNumbers()
        session = self.ranks.by_stream.get(member.stream)
        if session is None:
            return RankNumbers(member.hello.device, member.hello.weight_format)
        return session.numbers

    def _log_source(self, choice: ChosenCost) -> None:
        if choice.model.source is self._source:
            return
        self._source = choice.model.source
        _log.info(
            "cost_model",
            deployment=self.control.deployment,
            source=choice.model.source.value,
            detail=choice.model.detail,
            others={source.value: reason for source, reason in choice.reasons.items()}
            | {source.value: f"time ratio {ratio}" for source, ratio in choice.ratios.items()},
        )
