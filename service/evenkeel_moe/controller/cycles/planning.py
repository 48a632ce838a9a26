"""A deployment's planning: cycles, plans by hand, rollbacks. The work itself runs in other processes."""

import hashlib
import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import structlog

from evenkeel_moe.controller.cycles.cycle_inputs import (
    Base,
    WaveRequest,
    build_waves,
    finite,
    last_plan_ended,
    merge_phases,
    new_plan_id,
    plan_failures,
    price,
    steps_since_move,
    topology_of,
)
from evenkeel_moe.controller.cycles.evaluation_budget import Effort
from evenkeel_moe.controller.cycles.recommendation import WhatIf
from evenkeel_moe.errors import (
    Conflict,
    EvenkeelError,
    InfeasiblePlan,
    InvalidInput,
    Reason,
    Unavailable,
)
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import Plan, PlanKind, PlanLimits, PlanRecord
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.decision.cycle import CycleInputs, CycleResult
from evenkeel_moe.planning.decision.gates import GateMemory, GateSettings
from evenkeel_moe.planning.policies.registry import resolve_policy
from evenkeel_moe.planning.problem.objective import CostCurves
from evenkeel_moe.ports import PlanRequest
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.plan_records import repeated
from evenkeel_moe.telemetry.rank_speeds import Device, SlowRanks, join_curves

if TYPE_CHECKING:
    from evenkeel_moe.controller.deployment.deployment import Deployment

__all__ = ["Planning", "request_digest"]

_log = structlog.get_logger(__name__)

_PACE_S = 5.0
_INFEASIBLE = frozenset(
    {
        Reason.EXPERT_WITHOUT_REPLICA,
        Reason.EXPERT_OUT_OF_RANGE,
        Reason.DUPLICATE_ON_RANK,
        Reason.POOL_EXCEEDED,
        Reason.MEMORY_EXCEEDED,
        Reason.NO_SOURCE,
        Reason.LIMIT_EXCEEDED,
        Reason.STAGING_TOO_SMALL,
        Reason.PLANNER_FAILED,
    }
)


