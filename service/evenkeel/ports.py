"""The seams: the smallest Protocols between the core and the outside world."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evenkeel.errors import Reason, Unavailable
from evenkeel.model.ids import DeploymentId, Epoch, PlanId
from evenkeel.model.load import LoadWindow, Phase
from evenkeel.model.placement import Placement
from evenkeel.model.plan import PlanLimits, PlanRecord
from evenkeel.model.topology import ModelShape, Topology
from evenkeel.planning.what_if import Recommendation

__all__ = [
    "Advice",
    "AuditEntry",
    "Clock",
    "CycleOutcome",
    "DeploymentStatus",
    "DeploymentStore",
    "DeploymentView",
    "KeptAnswer",
    "Lease",
    "LedElsewhere",
    "NotLeading",
    "Operations",
    "PlanRequest",
    "QuarantineRow",
    "RankStatus",
    "WindowStore",
]


class Clock(Protocol):
    """Two clocks: one to compare, one to write down."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never falls."""
        ...

    def unix(self) -> float:
        """Unix seconds."""
        ...


class WindowStore(Protocol):
    """Keeps the newest steps of each (deployment, phase), bounded by count and time to live."""

    async def append(self, deployment: DeploymentId, phase: Phase, *parts: LoadWindow) -> None:
        """Add complete steps in consecutive parts, newest last; the last part's source-side sums, if any, replace those stored.

        Raises:
            Unavailable: the store is out of reach; nothing is known to be stored.
        """
        ...

    async def fetch(self, deployment: DeploymentId, phase: Phase) -> LoadWindow | None:
        """The stored window, oldest step first; None when there is none."""
        ...

    async def forget(self, deployment: DeploymentId) -> None:
        """Drop every window of a deployment."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """Leadership of one deployment as the store has it."""

    holder: str
    term: int


class DeploymentStore(Protocol):
    """Durable records of one controller's deployments. Every write is fenced by the lease's term."""

    async def acquire_lease(
        self, deployment: DeploymentId, holder: str, ttl_s: float, at_least_term: int
    ) -> Lease:
        """Take the lease if it is free, expired or the same holder's; the reply is the winner.

        A new holding carries a term above both the stored one and `at_least_term`.
        """
        ...

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease; False when it is no longer ours."""
        ...

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        ...

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Who leads; None while nobody does."""
        ...

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Write one plan record whole."""
        ...

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """(id, created_at) of every stored plan, newest first."""
        ...

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Stored plans that have not ended, by id."""
        ...

    async def fetch_plans(self, deployment: DeploymentId, plan_ids: Sequence[PlanId]) -> Sequence[PlanRecord]:
        """Those plans in that order, without those that are not stored. A plan of a large model is 0.1 MB: ask for few."""
        ...

    async def store_epoch(
        self, deployment: DeploymentId, epoch: Epoch, placement: Placement, term: int
    ) -> None:
        """Record a committed placement under its epoch."""
        ...

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Recorded placements by epoch, as many as are kept."""
        ...

    async def store_document(
        self, deployment: DeploymentId, name: str, body: Mapping[str, Any], term: int
    ) -> None:
        """Write a small named JSON document: policy, shape, freeze, intent."""
        ...

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        """Read a named document."""
        ...

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Add a row to the decision log, bounded by count and age."""
        ...

    async def fetch_decisions(self, deployment: DeploymentId, limit: int) -> Sequence[Mapping[str, Any]]:
        """Decision rows, newest first."""
        ...

    async def unlist(self, deployment: DeploymentId) -> None:
        """Leave a deployment out of `deployments` until it is led again; its records stay."""
        ...

    async def deployments(self) -> Sequence[DeploymentId]:
        """Every deployment with a record here, but those taken off the list."""
        ...

    async def ping(self) -> None:
        """Raise Unavailable unless the store takes writes."""
        ...


# --- what REST, metrics and the command line see -----------------------------------------------


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank as operators see it."""

    rank: int
    node: str
    gpu_uuid: str
    fresh: bool
    """Whether its heartbeat lease holds."""
    last_seen_unix: float
    epoch: int
    state: str
    """ParticipantState of the wave it holds."""
    load_share: float | None
    """Its share of the window's tokens; 1/R is balanced; None without data."""
    seconds_per_token: float | None
    """Pre-collective compute, median over the window; None where not measured."""
    free_bytes: int
    staging_bytes: int
    slowness: float | None = None
    """Its seconds over the median rank's at the same tokens; None where not measured."""
    trouble: str = ""
    """Why it takes no wave any more; empty while all is well."""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """One deployment as operators see it. None always means unknown, never zero."""

    deployment: DeploymentId
    state: str
    """Of the control machine: waiting_for_ranks, recovering, ready, migrating, ..."""
    reason: str
    """Why it is in this state: a Reason."""
    mode: str
    """observe, propose or auto."""
    policy: str
    leader: str
    term: int
    generation: str
    epoch: int | None
    """None before the ranks told where they stand."""
    shape: ModelShape
    ranks: tuple[RankStatus, ...]
    step: int | None
    """Newest complete step."""
    window_steps: int
    """Complete steps in the fullest window."""
    balancedness_mean: float | None
    """Mean over steps and layers of the window."""
    balancedness_worst: float | None
    """Worst layer's mean over the window's steps."""
    active_plan: PlanRecord | None
    staging_bytes_done: int = 0
    staging_bytes_total: int = 0
    last_decision: Mapping[str, Any] | None = None
    frozen_until_unix: float | None = None
    held: bool = False
    """Automatic plans wait for `resume` after a rollback."""
    leader_address: str | None = None
    """host:port by which ranks reach the leader."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Body of a manual plan."""

    plan_id: PlanId | None = None
    """Chosen by the client; None lets the controller choose."""
    policy: str | None = None
    """None uses the deployment's."""
    limits: PlanLimits = PlanLimits()
    phases: tuple[Phase, ...] = ()
    """Windows to plan on; empty weighs all by tokens."""
    dry_run: bool = False
    """Plan and store as PROPOSED without ever starting by itself; approve accepts this very plan."""
    target: Placement | None = None
    """An explicit placement instead of a policy."""
    approve: bool = False
    """Start at once, also in propose mode."""
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class CycleOutcome:
    """What a cycle decided, as logged."""

    at_unix: float
    reason: str
    plan_id: str | None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation with when and for what it was worked out."""

    deployment: DeploymentId
    at_unix: float
    generation: str
    epoch: int
    """Of the placement it starts from."""
    policy: str
    newest_step: int | None
    """None while no step was complete."""
    free_bytes: int | None
    """Of the rank with the least free memory; None unless all ranks are here to tell."""
    recommendation: Recommendation
    shadow: Mapping[str, Mapping[str, Any]]
    """The last row of every shadow policy, by name."""


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """What was rejected for one reason."""

    reason: str
    rank_steps: int
    """One for each rank's report of one step, since the deployment came to this replica or was last cleared."""
    samples: tuple[tuple[int, str], ...]
    """(rank, words) of the newest few, newest last."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who asked for a change, and what was answered."""

    deployment: DeploymentId | None
    """None where the path names none."""
    by: str
    """Name of the token."""
    role: str
    method: str
    path: str
    status: int
    """HTTP status of the answer."""
    idempotency_key: str | None = None
    trace_id: str | None = None
    """The trace the request belongs to: 32 hex digits."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What a request with an `Idempotency-Key` was answered, for its repetition."""

    name: str
    """Hash of token name, path and key, in hex."""
    digest: str
    """SHA-256 of the body, in hex."""
    status: int
    location: str | None
    """Path of the plan the answer was about; None: it had no body."""


