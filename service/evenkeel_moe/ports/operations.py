"""The operations that the controller offers to the REST API, and the values they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanLimits, PlanRecord
from evenkeel_moe.planning.decision.capacity import Capacity, CapacityRequest
from evenkeel_moe.planning.decision.kv_promise import KvPromise
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.planning.decision.recommendation import Recommendation
from evenkeel_moe.ports.status import DeploymentStatus, ResizeStatus

LEASE_FREE = (
    "neither this controller nor another replica holds its lease, which is asked for about once a"
    " second"
)
"""Also a single controller loses its lease, if it is held up for longer than the lease lasts."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a manual plan."""

    plan_id: PlanId | None = None
    """Chosen by the client; None lets the controller choose one."""
    policy: str | None = None
    """None uses the deployment's policy."""
    limits: PlanLimits = PlanLimits()
    phases: tuple[Phase, ...] = ()
    """Windows to plan on; empty uses all, weighted by their tokens."""
    dry_run: bool = False
    """Plan, and keep nothing."""
    target: Placement | None = None
    """A placement to reach, instead of a policy."""
    approve: bool = False
    """Start at once. Else the plan is stored as PROPOSED, and starts when it is approved."""
    requested_by: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the policy document that differ for this plan: `policy_options` and
    `replica_budget`."""


@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """A request for the return to an earlier placement."""

    plan_id: PlanId | None = None
    """Chosen by the client; None lets the controller choose one."""
    to_epoch: Epoch | None = None
    """An epoch of the group's history."""
    to_placement: str | None = None
    """Digest of a placement that `epochs` returns. Both None: that before the last plan."""
    bounded: bool = True
    """A rollback beyond the limits of the policy is Conflict(LIMIT_EXCEEDED)."""
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """A request to take ranks out of a group."""

    to_ranks: int | None = None
    """Ranks that stay; those retire on which the fewest experts live alone."""
    retire: tuple[int, ...] = ()
    """The ranks that retire, instead of `to_ranks`."""
    whole_nodes: bool = False
    """Only all ranks of a node retire."""
    from_ranks: int | None = None
    """Ranks that the caller takes the group to have; None accepts any number."""
    plan_id: PlanId | None = None
    """Id of the evacuation, chosen by the client; None lets the controller choose one."""
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class RecordedEpoch:
    """A recorded placement to which a group can return."""

    epoch: Epoch
    placement: Placement
    replaced: bool
    """True if it belongs to another history than the group's: one before a cold start, or that of
    other ranks of the same name."""

    @property
    def digest(self) -> str:
        """Digest of the placement."""
        return self.placement.digest


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation with the time and the state it was computed for."""

    deployment: DeploymentId
    at_unix: float
    generation: str
    epoch: int
    """Epoch of the present placement."""
    policy: str
    newest_step: int | None
    """Null before the first complete step."""
    free_bytes: int | None
    """Free memory of the rank that has the least; None unless all ranks reported it."""
    kv: KvMemory | None
    """KV cache of the rank that holds the fewest tokens; None unless all ranks told theirs."""
    kv_promise: KvPromise | None
    """KV tokens that the present number of slots was to leave; None if none were promised."""
    recommendation: Recommendation
    shadow: Mapping[str, Mapping[str, Any]]
    """Newest score of each shadow policy, by name."""


@dataclass(frozen=True, slots=True)
class CapacityAdvice:
    """Widths compared, with the time and the state they were compared for."""

    deployment: DeploymentId
    at_unix: float
    generation: str
    epoch: int
    """Epoch of the present placement."""
    policy: str
    """The policy that planned at every width."""
    free_bytes: int | None
    """Free memory of the rank that has the least; None unless all ranks reported it."""
    kv: KvMemory | None
    """KV cache of the rank that holds the fewest tokens; None unless all ranks told theirs."""
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class QuarantineSample:
    """One rejection."""

    rank: int
    detail: str


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """The rejections for one reason."""

    reason: str
    rank_steps: int
    """Number of (rank, step) pairs since this replica led the deployment or a reset."""
    samples: tuple[QuarantineSample, ...]
    """The newest few, newest last."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A request for a change and its outcome."""

    deployment: DeploymentId | None
    """Null if the path names none."""
    by: str
    """Name of the token."""
    role: str
    method: str
    path: str
    status: int
    """HTTP status of the response."""
    idempotency_key: str | None = None
    trace_id: str | None = None
    """Trace id of the request, 32 hex digits."""
    change: str | None = None
    """The start of what the request asked for, as JSON; None if it named nothing."""


@dataclass(frozen=True, slots=True)
class LedElsewhere:
    """A deployment that this replica does not lead."""

    deployment: DeploymentId
    leader: str | None
    """Id of the replica that leads; None while no replica leads."""
    address: str | None
    """host:port where ranks reach the leader; None if unknown."""


class NotLeading(Unavailable):
    """Only the leader can answer the request. Carries the leader."""

    default_reason = Reason.NOT_LEADER

    def __init__(self, led: LedElsewhere) -> None:
        if led.leader is None:
            super().__init__(f"no replica leads {led.deployment} at present: {LEASE_FREE}")
        else:
            where = "" if led.address is None else f" at {led.address}"
            super().__init__(
                f"replica {led.leader}{where} leads {led.deployment}, and this is another replica"
            )
        self.led = led


class DeploymentView(Protocol):
    """Read access to one deployment."""

    def status(self) -> DeploymentStatus:
        """Return the present state."""
        ...

    def placement(self) -> Placement | None:
        """Return the committed placement; None before the ranks reported it."""
        ...

    def window(self, phase: Phase) -> LoadWindow | None:
        """Return the window of a phase in memory; None if there is none."""
        ...


