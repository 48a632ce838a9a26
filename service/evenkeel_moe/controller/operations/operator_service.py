"""Answers what operators ask and change through REST, for the deployments of this replica."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.controller.deployment.deployment_registry import DeploymentRegistry
from evenkeel_moe.controller.leadership.leader_lookup import LeaderLookup
from evenkeel_moe.controller.logs import log_level, set_log_level
from evenkeel_moe.controller.operations.audit import AuditLog
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.controller.policy_document import change_policy, policy_document
from evenkeel_moe.errors import Conflict, InvalidInput, NotFound, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, PlanId
from evenkeel_moe.model.plan import Plan, PlanRecord
from evenkeel_moe.planning.decision.capacity import CapacityRequest
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.problem.placement_problem import SlotBudget
from evenkeel_moe.ports.operations import (
    Advice,
    AuditEntry,
    CapacityAdvice,
    DeploymentView,
    LedElsewhere,
    NotLeading,
    PlanRequest,
    QuarantineRow,
    QuarantineSample,
    RecordedEpoch,
    ResizeRequest,
    RollbackRequest,
)
from evenkeel_moe.ports.status import ResizeStatus
from evenkeel_moe.ports.stores import DeploymentStore
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.settings import never_met

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class OperatorService:
    """`ports.Operations` over the deployments of a registry; errors are described there."""

    def __init__(self, registry: DeploymentRegistry) -> None:
        shared = registry.shared
        self._registry = registry
        self._store = shared.store
        self._windows = shared.windows
        self._health = shared.health
        self._planner = shared.planner
        self._plan_steps = registry.options.cycle.plan_steps
        self._audit = AuditLog(shared.store, shared.health, shared.clock)
        self._lookup = LeaderLookup(shared.store, shared.health, registry.options.leader.replica_id)

    # --- finding a deployment ---------------------------------------------------------------------

    def _here(self, name: DeploymentId) -> Deployment | None:
        """Return a deployment whose state in memory is current; None if there is none."""
        deployment = self._registry.deployments.get(name)
        return deployment if deployment is not None and self._is_current(deployment) else None

    def _all_here(self) -> list[Deployment]:
        return [one for one in self._registry.deployments.values() if self._is_current(one)]

    def _is_current(self, deployment: Deployment) -> bool:
        """Return True if this replica leads.

        While the store is away nobody can take the lease: then the replica that led last still
        counts the reports of its ranks.
        """
        if deployment.keeper.leading:
            return True
        return bool(self._health.fault) and any(deployment.ranks.registered())

    async def _readable(self, name: DeploymentId) -> Deployment:
        """Return a deployment that can be read from memory.

        Raises:
            NotLeading: another replica leads it, or nobody.
            NotFound: no replica ever led it, or it was evicted.
            Unavailable: the store is out of reach, so that nobody knows.
        """
        deployment = self._here(name)
        if deployment is None:
            raise NotLeading(await self._leader_of(name))
        return deployment

    async def _changeable(self, name: DeploymentId) -> Deployment:
        """Return a deployment that this replica leads.

        Raises:
            NotLeading, NotFound: as `_readable`.
            Unavailable: a change could not be stored now.
        """
        deployment = await self._readable(name)
        self._health.check()
        if not deployment.keeper.leading:
            raise NotLeading(await self._leader_of(name))
        return deployment

    async def _leader_of(self, name: DeploymentId) -> LedElsewhere:
        now = self._registry.shared.clock.monotonic()
        failure = self._registry.failures.waiting(name, now)
        if failure is not None:
            raise Unavailable(
                f"{name} failed on this replica and starts again in {failure.left_s(now):.0f} s:"
                f" {failure.detail}",
                Reason.DEPLOYMENT_FAILED,
            )
        led = await self._lookup.leader(name)
        if led is not None:
            return led
        known = self._registry.deployments.get(name)
        if known is not None and known.ranks.by_stream:
            # Its ranks are here, so it exists: the store lost its data.
            return LedElsewhere(name, None, None)
        raise NotFound(f"no deployment {name} is known")

    async def _stored(self, ask: Callable[[DeploymentStore], Awaitable[_T]]) -> _T | None:
        """Return the store's answer; None while the store is out of reach."""
        try:
            return await self._health.ask(lambda: ask(self._store))
        except Unavailable:
            return None

    # --- reading ----------------------------------------------------------------------------------

    async def deployments(self) -> Sequence[DeploymentView]:
        """Return the deployments that can be read from memory and whose shape is known."""
        return [LiveView(one) for one in self._all_here() if one.loads.shape is not None]

    async def led_elsewhere(self) -> Sequence[LedElsewhere]:
        """Return the deployments that this replica does not lead; see `LeaderLookup.all`."""
        here = [one.deployment for one in self._all_here()]
        return await self._lookup.all(here, list(self._registry.deployments))

    async def deployment(self, deployment: DeploymentId) -> DeploymentView:
        """Return the view of one deployment."""
        known = await self._readable(deployment)
        if known.loads.shape is None:
            raise NotFound(f"no rank of {deployment} has connected yet")
        return LiveView(known)

    async def _plans_in_memory(self, deployment: DeploymentId) -> Mapping[PlanId, PlanRecord]:
        """Return the plans in memory; none if this replica does not lead, for they are outdated."""
        known = self._here(deployment)
        if known is not None:
            return known.control.records.by_id
        await self._leader_of(deployment)
        return {}

    async def plans(
        self, deployment: DeploymentId, limit: int, after: PlanId | None = None
    ) -> tuple[Sequence[PlanRecord], bool]:
        """Return a page of plan records, newest first, and True if more follow.

        While the store is out of reach, only the plans in memory.

        Raises:
            InvalidInput: the plan `after` is not known any more.
            Unavailable: the page is only in the store, and that is out of reach.
        """
        records = dict(await self._plans_in_memory(deployment))
        order = {plan_id: record.plan.created_at for plan_id, record in records.items()}
        listed = await self._stored(lambda store: store.plan_order(deployment))
        if listed is not None:
            names, more = _page_of_plans(dict(listed) | order, limit, after)
            found = {name: records[name] for name in names if name in records}
            others = [name for name in names if name not in found]
            stored = await self._stored(lambda store: store.fetch_plans(deployment, others))
            if stored is not None:
                found |= {record.plan.plan_id: record for record in stored}
                return [found[name] for name in names if name in found], more
        if after is not None or self._here(deployment) is None:
            raise self._health.unreachable()
        names, more = _page_of_plans(order, limit, None)
        return [records[name] for name in names], more

    async def plan(self, deployment: DeploymentId, plan_id: PlanId) -> PlanRecord:
        """Return one plan record with its story."""
        record = (await self._plans_in_memory(deployment)).get(plan_id)
        if record is not None:
            return record
        stored = await self._stored(lambda store: store.fetch_plans(deployment, [plan_id]))
        if stored is None:
            raise self._health.unreachable()
        if not stored:
            raise NotFound(f"no plan {plan_id}")
        return stored[0]

    async def epochs(self, deployment: DeploymentId) -> Sequence[RecordedEpoch]:
        """Return the recorded placements: the group's history, newest first, then replaced ones."""
        return await (await self._readable(deployment)).planner.manual.epochs()

    async def policy(self, deployment: DeploymentId) -> Mapping[str, Any]:
        """Return the policy document."""
        return policy_document((await self._readable(deployment)).control.policy)

    async def decisions(self, deployment: DeploymentId, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return the decision log, newest first; the leader's own rows while the store is away."""
        here = self._here(deployment)
        if here is None:
            await self._leader_of(deployment)
        if here is None or not here.is_new:
            rows = await self._stored(lambda store: store.fetch_decisions(deployment, limit))
            if rows is not None:
                return rows
        return list(reversed((await self._readable(deployment)).decisions))[:limit]

    async def recommendation(self, deployment: DeploymentId, max_age_s: float | None) -> Advice:
        """Return a recommendation; a kept one if it is young enough. Nothing is moved."""
        known = await self._readable(deployment)
        return await known.planner.recommender.recommendation(max_age_s)

    async def capacity(self, deployment: DeploymentId, request: CapacityRequest) -> CapacityAdvice:
        """Compare numbers of ranks. Nothing is moved."""
        known = await self._readable(deployment)
        return await known.planner.recommender.capacity(request)

    async def quarantine(self, deployment: DeploymentId) -> Sequence[QuarantineRow]:
        """Return the rejected parts of the ranks' reports, by reason."""
        kept = (await self._readable(deployment)).loads.ingest.quarantine
        return [
            QuarantineRow(
                reason.value,
                steps,
                tuple(QuarantineSample(int(rank), words) for rank, words in kept.samples(reason)),
            )
            for reason, steps in sorted(kept.rank_steps.items())
            if steps
        ]

    async def audit(
        self, deployment: DeploymentId | None, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return audit rows, newest first; only those in memory while the store is away."""
        if deployment is None:
            return self._audit.in_memory(None, limit)
        if deployment not in self._registry.deployments:
            await self._leader_of(deployment)
        rows = await self._stored(lambda _store: self._audit.rows(deployment, limit))
        return self._audit.in_memory(deployment, limit) if rows is None else rows

    def log_level(self) -> str:
        """Return the log level of this replica."""
        return log_level()

    def set_log_level(self, level: str, by: str) -> None:
        """Set the log level until the next start."""
        set_log_level(level, by)

    async def healthy(self) -> Mapping[str, str]:
        """Return `ok` or the fault of each component.

        `first_answer` is of the store too: an address that never answered may be wrong.
        """
        health = self._health
        return {
            "store": health.fault or "ok",
            "first_answer": "ok" if health.has_answered else "the store has not answered yet",
            "planner": self._planner.fault or "ok",
        }

    # --- changing ---------------------------------------------------------------------------------

    async def create_plan(self, deployment: DeploymentId, request: PlanRequest) -> PlanRecord:
        """Make a plan by hand. The same id and body give the same plan."""
        return await (await self._changeable(deployment)).planner.manual.create(request)

    async def approve(
        self, deployment: DeploymentId, plan_id: PlanId, by: str, bounded: bool = True
    ) -> PlanRecord:
        """Start a proposed plan; Conflict(STALE_BASE) if the epoch moved (R16)."""
        return await self._change_plan(deployment, ctl.PlanApproved(plan_id, by, bounded))

    async def cancel(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Stop a plan; after the votes it takes effect at the next wave (R16)."""
        return await self._change_plan(deployment, ctl.PlanCancelled(plan_id, by))

    async def _change_plan(
        self, deployment: DeploymentId, request: ctl.PlanApproved | ctl.PlanCancelled
    ) -> PlanRecord:
        known = await self._changeable(deployment)
        try:
            return await known.inbox.request_plan(request)
        except NotFound:
            # The leader forgets the oldest of many ended plans; the store may still have the plan.
            record = await self.plan(deployment, request.plan_id)
            raise Conflict(f"plan {request.plan_id} is {record.phase_text}") from None

    async def rollback(self, deployment: DeploymentId, request: RollbackRequest) -> PlanRecord:
        """Return to a recorded placement and hold `auto`. The same id and target, the same plan."""
        return await (await self._changeable(deployment)).planner.manual.rollback(request)

    async def rollback_plan(self, deployment: DeploymentId, request: RollbackRequest) -> Plan:
        """Return the plan that such a rollback would carry out; nothing is started or stored."""
        known = await self._changeable(deployment)
        return await known.planner.manual.rollback_plan(request)

    async def resize(self, deployment: DeploymentId, request: ResizeRequest) -> ResizeStatus:
        """Let ranks retire, and move the experts away that live on them alone."""
        known = await self._changeable(deployment)
        await known.planner.manual.resize(request)
        status = LiveView(known).resize()
        assert status is not None
        _log.info(
            "resize_asked", deployment=deployment, retire=status.retire, by=request.requested_by
        )
        return status

    async def resume(self, deployment: DeploymentId, by: str) -> None:
        """End a freeze, a retirement of ranks, and the hold on automatic plans."""
        known = await self._changeable(deployment)
        _log.info("resumed", deployment=deployment, by=by)
        await known.inbox.request(ctl.AutomaticPlansResumed())

    async def freeze(self, deployment: DeploymentId, seconds: float, by: str) -> None:
        """Begin no plan for that many seconds; 0 ends a freeze."""
        known = await self._changeable(deployment)
        _log.info("frozen", deployment=deployment, seconds=seconds, by=by)
        await known.inbox.request(ctl.PlansFrozen(seconds))

    async def set_policy(
        self,
        deployment: DeploymentId,
        changes: Mapping[str, Any],
        by: str,
        base: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Change the policy; return the whole policy document.

        Raises:
            Conflict: it has changed since it was read.
            InvalidInput, InfeasiblePlan: no plan could keep to it.
            Unavailable: another replica leads.
        """
        known = await self._changeable(deployment)

        def change(now: float) -> tuple[Mapping[str, Any], list[ctl.ControlAction]]:
            if known.control.leader is None:
                raise Unavailable("this replica does not lead the deployment", Reason.NOT_LEADER)
            # Compared here and not by the caller: another change may be applied first.
            if base is not None and base != policy_document(known.control.policy):
                raise Conflict(
                    "the policy document has changed since it was read", Reason.STALE_BASE
                )
            policy = change_policy(known.control.policy, changes)
            gates = GateSettings.from_thresholds(policy.thresholds)
            # Checked only when thresholds change: a stored one must not prevent another change.
            if "thresholds" in changes and (words := [*never_met(gates, self._plan_steps)]):
                raise InvalidInput("; ".join(words))
            shape = known.control.membership.shape
            if "replica_budget" in changes and shape is not None:
                SlotBudget.of_shape(shape, policy.replica_budget)
            document = policy_document(policy)
            actions = known.control.handle(ctl.PolicySet(policy, document), now)
            _log.info("policy_changed", deployment=deployment, changes=dict(changes), by=by)
            return document, actions

        return await known.inbox.call(change)

    async def clear_quarantine(self, deployment: DeploymentId, by: str) -> None:
        """Reset the counts and samples of rejected reports; the metrics keep counting."""
        known = await self._readable(deployment)
        _log.info("quarantine_cleared", deployment=deployment, by=by)
        known.loads.ingest.clear_quarantine()

    async def forget(self, deployment: DeploymentId, by: str) -> None:
        """Let a deployment go: lease, memory, series and stored windows. Plans stay stored."""
        if (registered := self._registry.deployments.get(deployment)) is not None:
            await self._registry.seek_lease(registered)
        known = await self._changeable(deployment)
        if known.ranks.by_stream:
            raise Conflict(
                f"{len(known.ranks.by_stream)} ranks of {deployment} are connected", Reason.BUSY
            )
        _log.info("forget_asked", deployment=deployment, by=by)
        await self._windows.forget(deployment)
        if not known.ranks.by_stream:
            await self._registry.let_go(known)

    # --- records of requests ----------------------------------------------------------------------

    async def record(self, entry: AuditEntry) -> None:
        """Record who asked for what; stored if this replica leads the deployment."""
        name = entry.deployment
        known = None if name is None else self._registry.deployments.get(name)
        term = known.leadership.term if known is not None and known.keeper.leading else None
        await self._audit.record(entry, term)


def _page_of_plans(
    order: Mapping[PlanId, float], limit: int, after: PlanId | None
) -> tuple[Sequence[PlanId], bool]:
    """Return the page after a plan, newest plan first, and True if more plans follow.

    Args:
        order: creation time of each plan.
        limit: most plans on the page.
        after: last plan of the page before; None for the first page.

    Raises:
        InvalidInput: the plan `after` is not known any more.
    """
    names = sorted(order, key=lambda name: (order[name], name), reverse=True)
    if after is not None and after not in order:
        raise InvalidInput(
            f"plan {after}, after which to go on, is not known here; start again at the first page"
        )
    start = 0 if after is None else names.index(after) + 1
    return names[start : start + limit], start + limit < len(names)
