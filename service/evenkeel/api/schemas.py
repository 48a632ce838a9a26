"""Bodies of requests and answers. The only place where REST names its fields."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from evenkeel.api.context import PLAN_ID_PATTERN
from evenkeel.model.load import Phase

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
    "ProblemOut",
    "RankOut",
    "RollbackIn",
    "StoryOut",
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
    """One deployment; null is unknown, never zero."""

    deployment: str
    state: str
    reason: str
    mode: str
    policy: str
    leader: str
    term: int
    generation: str
    epoch: int
    shape: ShapeOut
    ranks: list[RankOut]
    step: int | None
    window_steps: int
    balancedness_mean: float | None
    balancedness_worst: float | None
    active_plan: PlanSummary | None
    staging_bytes_done: int
    staging_bytes_total: int
    last_decision: dict[str, Any] | None
    frozen_until_unix: float | None
    held: bool


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
    epoch: int
    phases: dict[Phase, PhaseLoad | None]


class DecisionPage(_Out):
    """Decisions of the control loop, newest first."""

    items: list[dict[str, Any]]
    next_page_token: str | None


class LimitsIn(_In):
    """Bounds on one plan; null is no bound."""

    max_moves: int | None = Field(default=None, ge=0, le=2**31, description="Copies between ranks.")
    max_bytes: int | None = Field(default=None, ge=0, le=2**62, description="Bytes between ranks.")
    max_layers: int | None = Field(default=None, ge=0, le=2**31, description="Layers that may change.")


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
    policy: str | None = Field(default=None, max_length=64, description="Null uses the deployment's policy.")
    limits: LimitsIn = LimitsIn()
    phases: list[Phase] = Field(default=[], description="Windows to plan on; empty weighs all by tokens.")
    dry_run: bool = Field(
        default=False, description="Only plan; approving the plan later starts this very plan."
    )
    approve: bool = Field(default=False, description="Start at once, also in propose mode.")
    target: TargetIn | None = Field(default=None, description="A placement instead of a policy.")


class RollbackIn(_In):
    """Where to return to."""

    to_epoch: int | None = Field(
        default=None, ge=0, le=2**53, description="Null is the placement before the current one."
    )


class FreezeIn(_In):
    """How long no new plan may start."""

    seconds: float = Field(ge=0, le=7 * 86400, allow_inf_nan=False, description="0 thaws.")