@dataclass(frozen=True, slots=True)
class LedElsewhere:
    """A deployment that the replica which was asked does not lead."""

    deployment: DeploymentId
    leader: str | None
    """Id of the replica that leads; None while nobody does."""
    address: str | None
    """host:port by which ranks reach it; None where it is not known."""


class NotLeading(Unavailable):
    """Only the leader knows, or may change, what was asked for; carries who leads."""

    default_reason = Reason.NOT_LEADER

    def __init__(self, led: LedElsewhere) -> None:
        if led.leader is None:
            super().__init__(f"nobody leads {led.deployment} for now")
        else:
            where = "" if led.address is None else f" at {led.address}"
            super().__init__(f"{led.deployment} is led by {led.leader}{where}, not by this replica")
        self.led = led


class DeploymentView(Protocol):
    """Read access to one deployment."""

    def status(self) -> DeploymentStatus:
        """Now."""
        ...

    def placement(self) -> Placement | None:
        """The committed placement; None before the ranks told it."""
        ...

    def topology(self) -> Topology:
        """Which node each rank is on."""
        ...

    def window(self, phase: Phase) -> LoadWindow | None:
        """The window in memory."""
        ...


class Operations(Protocol):
    """What an operator may ask of the controller; the API is a thin skin over this.

    Methods raise NotFound, Conflict, InvalidInput, InfeasiblePlan and Unavailable; where another replica leads NotLeading, but
    for plans, decisions and audit, which are stored.
    """

    async def deployments(self) -> Sequence[DeploymentView]:
        """All deployments this replica leads."""
        ...

    async def led_elsewhere(self) -> Sequence[LedElsewhere]:
        """Deployments that others lead, and those known here that nobody does; without the store only what is known here."""
        ...

    async def deployment(self, deployment: DeploymentId) -> DeploymentView:
        """One deployment."""
        ...

    async def create_plan(self, deployment: DeploymentId, request: PlanRequest) -> PlanRecord:
        """Plan by hand. Same id and body: the same plan; same id, other body: Conflict(ID_REUSED)."""
        ...

    async def plans(
        self, deployment: DeploymentId, limit: int, after: PlanId | None = None
    ) -> tuple[Sequence[PlanRecord], bool]:
        """Plan records that come after one, or the first ones, newest first; and whether there are more.

        Raises:
            InvalidInput: no plan `after` is known any more.
            Unavailable: what comes after one is in the store, and that is out of reach.
        """
        ...

    async def plan(self, deployment: DeploymentId, plan_id: PlanId) -> PlanRecord:
        """One plan record with its story."""
        ...

    async def approve(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Start a proposed plan; Conflict(STALE_BASE) when the epoch moved (R16)."""
        ...

    async def cancel(self, deployment: DeploymentId, plan_id: PlanId, by: str) -> PlanRecord:
        """Stop a plan; after the votes it takes effect at the next wave (R16)."""
        ...

    async def rollback(
        self, deployment: DeploymentId, to_epoch: Epoch | None, by: str, plan_id: PlanId | None = None
    ) -> PlanRecord:
        """Return to an earlier epoch's placement (None: the one before the last plan) and hold `auto`.

        Same id and epoch: the same plan; same id, other epoch: Conflict(ID_REUSED).
        """
        ...

    async def resume(self, deployment: DeploymentId, by: str) -> None:
        """Let automatic plans run again after a rollback."""
        ...

    async def set_policy(
        self,
        deployment: DeploymentId,
        changes: Mapping[str, Any],
        by: str,
        base: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Change mode, policy name, limits or gate settings; returns the whole policy document.

        Conflict(STALE_BASE) when the document is another than `base` at the moment of the change; None rests on any.
        """
        ...

    async def policy(self, deployment: DeploymentId) -> Mapping[str, Any]:
        """The policy document."""
        ...

    async def freeze(self, deployment: DeploymentId, seconds: float, by: str) -> None:
        """No new plan for that long; 0 thaws."""
        ...

    async def decisions(self, deployment: DeploymentId, limit: int) -> Sequence[Mapping[str, Any]]:
        """Decision log, newest first."""
        ...

    async def recommendation(self, deployment: DeploymentId, max_age_s: float | None) -> Advice:
        """What would pay now, and why. An answer up to `max_age_s` old will do; None leaves it to the controller.

        Conflict(PLAN_IN_PROGRESS) while weights move.
        """
        ...

    async def quarantine(self, deployment: DeploymentId) -> Sequence[QuarantineRow]:
        """What was rejected of the ranks' reports, by reason."""
        ...

    async def clear_quarantine(self, deployment: DeploymentId, by: str) -> None:
        """Count from zero and drop the samples; metrics go on counting."""
        ...

    async def forget(self, deployment: DeploymentId, by: str) -> None:
        """Let go of a deployment: lease, memory, series and stored windows; plans and epochs stay stored.

        Conflict(BUSY) while a rank has a stream here.
        """
        ...

    async def record(self, entry: AuditEntry) -> None:
        """Write down who asked for what; never fails."""
        ...

    async def keep_answer(self, deployment: DeploymentId, answer: KeptAnswer) -> None:
        """Store an answer for a day, among the newest of the deployment; never fails."""
        ...

    async def kept_answer(self, deployment: DeploymentId, name: str) -> KeptAnswer | None:
        """A stored answer; Unavailable when the store cannot say."""
        ...

    async def audit(self, deployment: DeploymentId | None, limit: int) -> Sequence[Mapping[str, Any]]:
        """Audit rows, newest first: of one deployment, also those stored; None: of this replica, in memory."""
        ...

    def log_level(self) -> str:
        """How much this replica says: debug, info, warning or error."""
        ...

    def set_log_level(self, level: str, by: str) -> None:
        """Change it until the next start."""
        ...

    async def healthy(self) -> Mapping[str, str]:
        """Component -> `ok` or what is wrong."""
        ...
