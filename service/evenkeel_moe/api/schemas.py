"""Bodies of requests and answers. The only place where REST names its fields."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from evenkeel_moe.api.context import PLAN_ID_PATTERN
from evenkeel_moe.model.load import Phase

__all__ = [
    "DecisionPage",
    "DeploymentOut",
    "DeploymentPage",
    "FreezeIn",
    "LoadOut",
    "PhaseLoad",
    "PlacementOut",
    "PlanIn",
    "PlanOut",
    "PlanPage",
    "PlanSummary",
    "PolicyScoreOut",
    "ProblemOut",
    "RankOut",
    "RecommendationOut",
    "RedundancyOut",
    "ReplicaLevelOut",
    "RollbackIn",
    "StoryOut",
    "VerdictOut",
]

Matrix = list[list[float]]
SlotRow = list[Annotated[int, Field(ge=-1, le=2**31 - 1)]]


class _In(BaseModel):
    """A request body: an unknown field is an error, not a wish that goes unheard."""

    model_config = ConfigDict(extra="forbid")


class _Out(BaseModel):
    """An answer's body; numbers that are not finite are null."""

    model_config = ConfigDict(from_attributes=True)


class ProblemOut(_Out):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    reason: str | None = None
    """From the closed list of reasons."""
    leader: str | None = None
    """With `not_leader`: id of the replica that leads; null while nobody does."""
    leader_address: str | None = None
    """Where ranks reach it, host:port; null where it is not known."""


class ShapeOut(_Out):
    """Sizes the ranks declared."""

    num_layers: int
    num_logical_experts: int
    num_ranks: int
    slots_per_rank: int
    top_k: int
    bytes_per_expert: int
    num_expert_groups: int
    pool_slots_per_rank: int | None


class RankOut(_Out):
    """One rank."""

    rank: int
    node: str
    gpu_uuid: str
    fresh: bool
    last_seen_unix: float
    epoch: int
    state: str
    load_share: float | None
    seconds_per_token: float | None
    free_bytes: int
    staging_bytes: int
    slowness: float | None
    """Its pace over the median rank's; above 1 is slower. Null while it is not known."""
    trouble: str
    """Why the rank takes no wave any more; empty while all is well."""


class PlanSummary(_Out):
    """A plan without its maps."""

    plan_id: str
    deployment: str
    kind: str
    policy: str
    phase: str
    reason: str
    """Why it is in this phase."""
    planned_because: str
    """Why it was planned."""
    error: str | None
    base_epoch: int
    waves: int
    waves_committed: int
    moves: int
    """Copies between ranks."""
    nbytes: int
    """Bytes between ranks."""
    created_at: float
    updated_at: float
    expires_at: float | None
    approved_by: str | None
    numbers: dict[str, float | None]


class WaveOut(_Out):
    """One wave: whole layers that change on the same step."""

    index: int
    layers: list[int]
    moves: int
    nbytes: int


class PlacementOut(_Out):
    """A placement and what follows from it."""

    epoch: int | None
    """None for a target that no epoch carries yet."""
    digest: str
    num_ranks: int
    slots_per_rank: int
    physical_to_logical: list[list[int]]
    """(layers, slots) logical expert of each slot, -1 where empty; rank = slot // slots_per_rank."""
    logical_to_physical: list[list[list[int]]]
    """(layers, experts) the slots of each expert."""
    replica_count: list[list[int]]
    """(layers, experts)."""


class PlanOut(PlanSummary):
    """A plan with everything in it."""

    generation: str
    weights_version: int
    target: PlacementOut
    wave_list: list[WaveOut]
    story: list[dict[str, Any]]


class StoryOut(_Out):
    """What happened to a plan, in order."""

    plan_id: str
    phase: str
    reason: str
    rows: list[dict[str, Any]]


class PlanPage(_Out):
    """Plans, newest first."""

    items: list[PlanSummary]
    next_page_token: str | None


class DeploymentOut(_Out):
    """One deployment; null is unknown, never zero. In a list, of one that another replica leads, all is null but who leads."""

    deployment: str
    state: str
    reason: str
    mode: str | None
    policy: str | None
    leader: str | None
    """Id of the replica that leads; null while nobody does."""
    leader_address: str | None
    """Where ranks reach it, host:port."""
    term: int | None
    generation: str | None
    epoch: int | None
    shape: ShapeOut | None
    ranks: list[RankOut] | None
    step: int | None
    window_steps: int | None
    balancedness_mean: float | None
    balancedness_worst: float | None
    active_plan: PlanSummary | None
    staging_bytes_done: int | None
    staging_bytes_total: int | None
    last_decision: dict[str, Any] | None
    frozen_until_unix: float | None
    held: bool | None


class DeploymentPage(_Out):
    """Deployments by name."""

    items: list[DeploymentOut]
    next_page_token: str | None


class PhaseLoad(_Out):
    """The window of one phase under the committed placement; tokens are means per step."""

    steps: int
    first_step: int
    newest_step: int
    tokens_per_expert: Matrix
    """(layers, experts)."""
    tokens_per_rank: Matrix | None
    """(layers, ranks); null before the placement is known."""
    balancedness_by_layer: list[float | None] | None
    """Averaged over the window's steps; null where a layer had no load."""