class Operations(Protocol):
    """The operations of the controller, as operators call them through the REST API.

    They raise NotFound, Conflict, InvalidInput, InfeasiblePlan and Unavailable, and NotLeading if
    another replica leads. Plans, decisions and audit rows are stored, so that any replica can
    return them.
    """

    async def deployments(self) -> Sequence[DeploymentView]:
        """Return the deployments that this replica leads."""
        ...

    async def led_elsewhere(self) -> Sequence[LedElsewhere]:
        """Return the known deployments led elsewhere; without the store, those it remembers."""
        ...

    async def deployment(self, deployment: DeploymentId) -> DeploymentView:
        """Return one deployment."""
        ...

    async def create_plan(self, deployment: DeploymentId, request: PlanRequest) -> PlanRecord:
        """Create a manual plan, or return the plan that has the same id and request.

        Conflict(ID_REUSED) if the id belongs to another request.
        """
        ...

    async def plans(
        self, deployment: DeploymentId, limit: int, after: PlanId | None = None
    ) -> tuple[Sequence[PlanRecord], bool]:
        """Return plan records, newest first, and True if there are more.

        Args:
            deployment: whose plans.
            limit: largest number of records.
            after: id of the plan before the first one returned; None starts with the newest.

        Raises:
            InvalidInput: the plan `after` is no longer known.
            Unavailable: the plans are in the store, which is not reachable.
        """
        ...

    async def plan(self, deployment: DeploymentId, plan_id: PlanId) -> PlanRecord:
        """Return one plan record with its story."""
        ...

    async def approve(
        self, deployment: DeploymentId, plan_id: PlanId, by: str, bounded: bool = True
    ) -> PlanRecord:
        """Start a proposed plan. Conflict(STALE_BASE) if the epoch has changed (R16).

        If `bounded`, a plan beyond the present limits of the policy is Conflict(LIMIT_EXCEEDED).
        """
        ...

    async def cancel(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Stop a plan. After the votes of a wave, this takes effect before the next wave (R16)."""
        ...

    async def epochs(self, deployment: DeploymentId) -> Sequence[RecordedEpoch]:
        """Return the recorded placements: the group's history, newest first, then replaced ones."""
        ...

    async def rollback(self, deployment: DeploymentId, request: RollbackRequest) -> PlanRecord:
        """Return to a recorded placement and hold automatic plans.

        The same id with the same target gives the same plan; with another one it gives
        Conflict(ID_REUSED).
        """
        ...

    async def rollback_plan(self, deployment: DeploymentId, request: RollbackRequest) -> Plan:
        """Return the plan that such a rollback would carry out. Nothing is started or stored."""
        ...

    async def resize(self, deployment: DeploymentId, request: ResizeRequest) -> ResizeStatus:
        """Let ranks retire, and move the experts away that live on them alone.

        Conflict(STALE_BASE) if the group has not `from_ranks` ranks, Conflict(RESIZING) if other
        ranks retire already, Conflict(WRONG_PHASE) if the plan of this id has ended and there are
        experts to move.
        """
        ...

    async def resume(self, deployment: DeploymentId, by: str) -> None:
        """Allow plans again that a rollback, undelivered gains or retiring ranks stopped."""
        ...

    async def set_policy(
        self,
        deployment: DeploymentId,
        changes: Mapping[str, Any],
        by: str,
        base: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Change mode, policy name, limits or gate settings. Return the whole policy document.

        Conflict(STALE_BASE) if the document is no longer `base`; None accepts any document.
        """
        ...

    async def policy(self, deployment: DeploymentId) -> Mapping[str, Any]:
        """Return the policy document."""
        ...

    async def freeze(self, deployment: DeploymentId, seconds: float, by: str) -> None:
        """Start no new plan for some seconds; 0 ends the freeze."""
        ...

    async def decisions(self, deployment: DeploymentId, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return the decision log, newest first."""
        ...

    async def recommendation(self, deployment: DeploymentId, max_age_s: float | None) -> Advice:
        """Return a recommendation that is at most `max_age_s` old; None is one cycle.

        Conflict(PLAN_IN_PROGRESS) while a plan runs.
        """
        ...

    async def capacity(self, deployment: DeploymentId, request: CapacityRequest) -> CapacityAdvice:
        """Compare numbers of ranks. Nothing is moved.

        Conflict(PLAN_IN_PROGRESS) while a plan runs.
        """
        ...

    async def quarantine(self, deployment: DeploymentId) -> Sequence[QuarantineRow]:
        """Return the rejected parts of the ranks' reports, by reason."""
        ...

    async def clear_quarantine(self, deployment: DeploymentId, by: str) -> None:
        """Reset the counts and drop the samples; metrics are not reset."""
        ...

    async def forget(self, deployment: DeploymentId, by: str) -> None:
        """Remove lease, memory, series and windows of a deployment; plans and epochs stay stored.

        Conflict(BUSY) while a rank is connected.
        """
        ...

    async def record(self, entry: AuditEntry) -> None:
        """Record a request for a change; never fails."""
        ...

    async def audit(
        self, deployment: DeploymentId | None, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return audit rows, newest first.

        For a deployment, from memory and store; for None, those of all deployments in memory.
        """
        ...

    def log_level(self) -> str:
        """Return the log level of this replica: debug, info, warning or error."""
        ...

    def set_log_level(self, level: str, by: str) -> None:
        """Set the log level until the next start."""
        ...

    async def healthy(self) -> Mapping[str, str]:
        """Return the state of each component: `ok` or the fault."""
        ...
