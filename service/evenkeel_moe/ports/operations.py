"""What REST, metrics and the command line see, and what operators may ask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits, PlanRecord
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.recommendation import Recommendation

__all__ = [
    "Advice",
    "AuditEntry",
    "CycleOutcome",
    "DeploymentStatus",
    "DeploymentView",
    "KeptAnswer",
    "LedElsewhere",
    "NotLeading",
    "Operations",
    "PlanRequest",
    "QuarantineRow",
    "RankStatus",
]


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
        self,
        deployment: DeploymentId,
        to_epoch: Epoch | None,
        by: str,
        plan_id: PlanId | None = None,
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

    async def audit(
        self, deployment: DeploymentId | None, limit: int
    ) -> Sequence[Mapping[str, Any]]:
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
