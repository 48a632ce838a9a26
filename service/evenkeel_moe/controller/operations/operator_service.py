"""All deployments of this replica: where rank streams arrive and operators ask."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.deployment.deployment import Deployment, DeploymentOptions, Outside
from evenkeel_moe.controller.deployment.idle_eviction import gives_way, is_over
from evenkeel_moe.controller.leadership.leader_lookup import Elsewhere
from evenkeel_moe.controller.logs import log_level, set_log_level
from evenkeel_moe.controller.operations.answers import AnswerLog
from evenkeel_moe.controller.operations.audit import AuditLog
from evenkeel_moe.controller.operations.plan_pages import page_of_plans
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.controller.policy_document import change_policy, policy_document
from evenkeel_moe.controller.ranks.session import Session
from evenkeel_moe.errors import Conflict, InvalidInput, NotFound, PeerViolation, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.ports import (
    Advice,
    AuditEntry,
    DeploymentStore,
    DeploymentView,
    KeptAnswer,
    LedElsewhere,
    NotLeading,
    PlanRequest,
    QuarantineRow,
)
from evenkeel_moe.protocol.control_messages import ControlAction
from evenkeel_moe.protocol.leader.operator import Operator
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.settings import never_met
from evenkeel_moe.wire.link import FlowControl, NotLeader, Registration, RegistrationOutcome

__all__ = ["Fleet"]

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_LEASE_WAIT_S = 3.0


class Fleet:
    """`adapters.grpc_server.RankHub` and `ports.Operations` over this replica's deployments."""

    def __init__(
        self, options: DeploymentOptions, outside: Outside, *, max_deployments: int
    ) -> None:
        self.members: dict[DeploymentId, Deployment] = {}
        self._options = options
        self._outside = outside
        self._max_deployments = max_deployments
        self._flow = options.flow
        self._audit = AuditLog(outside.store, outside.health, outside.clock)
        self._answers = AnswerLog(outside.store, outside.health, outside.clock)
        self._elsewhere = Elsewhere(outside.store, outside.health, options.replica_id)

    def add(self, name: DeploymentId) -> Deployment:
        """The deployment of a name, made if it is new here."""
        known = self.members.get(name)
        if known is None:
            known = self.members[name] = Deployment(name, self._options, self._outside)
            if self._flow != self._options.flow:
                known.pace(self._flow)
            known.run_tasks()
        return known

    def pace(self, flow: FlowControl) -> None:
        """Have the ranks of every deployment report so, also of those that come later."""
        self._flow = flow
        for member in self.members.values():
            member.pace(flow)

    async def return_to(self, names: Sequence[DeploymentId]) -> None:
        """Take up again what this replica led when it went away, before its ranks are back.

        Raises:
            Unavailable: the store is out of reach.
        """
        for name in names:
            leader = await self._outside.store.fetch_document(name, "leader") or {}
            if (
                leader.get("replica_id") == self._options.replica_id
                and len(self.members) < self._max_deployments
            ):
                self.add(name).keeper.want()

    async def forget_idle(self, after_s: float) -> None:
        """Let go of deployments whose ranks have all been gone for that long."""
        for name in list(self.members):
            # Looked at when it is its turn: meanwhile its ranks may be back, or an operator let it go.
            member = self.members.get(name)
            if member is not None and is_over(member, after_s):
                await self._let_go(self.members.pop(name))

    async def _let_go(self, member: Deployment) -> None:
        """What is left to do for a deployment that is no member any more."""
        name = member.deployment
        _log.info("deployment_forgotten", deployment=name)
        await self._seek_lease(member)
        await member.leave(forgotten=True)
        if name not in self.members:
            self._outside.metrics.forget(name)

    async def _seek_lease(self, member: Deployment) -> None:
        """Take the lease of a deployment that nobody leads, as once its ranks are gone: only its leader can let go of it."""
        if not member.keeper.leading and not self._outside.health.resting:
            await member.keeper.decided(_LEASE_WAIT_S)

    # --- ranks ------------------------------------------------------------------------------------

    async def attach(self, hello: Hello, stream: RankStream) -> Session | None:
        """Register a rank; None when it was turned away."""
        name = hello.identity.deployment
        if name not in self.members and not self._make_room():
            detail = f"{len(self.members)} deployments are here, no more are taken"
            _log.error("deployment_refused", deployment=name, detail=detail)
            stream.close(self._refusal(Reason.LIMIT_EXCEEDED, detail))
            return None
        return await self.add(name).attach(hello, stream)

    def _make_room(self) -> bool:
        """Whether one more may come; a full table lets go of an idle deployment."""
        if len(self.members) < self._max_deployments:
            return True
        member = gives_way(self.members.values())
        if member is None:
            return False
        del self.members[member.deployment]
        self._outside.spawn(self._let_go(member), f"let-go-{member.deployment}")
        return True

    def refuse(self, violation: PeerViolation, stream: RankStream) -> None:
        """A first message that is no usable Hello."""
        _log.warning(
            "hello_refused", peer=stream.peer, reason=violation.reason, detail=str(violation)
        )
        stream.close(self._refusal(violation.reason, str(violation)))

    def _refusal(self, reason: Reason, detail: str) -> Registration:
        timing = self._options.timing
        return Registration(
            RegistrationOutcome.REFUSED,
            timing.heartbeat_s,
            timing.rank_lease_s,
            self._options.flow,
            reason,
            detail,
        )

    def say_goodbye(self) -> None:
        """End every stream: the ranks look for another replica, or wait for this one."""
        for deployment in self.members.values():
            for session in list(deployment.sessions.values()):
                session.stream.close(NotLeader("", "", self._options.renew_s))

    # --- operators: reading -------------------------------------------------------------------------

    async def deployments(self) -> Sequence[DeploymentView]:
        """All deployments this replica can tell of and knows the shape of."""
        return [LiveView(member) for member in self._known_here() if member.shape is not None]

    async def led_elsewhere(self) -> Sequence[LedElsewhere]:
        """Deployments that others lead, and those known here that nobody does; without the store only what is known here."""
        return await self._elsewhere.all(
            [one.deployment for one in self._known_here()], list(self.members)
        )

    def _known_here(self) -> list[Deployment]:
        return [member for member in self.members.values() if self._tells_of(member)]

    def _tells_of(self, member: Deployment) -> bool:
        """Whether what is in memory is so: this replica leads, or it led last, and counts on while nobody can lead."""
        counts = bool(self._outside.health.fault) and any(
            s.registered for s in member.sessions.values()
        )
        return member.keeper.leading or counts

    def _known(self, deployment: DeploymentId) -> Deployment | None:
        member = self.members.get(deployment)
        return member if member is not None and self._tells_of(member) else None

    async def _telling(self, deployment: DeploymentId) -> Deployment:
        """A deployment to be read from memory.

        Raises:
            NotLeading: another leads it, or nobody.
            NotFound: nobody ever led it, or it was let go of.
            Unavailable: the store is out of reach, so that nobody knows.
        """
        member = self._known(deployment)
        if member is None:
            raise NotLeading(await self._led_by(deployment))
        return member

    async def deployment(self, deployment: DeploymentId) -> DeploymentView:
        """One deployment."""
        member = await self._telling(deployment)
        if member.shape is None:
            raise NotFound(f"no rank of {deployment} has connected yet")
        return LiveView(member)

    async def _led_by(self, deployment: DeploymentId) -> LedElsewhere:
        led = await self._elsewhere.leader(deployment)
        if led is None and deployment in self.members and self.members[deployment].sessions:
            return LedElsewhere(
                deployment, None, None
            )  # Its ranks are here: the store was emptied.
        if led is None:
            raise NotFound(f"no deployment {deployment} is known")
        return led

    async def _plans_here(self, deployment: DeploymentId) -> Mapping[PlanId, PlanRecord]:
        """Plans in memory; none where this replica does not lead: what it remembers has gone on without it."""
        member = self._known(deployment)
        if member is not None:
            return member.control.records.by_id
        await self._led_by(deployment)
        return {}

    async def plans(
        self, deployment: DeploymentId, limit: int, after: PlanId | None = None
    ) -> tuple[Sequence[PlanRecord], bool]:
        """Plan records, newest first, and whether there are more; only those in memory while the store is out of reach.

        Raises:
            InvalidInput: no plan `after` is known any more.
            Unavailable: what comes after one is in the store, and that is out of reach.
        """
        records = dict(await self._plans_here(deployment))
        order = {plan_id: record.plan.created_at for plan_id, record in records.items()}
        listed = await self._stored(lambda store: store.plan_order(deployment))
        if listed is not None:
            names, more = page_of_plans(dict(listed) | order, limit, after)
            found = {name: records[name] for name in names if name in records}
            others = [name for name in names if name not in found]
            stored = await self._stored(lambda store: store.fetch_plans(deployment, others))
            if stored is not None:
                found |= {record.plan.plan_id: record for record in stored}
                return [found[name] for name in names if name in found], more
        if after is not None or self._known(deployment) is None:
            raise Unavailable(f"the store is out of reach: {self._outside.health.fault}")
        names, more = page_of_plans(order, limit, None)
        return [records[name] for name in names], more

    async def _stored(self, ask: Callable[[DeploymentStore], Awaitable[_T]]) -> _T | None:
        """What the store answers; None while it is out of reach."""
        if self._outside.health.resting:
            return None
        try:
            answer = await ask(self._outside.store)
            self._outside.health.answered()
            return answer
        except Unavailable as error:
            self._outside.health.failed(error)
            return None

    async def plan(self, deployment: DeploymentId, plan_id: PlanId) -> PlanRecord:
        """One plan record with its story."""
        record = (await self._plans_here(deployment)).get(plan_id)
        if record is not None:
            return record
        stored = await self._stored(lambda store: store.fetch_plans(deployment, [plan_id]))
        if stored is None:
            raise Unavailable(f"the store is out of reach: {self._outside.health.fault}")
        if not stored:
            raise NotFound(f"no plan {plan_id}")
        return stored[0]

    async def policy(self, deployment: DeploymentId) -> Mapping[str, Any]:
        """The policy document."""
        return policy_document((await self._telling(deployment)).control.policy)

    async def decisions(self, deployment: DeploymentId, limit: int) -> Sequence[Mapping[str, Any]]:
        """Decision log, newest first; the leader has only the rows in memory while the store is out of reach."""
        if self._known(deployment) is None:
            await self._led_by(deployment)
        rows = await self._stored(lambda store: store.fetch_decisions(deployment, limit))
        if rows is not None:
            return rows
        return list(reversed((await self._telling(deployment)).hands.decisions))[:limit]

    async def recommendation(self, deployment: DeploymentId, max_age_s: float | None) -> Advice:
        """What would pay now, and why; a kept answer if it is young enough. Moves nothing."""
        return await (await self._telling(deployment)).planning.what_if.recommendation(max_age_s)

    async def quarantine(self, deployment: DeploymentId) -> Sequence[QuarantineRow]:
        """What was rejected of the ranks' reports, by reason."""
        kept = (await self._telling(deployment)).ingest.quarantine
        return [
            QuarantineRow(
                reason.value,
                steps,
                tuple((int(rank), words) for rank, words in kept.samples(reason)),
            )
            for reason, steps in sorted(kept.rank_steps.items())
            if steps
        ]

    async def audit(
        self, deployment: DeploymentId | None, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Audit rows, newest first; only those in memory while the store is out of reach."""
        if deployment is None:
            return self._audit.here(None, limit)
        if deployment not in self.members:
            await self._led_by(deployment)
        if not self._outside.health.resting:
            try:
                return await self._audit.rows(deployment, limit)
            except Unavailable as error:
                self._outside.health.failed(error)
        return self._audit.here(deployment, limit)

    def log_level(self) -> str:
        """How much this replica says."""
        return log_level()

    def set_log_level(self, level: str, by: str) -> None:
        """Change it until the next start."""
        set_log_level(level, by)

    async def healthy(self) -> Mapping[str, str]:
        """Component -> `ok` or what is wrong."""
        return {
            "store": self._outside.health.fault or "ok",
            "planner": self._outside.planner.fault or "ok",
        }

    # --- operators: changing ------------------------------------------------------------------------

    async def _durable(self, deployment: DeploymentId) -> Deployment:
        """A deployment to be changed.

        Raises:
            Unavailable: the change could not be stored now.
        """
        member = await self._telling(deployment)
        if self._outside.health.resting:
            raise Unavailable(f"the store is out of reach: {self._outside.health.fault}")
        if not member.keeper.leading:
            raise NotLeading(await self._led_by(deployment))
        return member

    async def create_plan(self, deployment: DeploymentId, request: PlanRequest) -> PlanRecord:
        """Plan by hand. Same id and body: the same plan; same id, other body: Conflict(ID_REUSED)."""
        return await (await self._durable(deployment)).planning.by_hand(request)

    async def approve(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Start a proposed plan; Conflict(STALE_BASE) when the epoch moved (R16)."""
        return await self._change_plan(
            deployment, plan_id, lambda one, now: one.approve(plan_id, by, now)
        )

    async def cancel(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Stop a plan; after the votes it takes effect at the next wave (R16)."""
        return await self._change_plan(
            deployment, plan_id, lambda one, now: one.cancel(plan_id, by, now)
        )

    async def _change_plan(
        self,
        deployment: DeploymentId,
        plan_id: PlanId,
        change: Callable[[Operator, float], tuple[PlanRecord, list[ControlAction]]],
    ) -> PlanRecord:
        member = await self._durable(deployment)
        try:
            return await member.driver.call(lambda now: change(member.operator, now))
        except NotFound:
            # The leader forgets the oldest of many ended plans; the store may still know one.
            record = await self.plan(deployment, plan_id)
            raise Conflict(f"plan {plan_id} is {record.phase}") from None

    async def rollback(
        self,
        deployment: DeploymentId,
        to_epoch: Epoch | None,
        by: str,
        plan_id: PlanId | None = None,
    ) -> PlanRecord:
        """Return to an earlier epoch's placement (None: the one before the last plan) and hold `auto`.

        Same id and epoch: the same plan; same id, other epoch: Conflict(ID_REUSED).
        """
        return await (await self._durable(deployment)).planning.rollback(to_epoch, by, plan_id)

    async def resume(self, deployment: DeploymentId, by: str) -> None:
        """Let automatic plans run again after a rollback."""
        member = await self._durable(deployment)
        _log.info("resumed", deployment=deployment, by=by)
        await member.driver.call(lambda now: (None, member.operator.resume(now)))

    async def freeze(self, deployment: DeploymentId, seconds: float, by: str) -> None:
        """No new plan for that long; 0 thaws."""
        member = await self._durable(deployment)
        _log.info("frozen", deployment=deployment, seconds=seconds, by=by)
        await member.driver.call(lambda now: (None, member.operator.freeze(seconds, now)))

    async def clear_quarantine(self, deployment: DeploymentId, by: str) -> None:
        """Count from zero and drop the samples; metrics go on counting."""
        member = await self._telling(deployment)
        _log.info("quarantine_cleared", deployment=deployment, by=by)
        member.ingest.clear_quarantine()

    async def forget(self, deployment: DeploymentId, by: str) -> None:
        """Let go of a deployment: lease, memory, series and stored windows; plans and epochs stay stored."""
        if (known := self.members.get(deployment)) is not None:
            await self._seek_lease(known)
        member = await self._durable(deployment)
        if member.sessions:
            raise Conflict(
                f"{len(member.sessions)} ranks of {deployment} are connected", Reason.BUSY
            )
        _log.info("forget_asked", deployment=deployment, by=by)
        await self._outside.windows.forget(deployment)
        if self.members.get(deployment) is member and not member.sessions:
            await self._let_go(self.members.pop(deployment))

    async def record(self, entry: AuditEntry) -> None:
        """Write down who asked for what; stored where this replica leads the deployment."""
        member = None if entry.deployment is None else self.members.get(entry.deployment)
        await self._audit.record(
            entry, member.term if member is not None and member.keeper.leading else None
        )

    async def keep_answer(self, deployment: DeploymentId, answer: KeptAnswer) -> None:
        """Store an answer where this replica leads; elsewhere nothing was changed."""
        member = self.members.get(deployment)
        if member is not None and member.keeper.leading:
            await self._answers.keep(deployment, answer, member.term)

    async def kept_answer(self, deployment: DeploymentId, name: str) -> KeptAnswer | None:
        """A stored answer of a deployment that is here."""
        if deployment not in self.members:
            return None
        if self._outside.health.resting:
            raise Unavailable(f"the store is out of reach: {self._outside.health.fault}")
        try:
            return await self._answers.find(deployment, name)
        except Unavailable as error:
            self._outside.health.failed(error)
            raise

    async def set_policy(
        self,
        deployment: DeploymentId,
        changes: Mapping[str, Any],
        by: str,
        base: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Change mode, policy name, limits or gate settings; returns the whole policy document."""
        member = await self._durable(deployment)

        def change(now: float) -> tuple[Mapping[str, Any], list[ControlAction]]:
            if member.control.leader is None:
                raise Unavailable("this replica does not lead the deployment", Reason.NOT_LEADER)
            # Compared here and not by the caller: another change may be applied before this one's turn comes.
            if base is not None and base != policy_document(member.control.policy):
                raise Conflict(
                    "the policy document has changed since it was read", Reason.STALE_BASE
                )
            policy = change_policy(member.control.policy, changes)
            gates = GateSettings.from_thresholds(policy.thresholds)
            # Only when asked for: a stored threshold must not stop another change.
            if "thresholds" in changes and (
                words := [*never_met(gates, self._options.cycle.plan_steps)]
            ):
                raise InvalidInput("; ".join(words))
            document = policy_document(policy)
            actions = member.operator.set_policy(policy, document, now)
            _log.info("policy_changed", deployment=deployment, changes=dict(changes), by=by)
            return document, actions

        return await member.driver.call(change)
