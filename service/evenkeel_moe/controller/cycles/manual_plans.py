"""Makes the plans and rollbacks that operators ask for."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase, build_evacuation, finite
from evenkeel_moe.controller.cycles.input_builder import InputBuilder
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.controller.policy_document import change_policy
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.errors import (
    Conflict,
    EvenkeelError,
    InfeasiblePlan,
    InvalidInput,
    NotFound,
    Reason,
    Unavailable,
)
from evenkeel_moe.model.finding import LIVE_CODES
from evenkeel_moe.model.hold import Retirement
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanLimits, PlanPhase, PlanRecord, Wave
from evenkeel_moe.model.quantities import figure, figure_name, numbered
from evenkeel_moe.planning.decision.cycle import CycleResult
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.schedule.width_change import check_retired
from evenkeel_moe.ports.operations import (
    PlanRequest,
    RecordedEpoch,
    ResizeRequest,
    RollbackRequest,
)
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.leader.plan_records import require_same_request
from evenkeel_moe.telemetry.swap_stalls import SwapStalls

_INFEASIBLE = frozenset(
    {
        Reason.EXPERT_WITHOUT_REPLICA,
        Reason.EXPERT_OUT_OF_RANGE,
        Reason.DUPLICATE_ON_RANK,
        Reason.EMPTY_SLOTS,
        Reason.POOL_EXCEEDED,
        Reason.MEMORY_EXCEEDED,
        Reason.NO_SOURCE,
        Reason.LIMIT_EXCEEDED,
        Reason.STAGING_TOO_SMALL,
        Reason.PLANNER_FAILED,
    }
)


@dataclass(eq=False, repr=False)
class ManualPlanner:
    """The operators' plans for one deployment."""

    control: DeploymentState
    builder: InputBuilder
    inbox: MachineInbox
    stalls: SwapStalls
    shared: SharedServices

    async def create(self, request: PlanRequest) -> PlanRecord:
        """Make a plan: a proposal, or one that starts at once if the request says so.

        The same id and body give the same plan. Of a dry run nothing is kept.

        Raises:
            InvalidInput: the request contradicts itself, or names an unknown policy.
            Conflict: another request has the id, or a gate is closed.
            InfeasiblePlan: no plan satisfies the limits.
            Unavailable: the planner is starting or failed, the store failed, or this replica does
                not lead.
        """
        if request.dry_run and request.approve:
            raise InvalidInput("dry_run keeps nothing, approve starts at once: not both")
        digest = request_digest(request)
        known = None if request.dry_run else await self._repeated(request.plan_id, digest)
        if known is not None:
            return known
        policy = change_policy(self.control.policy, request.changes)
        name = "explicit" if request.target is not None else request.policy or policy.policy
        if request.target is None:
            find_policy(name)
        elif request.changes:
            raise InvalidInput(f"{', '.join(request.changes)} tell how to plan, target is a plan")
        base = PlanBase.current(self.control)
        if request.target == base.placement:
            raise Conflict("the target is the present placement", Reason.NO_CHANGE)
        if request.approve:  # Before planning, which takes long.
            self.control.require_free(PlanKind.MANUAL, self.shared.clock.monotonic())
        await self.shared.planner.wait_until_warm()
        limits = _tighter(policy.limits, request.limits)
        phases = request.phases or tuple(Phase)
        inputs = replace(
            self.builder.build(base, name, limits, phases, request=request),
            policy_options=policy.policy_options,
            replica_budget=policy.replica_budget,
        )
        result = await self.builder.budget.run(self.shared.planner, inputs)
        if not result.passed or result.target is None:
            raise _refusal(result, self.control.deployment)
        unix = self.shared.clock.unix()
        plan = base.plan(
            result.target,
            result.waves,
            plan_id=request.plan_id,
            kind=PlanKind.MANUAL,
            policy=name,
            reason=Reason.MANUAL_REQUEST,
            created_at=unix,
            expires_at=unix + policy.proposal_ttl_s,
            numbers=result.numbers,
            stalls=self.stalls,
            cost_source=inputs.objective.cost.source,
        )
        if request.dry_run:
            self.control.check_plan(plan)
            return PlanRecord(plan, PlanPhase.PROPOSED, plan.reason, 0, unix)
        return await self._submit(
            ctl.PlanSubmitted(plan, request.approve, request.requested_by, digest)
        )

    async def resize(self, request: ResizeRequest) -> None:
        """Let ranks retire, and start the plan that leaves no expert on them alone (R16).

        While ranks retire, as many as are asked for are those. A repeated request changes nothing
        while their evacuation runs, and later moves what has come to live on them alone.

        Raises:
            InvalidInput: the request names no ranks, or ranks that cannot retire.
            Conflict: STALE_BASE if the group has another number of ranks than the caller takes it
                to have, RESIZING if other ranks retire, WRONG_PHASE if the plan of this id has
                ended and experts live on these ranks alone, or a gate is closed.
            InfeasiblePlan: the other ranks have no room for all experts.
            Unavailable: the planner is starting or failed, the store failed, or this replica does
                not lead.
        """
        base, shape = PlanBase.current(self.control), self.control.membership.shape
        assert shape is not None
        _check_resize(request, shape.num_ranks)
        before, active = self.control.hold.retiring, self.control.records.active
        named: tuple[int, ...] = request.retire
        if before is not None and request.to_ranks == before.num_ranks - len(before.ranks):
            named = before.ranks
        if active is not None and active.plan.kind is PlanKind.EVACUATION and before is not None:
            if tuple(sorted(named)) == before.ranks:
                # Writes of the first request that failed are tried again.
                again = ctl.RequestRepeated(active.plan.plan_id, active.request_digest)
                return await self.inbox.request(again)
        self.control.require_free(PlanKind.EVACUATION, self.shared.clock.monotonic())
        await self.shared.planner.wait_until_warm()
        inputs = self.builder.build(base, self.control.policy.policy, PlanLimits())
        stay = request.to_ranks or shape.num_ranks
        retire, target, waves = await self.shared.planner.run(
            build_evacuation, inputs, named, stay, request.whole_nodes
        )
        plan = self._at_once(base, PlanKind.EVACUATION, request.plan_id, target, waves, {})
        digest = _digest({"kind": PlanKind.EVACUATION.value, "retire": retire})
        ranks = tuple(EpRank(rank) for rank in retire)
        retiring = Retirement(ranks, shape.num_ranks)
        known = None
        if waves and self.control.hold.retiring in (None, retiring):
            known = await self._repeated(request.plan_id, digest)
        if known is not None and known.phase.terminal:
            if self.control.placement != base.placement:
                return await self.resize(request)  # The experts may live elsewhere by now.
            raise Conflict(
                f"plan {request.plan_id} is {known.phase_text}, and experts live on ranks"
                f" {numbered(retire)} alone: name another plan_id, or none"
            )
        by = request.requested_by
        # Without bounds: a rank can only retire once all its experts live elsewhere too.
        submitted = ctl.PlanSubmitted(plan, True, by, digest, bounded=False) if waves else None
        await self.inbox.request(ctl.RanksRetired(retiring, base.placement, submitted))

    async def epochs(self) -> list[RecordedEpoch]:
        """Return the recorded placements: the group's history, newest first, then replaced ones.

        Raises:
            Unavailable: the store, which holds the replaced ones, does not answer.
        """
        control = self.control
        replaced = await self.shared.store.fetch_replaced_epochs(control.deployment)
        history = sorted(control.history.items(), key=lambda row: -row[0])
        return [
            *(RecordedEpoch(epoch, placement, False) for epoch, placement in history),
            *(RecordedEpoch(epoch, placement, True) for epoch, placement in replaced),
        ]

    async def rollback(self, request: RollbackRequest) -> PlanRecord:
        """Plan and start the return to a recorded placement (R16).

        Raises:
            InvalidInput: the request names both an epoch and a placement, or the placement has
                another shape than the group.
            NotFound, Conflict: there is no such placement, it is the present one, or a limit of the
                policy does not allow it.
            Unavailable: the planner is starting or failed, the store failed, or this replica does
                not lead.
        """
        plan_id = request.plan_id
        target_named: dict[str, Any] = {"to_epoch": request.to_epoch}
        if request.to_placement is not None:
            target_named |= {"to_placement": request.to_placement}
        digest = _digest({"kind": PlanKind.ROLLBACK.value, **target_named})
        # Look for a repeated request first: once a rollback is carried out, the epoch before the
        # last plan is the one that the rollback left.
        known = await self._repeated(plan_id, digest)
        if known is not None:
            return known
        plan = await self.rollback_plan(request)
        return await self._submit(
            ctl.PlanSubmitted(plan, True, request.requested_by, digest, request.bounded)
        )

    async def rollback_plan(self, request: RollbackRequest) -> Plan:
        """Make the plan of a rollback. Nothing is started or stored.

        Raises:
            InvalidInput, NotFound, Conflict, Unavailable: as `rollback`, without the limits.
        """
        epoch, target = await self._rollback_target(request)
        base, membership = PlanBase.current(self.control), self.control.membership
        assert membership.shape is not None
        await self.shared.planner.wait_until_warm()
        waves = await self.shared.planner.run(
            schedule_waves,
            base.placement,
            target,
            membership.shape,
            self.builder.loads.topology(),
            membership.staging_bytes(),
        )
        if not waves:
            raise Conflict(f"the placement of epoch {epoch} is the present one", Reason.NO_CHANGE)
        kind, numbers = PlanKind.ROLLBACK, {"to_epoch": float(epoch)}
        return self._at_once(base, kind, request.plan_id, target, waves, numbers)

    def _at_once(
        self,
        base: PlanBase,
        kind: PlanKind,
        plan_id: PlanId | None,
        target: Placement,
        waves: tuple[Wave, ...],
        numbers: dict[str, float],
    ) -> Plan:
        """Return a plan that an operator starts at once, made by no policy."""
        return base.plan(
            target,
            waves,
            plan_id=plan_id,
            kind=kind,
            policy=kind.value,
            reason=Reason.MANUAL_REQUEST,
            created_at=self.shared.clock.unix(),
            expires_at=None,
            numbers=numbers,
            stalls=self.stalls,
        )

    async def _rollback_target(self, request: RollbackRequest) -> tuple[Epoch, Placement]:
        digest = request.to_placement
        if digest is None:
            return self.control.rollback_target(request.to_epoch)
        if request.to_epoch is not None:
            raise InvalidInput("a rollback leads to an epoch or to a placement: name one of them")
        present = PlanBase.current(self.control).placement
        for row in await self.epochs():
            if row.placement.digest == digest:
                row.placement.check_sizes(present)
                return row.epoch, row.placement
        raise NotFound(f"no placement {digest} is recorded")

    async def _repeated(self, plan_id: PlanId | None, digest: str) -> PlanRecord | None:
        """Return the plan of a request that was made before under the id it chose.

        Raises:
            Conflict: another request has that id.
            Unavailable: the store does not answer, or still does not take the plan.
        """
        if plan_id is None:
            return None
        await self.inbox.request(ctl.RequestRepeated(plan_id, digest))
        known = self.control.records.by_id.get(plan_id)
        if known is not None:
            return known
        stored = await self.shared.store.fetch_plans(self.control.deployment, [plan_id])
        return require_same_request(stored[0], digest) if stored else None

    async def _submit(self, submitted: ctl.PlanSubmitted) -> PlanRecord:
        try:
            return await self.inbox.request_plan(submitted)
        except Unavailable as error:
            # The plan may still be carried out. With its id the caller can look it up, and can
            # repeat the request without making a second plan.
            raise Unavailable(f"plan {submitted.plan_id}: {error}", error.reason) from error


