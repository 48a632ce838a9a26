"""The operations that the controller offers to the REST API, and the values they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits, PlanRecord
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.planning.decision.recommendation import Recommendation


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The state of one rank."""

    rank: int
    node: str
    gpu_uuid: str
    fresh: bool
    """True while its heartbeat lease is valid and it has not stopped as planned."""
    last_seen_unix: float
    epoch: int | None
    """The epoch the rank named last; None while it has no stream."""
    state: str
    """ParticipantState of the wave that it holds."""
    load_share: float | None
    """Share of the window's tokens; 1/R is balanced. None without data."""
    seconds_per_token: float | None
    """Median MoE computation before the collective; None if not measured."""
    free_bytes: int | None
    """Bytes of memory that its device has free; None while it has no stream."""
    staging_bytes: int
    slowness: float | None = None
    """Its seconds divided by the median rank's for the same tokens; None if not measured."""
    trouble: str = ""
    """The reason, in words, that it takes no more waves; empty if it takes them."""
    device: str = ""
    """Name of its device; empty if unknown."""
    weight_format: str = ""
    """Number type of its experts' weights; empty if unknown."""
    stopped: bool = False
    """True if its engine said that it stops as planned."""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """The state of one deployment. None means unknown, never zero."""

    deployment: DeploymentId
    state: str
    """State of the control machine: waiting_for_ranks, recovering, ready, migrating, ..."""
    reason: str
    """The Reason for the state."""
    mode: str
    """observe, propose or auto."""
    policy: str
    leader: str
    term: int
    generation: str
    epoch: int | None
    """None before the ranks reported it."""
    rollback_epoch: int | None
    """The epoch a rollback without a named epoch leads to; None if there is none."""
    shape: ModelShape
    ranks: tuple[RankStatus, ...]
    step: int | None
    """Newest complete step."""
    window_steps: int
    """Complete steps in the fullest window."""
    balancedness_mean: float | None
    """Mean over steps and layers of the window."""
    balancedness_worst: float | None
    """Mean over the steps of the window, of the worst layer."""
    time_balance: float | None
    """Fluid time / predicted time of the window in the newest cycle; None if the cost model is by
    tokens, or the cycle did not get that far."""
    time_balance_worst: float | None
    """The same of the worst layer."""
    cost_model: CostBasis | None
    """What predicted times rest on; None before the first cycle."""
    active_plan: PlanRecord | None
    proposals: tuple[PlanRecord, ...] = ()
    """The plans that wait for approval, oldest first."""
    staging_bytes_done: int = 0
    staging_bytes_total: int = 0
    last_decision: Mapping[str, Any] | None = None
    frozen_until_unix: float | None = None
    held: bool = False
    """True while automatic plans wait for `resume`."""
    held_because: str | None = None
    """The Reason for the hold; None if not held."""
    leader_address: str | None = None
    """host:port by which ranks reach the leader."""
    dispatch: str = ""
    """The model of the engines' dispatcher, by which plans are made and balance is computed."""
    dispatch_warning: str = ""
    """A sentence that names two dispatchers that disagree; empty if none do."""
    balancedness_by_phase: Mapping[Phase, float | None] = field(default_factory=dict)
    """As `balancedness_mean`, for the window of each phase."""
    newest_step_unix: float | None = None
    plan_aborted_unix: float | None = None
    """When the newest complete step was counted, and when the newest aborted plan ended."""
    plans_lost_time: int | None = None
    """Newest measured plans in a row that cost time; None before a plan was measured."""


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
    """Store the plan as PROPOSED. It starts only if it is approved."""
    target: Placement | None = None
    """A placement to reach, instead of a policy."""
    approve: bool = False
    """Start at once, even in propose mode."""
    requested_by: str = ""


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
    """None before the first complete step."""
    free_bytes: int | None
    """Free memory of the rank that has the least; None unless all ranks reported it."""
    kv: KvMemory | None
    """KV cache of the rank that holds the fewest tokens; None unless all ranks told theirs."""
    recommendation: Recommendation
    shadow: Mapping[str, Mapping[str, Any]]
    """Newest score of each shadow policy, by name."""


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """The rejections for one reason."""

    reason: str
    rank_steps: int
    """Number of (rank, step) pairs since this replica led the deployment or a reset."""
    samples: tuple[tuple[int, str], ...]
    """(rank, detail) of the newest few, newest last."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A request for a change and its outcome."""

    deployment: DeploymentId | None
    """None if the path names none."""
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
class StoredResponse:
    """The stored response to a request with an `Idempotency-Key`."""

    name: str
    """Hash of token name, path and key, in hex."""
    digest: str
    """SHA-256 of the body, in hex."""
    status: int
    location: str | None
    """Path of the plan in the response; None for a response without body."""


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
            super().__init__(f"no replica leads {led.deployment} at present")
        else:
            where = "" if led.address is None else f" at {led.address}"
            super().__init__(f"{led.deployment} is led by {led.leader}{where}, not by this replica")
        self.led = led


class DeploymentView(Protocol):
    """Read access to one deployment."""

    def status(self) -> DeploymentStatus:
        """Return the present state."""
        ...

    def placement(self) -> Placement | None:
        """Return the committed placement; None before the ranks reported it."""
        ...

    def topology(self) -> Topology:
        """Return the node of each rank."""
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
        """Return the known deployments that this replica does not lead.

        While the store is not reachable, these are only those that this replica remembers.
        """
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

    async def approve(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Start a proposed plan. Conflict(STALE_BASE) if the epoch has changed (R16)."""
        ...

    async def cancel(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Stop a plan. After the votes of a wave, this takes effect before the next wave (R16)."""
        ...

    async def rollback(
        self,
        deployment: DeploymentId,
        to_epoch: Epoch | None,
        by: str,
        plan_id: PlanId | None = None,
        *,
        bounded: bool = True,
    ) -> PlanRecord:
        """Return to the placement of an epoch and hold automatic plans.

        With `bounded`, a rollback beyond the limits of the policy is Conflict(LIMIT_EXCEEDED).
        None is the placement before the last plan. The same id with the same epoch gives the same
        plan; with another epoch it gives Conflict(ID_REUSED).
        """
        ...

    async def resume(self, deployment: DeploymentId, by: str) -> None:
        """Allow automatic plans again that a rollback or undelivered gains stopped."""
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

    async def store_response(self, deployment: DeploymentId, answer: StoredResponse) -> None:
        """Store a response for a day, among the newest of the deployment; never fails."""
        ...

    async def fetch_response(self, deployment: DeploymentId, name: str) -> StoredResponse | None:
        """Return a stored response; None if there is none. Unavailable without the store."""
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