class Planning:
    """What one deployment plans with."""

    def __init__(self, deployment: "Deployment") -> None:
        self._deployment = deployment
        self._memory = GateMemory()
        self._pace: tuple[float, int] | None = None
        """(monotonic seconds, number) of the step the pace is measured from."""
        self._step_s: float | None = None
        """Seconds from one step to the next; None before it is known."""
        self.what_if = WhatIf(deployment)
        self._slow = SlowRanks()
        self._effort = Effort(deployment.options.cycle.deadline_s)

    def forget(self) -> None:
        """The windows begin anew."""
        self._memory = GateMemory()
        self._pace = self._step_s = None
        self.what_if.forget()

    def _measure_pace(self) -> None:
        """Seconds from one step to the next, over stretches long enough that reports in batches do not matter."""
        ingest = self._deployment.ingest
        if ingest.newest_at is None or ingest.newest_step is None:
            return
        if self._pace is not None:
            seconds, steps = ingest.newest_at - self._pace[0], ingest.newest_step - self._pace[1]
            if steps > 0 and seconds < _PACE_S:
                return
            if steps > 0:
                self._step_s = seconds / steps
        self._pace = (ingest.newest_at, ingest.newest_step)

    def topology(self) -> Topology:
        """Which node each rank is on; one node while not all ranks are known."""
        members = self._deployment.control.membership.members
        shape = self._deployment.shape
        num_ranks = shape.num_ranks if shape is not None else 1
        if len(members) != num_ranks:
            return Topology.single_node(num_ranks)
        return topology_of([members[rank].hello.node for rank in sorted(members)])

    # --- the control loop -------------------------------------------------------------------------

    async def run_cycle(self, action: ctl.RunCycle) -> None:
        """Answer one RunCycle; always ends in CycleDecided."""
        deployment = self._deployment
        decided = ctl.CycleDecided(action.cycle, Reason.PLANNER_FAILED)
        try:
            decided = await self._cycle(action)
        except EvenkeelError as error:
            _log.error("cycle_failed", deployment=deployment.deployment, error=str(error))
            decided = ctl.CycleDecided(action.cycle, error.reason)
        except Exception:
            _log.exception("cycle_failed", deployment=deployment.deployment)
        finally:
            deployment.driver.post(decided)

    async def _cycle(self, action: ctl.RunCycle) -> ctl.CycleDecided:
        deployment = self._deployment
        if deployment.outside.health.fault:
            return ctl.CycleDecided(action.cycle, Reason.STORE_UNAVAILABLE)
        self._measure_pace()
        policy = deployment.control.policy
        base = Base(
            deployment.deployment,
            action.generation,
            action.weights_version,
            action.epoch,
            action.placement,
        )
        inputs = self.inputs(base, policy.policy, policy.limits, tuple(Phase))
        result = await self._effort.run(deployment.outside.planner, inputs)
        self._memory = result.memory
        shadow = self.what_if.shadows()
        if result.split is not None:
            self.what_if.score(inputs, result.split, action.epoch)
        if result.detail:
            _log.warning(
                "cycle_stopped",
                deployment=deployment.deployment,
                reason=result.reason,
                detail=result.detail,
            )
        numbers = finite(result.numbers)
        if not result.passed or result.target is None:
            return ctl.CycleDecided(action.cycle, result.reason, numbers=numbers, shadow=shadow)
        unix = deployment.outside.clock.unix()
        plan = base.plan(
            result.target,
            result.waves,
            plan_id=new_plan_id(PlanKind.AUTOMATIC, action.epoch),
            kind=PlanKind.AUTOMATIC,
            policy=policy.policy,
            reason=result.reason,
            created_at=unix,
            expires_at=unix + policy.proposal_ttl_s if policy.mode is Mode.PROPOSE else None,
            numbers=numbers,
        )
        return ctl.CycleDecided(action.cycle, result.reason, plan, numbers, shadow)

    def inputs(
        self,
        base: Base,
        policy_name: str,
        limits: PlanLimits,
        phases: tuple[Phase, ...],
        *,
        request: PlanRequest | None = None,
    ) -> CycleInputs:
        """What the planner is told; `request` for a plan by hand."""
        deployment = self._deployment
        control, ingest, cycle = deployment.control, deployment.ingest, deployment.options.cycle
        shape, now = control.membership.shape, deployment.outside.clock.monotonic()
        if shape is None:
            raise Unavailable("the ranks have not all connected", Reason.RANKS_MISSING)
        found = ingest.windows(cycle.plan_steps)
        windows = [window for phase, window in found.items() if phase in phases]
        load, source = merge_phases(windows, shape, cycle.plan_steps)
        deployment.balance.update(ingest.parts(), base.placement)
        curves = self._look_at_ranks()
        speeds = deployment.balance.comparable_seconds_per_token()
        costs, copy_cost = price(speeds, shape.bytes_per_expert, cycle, curves)
        starts = request is None or not request.dry_run
        records = control.records.by_id.values()
        failed_plans, failed_at = plan_failures(records)
        ended_at = max(
            (at for at in (last_plan_ended(records), failed_at) if at is not None), default=None
        )
        return CycleInputs(
            load=load,
            shape=shape,
            topology=self.topology(),
            current=base.placement,
            policy=policy_name,
            settings=GateSettings.from_thresholds(control.policy.thresholds),
            staging_bytes=control.membership.staging_bytes(),
            now_unix=deployment.outside.clock.unix(),
            mode=control.policy.mode,
            ranks_fresh=sum(
                control.membership.fresh(rank, now) for rank in control.membership.members
            ),
            newest_step_age_s=math.nan if ingest.newest_at is None else now - ingest.newest_at,
            memory=self._memory,
            manual=request is not None,
            target=None if request is None else request.target,
            plan_in_progress=starts and control.active_plan is not None,
            frozen_until_unix=control.frozen_until if starts else 0.0,
            held=control.held,
            last_plan_ended_unix=ended_at,
            failed_plans=failed_plans,
            steps_since_move=steps_since_move(windows, base.epoch, cycle.plan_steps),
            step_s=self._step_s,
            source_load=source,
            objective=replace(cycle.objective, costs=costs, copy_cost=copy_cost, limits=limits),
            max_evaluations=self._effort.most(policy_name),
            recent_steps=cycle.recent_steps,
        )

    def _look_at_ranks(self) -> CostCurves | None:
        """The ranks' measured curves, if all have one; and who has become slow is said."""
        deployment = self._deployment
        members = deployment.control.membership.members
        sessions = {rank: deployment.sessions.get(members[rank].stream) for rank in sorted(members)}
        devices = {
            int(rank): Device(one.hello.node, one.hello.gpu_uuid) for rank, one in members.items()
        }
        self._slow.update(deployment.deployment, deployment.balance.speed_factors(), devices)
        return join_curves(
            [None if session is None else session.curve for session in sessions.values()]
        )

    # --- plans by hand ----------------------------------------------------------------------------

    def base(self) -> Base:
        """Where the group is.

        Raises:
            Unavailable: this replica does not lead, or the ranks have not told.
        """
        control = self._deployment.control
        fleet, generation = control.group, control.generation
        if control.leader is None:
            raise Unavailable("this replica does not lead the deployment", Reason.NOT_LEADER)
        if fleet is None or generation is None:
            raise Unavailable(
                "the ranks have not told where they stand", control.state_reason(0.0)[0]
            )
        return Base(
            self._deployment.deployment,
            generation,
            fleet.weights_version,
            fleet.epoch,
            fleet.placement,
        )

    async def by_hand(self, request: PlanRequest) -> PlanRecord:
        """Plan as asked, and start it where the request and the mode say so."""
        deployment, control = self._deployment, self._deployment.control
        digest = request_digest(request)
        known = await self._asked_before(request.plan_id, digest)
        if known is not None:
            return known
        if request.dry_run and request.approve:
            raise InvalidInput("dry_run plans and does not start, approve starts at once: not both")
        policy = control.policy
        name = "explicit" if request.target is not None else request.policy or policy.policy
        if request.target is None:
            resolve_policy(name)
        base = self.base()
        limits = _tighter(policy.limits, request.limits)
        inputs = self.inputs(base, name, limits, request.phases or tuple(Phase), request=request)
        result = await self._effort.run(deployment.outside.planner, inputs)
        if not result.passed or result.target is None:
            raise _refusal(result)
        unix = deployment.outside.clock.unix()
        plan = base.plan(
            result.target,
            result.waves,
            plan_id=request.plan_id or new_plan_id(PlanKind.MANUAL, base.epoch),
            kind=PlanKind.MANUAL,
            policy=name,
            reason=Reason.MANUAL_REQUEST,
            created_at=unix,
            expires_at=unix + policy.proposal_ttl_s,
            numbers=finite(result.numbers),
        )
        starts = request.approve or (policy.mode is Mode.AUTO and not request.dry_run)
        return await self._submit(plan, starts, request.requested_by, digest)

    async def rollback(
        self, to_epoch: Epoch | None, by: str, plan_id: PlanId | None = None
    ) -> PlanRecord:
        """Plan and start the way back to an earlier epoch's placement (R16)."""
        deployment, control = self._deployment, self._deployment.control
        digest = _digest({"kind": PlanKind.ROLLBACK.value, "to_epoch": to_epoch})
        # Before the target is sought: once a rollback is carried out, the way back leads to what it left.
        known = await self._asked_before(plan_id, digest)
        if known is not None:
            return known
        epoch, target = deployment.operator.rollback_target(to_epoch)
        base, shape = self.base(), control.membership.shape
        assert shape is not None
        request = WaveRequest(
            base.placement, target, shape, self.topology(), control.membership.staging_bytes()
        )
        waves = await deployment.outside.planner.run(build_waves, request)
        if not waves:
            raise Conflict(f"the placement of epoch {epoch} is the present one", Reason.NO_CHANGE)
        plan = base.plan(
            target,
            waves,
            plan_id=plan_id or new_plan_id(PlanKind.ROLLBACK, base.epoch),
            kind=PlanKind.ROLLBACK,
            policy="rollback",
            reason=Reason.MANUAL_REQUEST,
            created_at=deployment.outside.clock.unix(),
            expires_at=None,
            numbers={"to_epoch": float(epoch)},
        )
        return await self._submit(plan, True, by, digest)

    async def _asked_before(self, plan_id: PlanId | None, digest: str) -> PlanRecord | None:
        """The plan of a request that is repeated with the id it chose.

        Raises:
            Conflict: another request has that id.
            Unavailable: the store cannot say, or still does not take the plan.
        """
        if plan_id is None:
            return None
        deployment, control = self._deployment, self._deployment.control

        def look(_now: float) -> tuple[PlanRecord | None, list[ctl.ControlAction]]:
            known = control.records.same_request(plan_id, digest)
            # The first call may have failed for the store's sake: what it left to write is written before this is answered.
            return known, control.outgoing([], flush=known is not None)

        known = await deployment.driver.call(look)
        if known is not None:
            return known
        stored = await deployment.outside.store.fetch_plans(deployment.deployment, [plan_id])
        return repeated(stored[0], digest) if stored else None

    async def _submit(self, plan: Plan, starts: bool, by: str, digest: str) -> PlanRecord:
        deployment = self._deployment
        try:
            return await deployment.driver.call(
                lambda now: deployment.operator.submit(
                    plan, now, approve=starts, by=by, request_digest=digest
                )
            )
        except Unavailable as error:
            # It may be carried out all the same: its id is where the caller can look, and what makes a repetition harmless.
            raise Unavailable(f"plan {plan.plan_id}: {error}", error.reason) from error


def request_digest(request: PlanRequest) -> str:
    """Digest of all that makes two requests the same; who asks does not."""
    form = {
        "policy": request.policy,
        "limits": asdict(request.limits),
        "phases": sorted(request.phases),
        "dry_run": request.dry_run,
        "approve": request.approve,
        "target": None if request.target is None else request.target.digest,
    }
    return _digest(form)


def _digest(form: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(form, sort_keys=True).encode(), digest_size=16).hexdigest()


def _tighter(one: PlanLimits, other: PlanLimits) -> PlanLimits:
    """Both bounds at once."""
    pairs = zip(asdict(one).items(), asdict(other).values(), strict=True)
    return PlanLimits(
        **{name: min((v for v in (a, b) if v is not None), default=None) for (name, a), b in pairs}
    )


def _refusal(result: CycleResult) -> EvenkeelError:
    """Why no plan came of a request, as the error the caller gets."""
    numbers = ", ".join(
        f"{name} {value:.6g}" for name, value in sorted(finite(result.numbers).items())
    )
    words = f"{result.reason}: {result.detail or numbers or 'no numbers'}"
    if result.reason in _INFEASIBLE:
        return InfeasiblePlan(words, result.reason)
    return Conflict(words, result.reason)
