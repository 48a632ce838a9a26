"""Response bodies of the routes for analysis: advice, heat maps, quarantine, audit."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from evenkeel_moe.api.schema_base import (
    PLAIN,
    CostModelOut,
    Number,
    ReasonedBody,
    RequestBody,
    ResponseBody,
    TextOrNull,
)
from evenkeel_moe.planning.decision.calibration import Calibration
from evenkeel_moe.planning.decision.capacity import WidthRow
from evenkeel_moe.planning.decision.kv_promise import KvPromise
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory, ReplicaTradeoff
from evenkeel_moe.planning.decision.replica_levels import Redundancy
from evenkeel_moe.ports.operations import QuarantineSample

Cells = list[list[float | None]]

# --- recommendations ------------------------------------------------------------------------


class VerdictOut(ResponseBody):
    """The verdict of later steps on a plan. Shares are of predicted MoE time; null is unknown."""

    call: str
    """recommend, not_now or insufficient_evidence."""
    steps: int
    """Number of later steps it is based on."""
    gain: Number
    """Share saved, without the cost of the copies; calibrated, like all that follows from it."""
    gain_modelled: Number
    """The same before calibration, as the cost model has it."""
    calibration: Calibration
    gain_lower: Number
    """Lower bound of the gain in the next window."""
    gain_upper: Number
    """Upper bound of the gain in the next window."""
    copy_cost_share: Number = Field(validation_alias=AliasChoices("copy_cost_share", "cost"))
    """Cost of the copies as a share of the time of the expected lifetime."""
    net_gain: Number
    """gain minus copy_cost_share."""
    saved_per_step: Number
    """In the unit of the cost model."""
    copy_cost: float
    """Cost of all copies, in the same unit."""
    lifetime_steps: int
    payback_steps: Number
    """Null if nothing is saved."""
    payback_s: Number
    """Null also if the duration of a step is unknown."""
    cost_model: CostModelOut
    """The cost model of the predicted MoE times."""


class PolicyScoreOut(ResponseBody):
    """The plan that one policy would have made on the same steps."""

    policy: str
    reason: str
    """plan_started if every gate would have opened; else the gate that closed, or the error."""
    reason_text: str
    """A sentence that says how a cycle with it would end in the deployment's mode."""
    copies: int | None
    nbytes: int | None
    balancedness_expected: Number
    verdict: VerdictOut | None
    """Null if the policy could not plan."""
    detail: TextOrNull


class RecommendationOut(ResponseBody):
    """The recommended action and its figures. Nothing is moved or started to find it."""

    deployment: str
    at: float
    """Unix seconds when it was computed."""
    generation: str
    epoch: int
    policy: str
    call: str
    """recommend, not_now or insufficient_evidence: the verdict on the deployment's own policy."""
    call_text: str
    """The same in words."""
    reason: str
    """The reason with which a cycle in auto mode would have ended."""
    reason_text: str
    """A sentence that says how the next cycle would end in the deployment's mode."""
    words: list[str]
    """The arithmetic, in sentences."""
    cost_model: CostModelOut
    """The cost model of the predicted MoE times."""
    newest_step: int | None
    window_steps: int
    planned_on_steps: int
    scored_on_steps: int
    """The newest steps of the window; no plan was made on them."""
    steps_since_change: int | None
    """Null if traffic did not change within the window."""
    verdict: VerdictOut | None
    policies: list[PolicyScoreOut]
    """The deployment's own policy first."""
    redundancy: Redundancy | None
    replica_tradeoff: ReplicaTradeoff | None
    """Null if there were too few steps."""
    kv_promise: KvPromise | None
    """Null unless the group started with other slots than before, and told its KV cache then."""
    free_bytes: int | None
    """Free memory of the rank that has the least."""
    shadow: Annotated[dict[str, dict[str, Any]], PLAIN]
    """Newest score of each shadow policy."""


class CapacityOut(ResponseBody):
    """Numbers of ranks compared. Nothing is moved or started to find it."""

    deployment: str
    at: float = Field(validation_alias=AliasChoices("at", "at_unix"))
    """Unix seconds when they were compared."""
    generation: str
    epoch: int
    policy: str
    """The policy that planned at every width."""
    free_bytes: int | None
    """Free memory of the rank that has the least."""
    kv: KvMemory | None
    """KV cache of the rank that holds the fewest tokens."""
    words: list[str]
    """The assumptions of all rows, in sentences."""
    cost_model: CostModelOut
    """The cost model of the predicted MoE times."""
    rows: list[WidthRow]
    """Today's placement first, then the widths in rising order."""


# --- load -----------------------------------------------------------------------------------


class HeatMapOut(ResponseBody):
    """Load as a multiple of the layer's mean: 1 is balanced; null is unknown, never zero."""

    deployment: str
    epoch: int | None
    """Null before the ranks reported it."""
    phase: str | None
    """Null is all phases, with the same weight for every step."""
    steps: int
    """Steps of the window; without any, every matrix is null."""
    newest_step: int | None
    newest_step_unix: float | None
    """Unix seconds at which the newest complete step of any phase was counted; null if unknown."""
    ranks_connected: int
    """Ranks with a valid heartbeat lease."""
    is_past: bool
    """True if the window tells of the past: its newest step is stale, or no rank is connected."""
    num_layers: int | None
    """Layers of the model."""
    first_layer: int
    """Layer of the first row."""
    next_layer: int | None
    """`first_layer` of the request for the rows that did not fit; null if these are the last."""
    tokens_per_layer: list[float] | None
    """(rows) mean per step; a token counts once for each expert it was routed to."""
    experts: Cells | None
    """(rows, experts); null in a layer without load."""
    ranks: Cells | None
    """(rows, ranks) under the committed placement; null before it is known."""


# --- quarantine, audit, log -----------------------------------------------------------------


class QuarantineRowOut(ReasonedBody):
    """The rejections for one reason."""

    reason: str
    rank_steps: int
    """Number of (rank, step) pairs since this controller replica led the deployment or a reset."""
    samples: list[QuarantineSample]
    """The newest few, newest last."""


class QuarantineOut(ResponseBody):
    """The rejected parts of the ranks' reports, by reason."""

    deployment: str
    items: list[QuarantineRowOut]


class AuditRow(ResponseBody):
    """One request for a change, as it is stored."""

    at: float
    """Unix seconds."""
    id: str
    deployment: str | None
    by: str
    """Name of the token."""
    role: str
    method: str
    path: str
    status: int
    """HTTP status of the response."""
    idempotency_key: str | None
    trace_id: str | None = None
    """The trace in `traceparent` and in the log; null in rows of older versions."""
    change: str | None = None
    """The request as JSON, cut after 256 characters; null if it named nothing."""


class AuditRowOut(AuditRow):
    """One request for a change."""

    text: str
    """A sentence that says what the request asked for."""


class AuditPage(ResponseBody):
    """Audit rows, newest first."""

    items: list[AuditRowOut]
    next_page_token: str | None


class TokenOut(ResponseBody):
    """The token of a request."""

    name: str
    role: Literal["read", "operate", "admin"]


class LogLevelBody(RequestBody):
    """The log level of one replica."""

    level: Literal["debug", "info", "warning", "error"]