def _check_resize(request: ResizeRequest, num_ranks: int) -> None:
    """Check that ranks of a group can retire as asked.

    Raises:
        InvalidInput, Conflict: as `ManualPlanner.resize`.
    """
    if request.from_ranks not in (None, num_ranks):
        raise Conflict(
            f"the group has {num_ranks} ranks, not {request.from_ranks}", Reason.STALE_BASE
        )
    if (request.to_ranks is None) == (not request.retire):
        raise InvalidInput("name the number of ranks that stay, or the ranks that retire")
    check_retired(request.retire, num_ranks)
    if request.to_ranks is not None and not 0 < request.to_ranks < num_ranks:
        raise InvalidInput(
            f"{request.to_ranks} of {num_ranks} ranks cannot stay: at least 1 stays and 1 retires."
            " A group grows without an evacuation, by ranks that join it"
        )


def request_digest(request: PlanRequest) -> str:
    """Return a digest of everything in a request but its id and its author."""
    form = {
        "policy": request.policy,
        "limits": asdict(request.limits),
        **request.changes,
        "phases": sorted(request.phases),
        "approve": request.approve,
        "target": None if request.target is None else request.target.digest,
    }
    return _digest(form)


def _digest(form: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(form, sort_keys=True).encode(), digest_size=16).hexdigest()