class LoadOut(_Out):
    """Load matrices per phase; null where the phase has no step."""

    deployment: str
    epoch: int | None
    """Null before the ranks told it."""
    phases: dict[Phase, PhaseLoad | None]


class DecisionPage(_Out):
    """Decisions of the control loop, newest first."""

    items: list[dict[str, Any]]
    next_page_token: str | None


class VerdictOut(_Out):
    """What later steps say of a plan; shares are of predicted MoE time, null is unknown."""

    call: str
    """recommend, not_now or insufficient_evidence."""
    steps: int
    """Later steps it was judged on."""
    gain: float | None
    """Share saved, copies not counted."""
    gain_lower: float | None
    gain_upper: float | None
    """Between which the gain of the next window lies."""
    copy_cost_share: float | None
    """The copies as a share of the time of the expected lifetime."""
    net_gain: float | None
    """gain less copy_cost_share."""
    saved_per_step: float | None
    """Seconds where ranks' speeds are used, else tokens."""
    copy_cost: float
    """All copies, in the same unit."""
    lifetime_steps: int
    payback_steps: float | None
    """Null where nothing is saved."""
    payback_s: float | None
    """Null also where nobody knows how long a step takes."""


class PolicyScoreOut(_Out):
    """What one policy would have done on the same steps."""

    policy: str
    reason: str
    """plan_started where it would have passed every gate; else the gate that closed, or the error."""
    copies: int | None
    nbytes: int | None
    balancedness_expected: float | None
    verdict: VerdictOut | None
    """Null where it could not plan."""
    detail: str | None


class ReplicaLevelOut(_Out):
    """One number of replicas, the same in every layer."""

    replicas_per_layer: int
    gain: float | None
    """Share of predicted MoE time saved against the present number."""
    gain_lower: float | None
    gain_upper: float | None
    marginal_gain: float | None
    """Share saved against the level below, per replica and layer."""
    extra_bytes_per_rank: int | None
    """Memory of the fullest rank beyond the present number."""
    fits: bool | None
    """Null where free memory or the size of an expert is not known."""


class RedundancyOut(_Out):
    """Would more or fewer replicas per layer pay."""

    present: int
    advised: int
    levels: list[ReplicaLevelOut]


class RecommendationOut(_Out):
    """What would pay now, and the figures it rests on. Nothing was moved or started to find out."""

    deployment: str
    at: float
    """Unix seconds at which it was worked out."""
    generation: str
    epoch: int
    policy: str
    call: str
    """recommend, not_now or insufficient_evidence: the verdict on the deployment's own policy."""
    reason: str
    """What a cycle in auto mode would have ended with."""
    words: list[str]
    """The arithmetic, a sentence each."""
    newest_step: int | None
    window_steps: int
    planned_on_steps: int
    scored_on_steps: int
    """The newest of the window; no plan has seen them."""
    steps_since_change: int | None
    """Null where traffic did not change inside the window."""
    verdict: VerdictOut | None
    policies: list[PolicyScoreOut]
    """The deployment's own first."""
    redundancy: RedundancyOut | None
    free_bytes: int | None
    """Of the rank with the least free memory."""
    shadow: dict[str, dict[str, Any]]
    """What each shadow policy scored after the last cycle that planned."""


class LimitsIn(_In):
    """Bounds on one plan; null is no bound."""

    max_moves: int | None = Field(default=None, ge=0, le=2**31, description="Copies between ranks.")
    max_bytes: int | None = Field(default=None, ge=0, le=2**62, description="Bytes between ranks.")
    max_layers: int | None = Field(
        default=None, ge=0, le=2**31, description="Layers that may change."
    )


class TargetIn(_In):
    """An explicit placement."""

    physical_to_logical: list[SlotRow] = Field(
        min_length=1, description="(layers, slots) logical expert of each slot, -1 where empty."
    )


class PlanIn(_In):
    """A plan by hand."""

    plan_id: str | None = Field(
        default=None,
        pattern=PLAN_ID_PATTERN,
        description="Chosen by the client, so that repeating the call gives the same plan.",
    )
    policy: str | None = Field(
        default=None, max_length=64, description="Null uses the deployment's policy."
    )
    limits: LimitsIn = LimitsIn()
    phases: list[Phase] = Field(
        default=[], description="Windows to plan on; empty weighs all by tokens."
    )
    dry_run: bool = Field(
        default=False, description="Only plan; approving the plan later starts this very plan."
    )
    approve: bool = Field(default=False, description="Start at once, also in propose mode.")
    target: TargetIn | None = Field(default=None, description="A placement instead of a policy.")


class RollbackIn(_In):
    """Where to return to."""

    plan_id: str | None = Field(
        default=None,
        pattern=PLAN_ID_PATTERN,
        description="Chosen by the client, so that repeating the call is not another rollback.",
    )
    to_epoch: int | None = Field(
        default=None, ge=0, le=2**53, description="Null is the placement before the last plan."
    )


class FreezeIn(_In):
    """How long no new plan may start."""

    seconds: float = Field(ge=0, le=7 * 86400, allow_inf_nan=False, description="0 thaws.")