def _tighter(one: PlanLimits, other: PlanLimits) -> PlanLimits:
    """Return limits that satisfy both."""
    pairs = zip(asdict(one).items(), asdict(other).values(), strict=True)
    return PlanLimits(
        **{name: min((v for v in (a, b) if v is not None), default=None) for (name, a), b in pairs}
    )


_FIGURES: Mapping[Reason, tuple[str, ...]] = {
    Reason.NO_CHANGE: ("balancedness_mean",),
    Reason.RANKS_MISSING: ("ranks_fresh", "ranks_expected"),
    Reason.IMPLAUSIBLE_COUNTS: LIVE_CODES,
    Reason.INSUFFICIENT_DATA: ("window_steps", "min_window_steps"),
    Reason.STALE_DATA: ("newest_step_age_s", "max_data_age_s"),
    Reason.LIMIT_EXCEEDED: ("copies", "max_copies", "bytes", "max_bytes", "layers", "max_layers"),
}
"""These figures of a cycle say why there is no plan; for other reasons all figures are shown."""


def _refusal(result: CycleResult, deployment: str) -> EvenkeelError:
    """Return the error that tells a caller why there is no plan."""
    known = finite(result.numbers)
    names = _FIGURES.get(result.reason, sorted(known))
    words = f"{result.reason}: {result.detail}"
    if not result.detail:
        limited = result.reason is Reason.LIMIT_EXCEEDED  # Also a figure that is not known.
        shown = [name for name in names if name in known or (limited and f"max_{name}" in known)]
        figures = ", ".join(
            f"{figure_name(name)} {figure(name, known.get(name))}" for name in shown
        )
        said = sentence(result.reason)[:-1]
        enough = known.get("window_steps", 0.0) >= known.get("min_window_steps", math.inf)
        if result.reason is Reason.INSUFFICIENT_DATA and enough:
            said = "The steps of the window have no load"
        words = ": ".join(filter(None, [said, figures]))
    if result.reason is Reason.IMPLAUSIBLE_COUNTS:
        words += f" (`evenkeel status {deployment}`)"
    if result.reason in _INFEASIBLE:
        return InfeasiblePlan(words, result.reason)
    return Conflict(words, result.reason)
