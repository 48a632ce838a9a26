"""Bodies of requests and responses.

A body that shows a value takes the value's fields (`shows`), so it declares only what differs. A
value that is shown as it is has no body here: a response contains its dataclass, such as
`RankStatus`. The docstrings of both are the descriptions in docs/openapi.json.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, FailFast, Field, StrictBool, StrictInt, StrictStr, computed_field

from evenkeel_moe.api.context import DIGEST_PATTERN, PLAN_ID_PATTERN, QueryBody
from evenkeel_moe.api.schema_base import (
    PLAIN,
    WORD,
    ChangeBody,
    CostModelOut,
    JsonObject,
    Number,
    ReasonedBody,
    RequestBody,
    ResponseBody,
    TextOrNull,
    shows,
)
from evenkeel_moe.api.words.gates import PlanningGate
from evenkeel_moe.api.words.health import Health
from evenkeel_moe.api.words.plan_figures import Figure
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.finding import Finding, Severity
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import Plan, PlanRecord
from evenkeel_moe.model.policy import CostChoice, DeploymentPolicy, Mode
from evenkeel_moe.planning.decision.capacity import MOST_RANKS, Capacity
from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff
from evenkeel_moe.planning.decision.recommendation import PolicyScore, Recommendation
from evenkeel_moe.planning.decision.verdict import Verdict
from evenkeel_moe.planning.problem.survival import Coverage
from evenkeel_moe.ports.operations import (
    Advice,
    AuditEntry,
    CapacityAdvice,
    QuarantineRow,
    RecordedEpoch,
)
from evenkeel_moe.ports.status import DeploymentStatus, ResizeStatus

Matrix = list[list[float]]
Cells = list[list[float | None]]
Bound = Annotated[int | None, Field(ge=0, le=2**62, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
FiniteSeconds = Annotated[Finite, Field(gt=0)]
Spans = Annotated[list[str], FailFast()]
Name = Annotated[str, Field(max_length=64)]
PolicyOptions = Annotated[dict[Name, StrictInt | Finite | StrictStr | None], Field(max_length=32)]
OptionsByPolicy = Annotated[dict[Name, PolicyOptions | None], Field(max_length=32)]
_DEFAULT = DeploymentPolicy()
SlotRow = Annotated[list[Annotated[int, Field(ge=-1, le=2**31 - 1)]], FailFast()]


# --- deployments ----------------------------------------------------------------------------


@shows(DeliveredGain)
class DeliveredOut(ResponseBody):
    """The gain that a plan promised, and the one it delivered by the seconds that ranks reported.

    Gains are shares of MoE time. Null is unknown, never zero.
    """

    promised: Number
    """The gain of the verdict; null if the plan had none."""
    promised_lower: Number
    over_promised: Number
    """gain / promised; null also if nothing was promised."""
    cost_source: TextOrNull
    """Source of the cost model that the plan was scored by; null if it was not scored."""
    unknown_because: TextOrNull
    """The reason that the gain is unknown."""


_INNER = "plan wave_sent wave_agreed cancel_requested request_digest made_by story"
_MAPS = "reason generation weights_version base target waves allow_duplicates"


@shows(Plan, "moves", "nbytes", without=_MAPS)
@shows(PlanRecord, without=_INNER)
class PlanSummary(ReasonedBody):
    """A plan without its maps."""

    may_cost_text: str | None
    """Says why the plan may cost MoE time; null if it is made to save some."""
    phase_text: str
    """The phase as people call it: `superseded` for a plan that was `refused` before it began,
    because its placement, group or weights were replaced."""
    ended: bool
    """True if the phase is the last one."""
    text: str
    """Sentences that say where the plan stands, and why. They leave out the error."""
    reason: str
    """The reason for the phase."""
    planned_because: str
    """The reason the plan was made."""
    waves: int
    numbers: Annotated[dict[str, float | None], PLAIN]
    """Figures behind the decision: balancedness_mean, balancedness_expected, gain, copies, ..."""
    delivered: DeliveredOut | None
    """Null before the plan was measured, and if it was not carried out."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def planned_because_text(self) -> str:
        """The reason the plan was made, as a sentence."""
        return sentence(self.planned_because)


@shows(Finding, "words", without="what amount advice")
class FindingOut(ResponseBody):
    """One way in which the counts of a deployment contradict how an engine routes."""

    severity: Severity
    """doubt: nothing is planned on the counts. note: below the thresholds of the policy."""


class GatesOut(ResponseBody):
    """The gates of the newest cycle."""

    items: list[PlanningGate]
    """In the order in which a cycle meets them; the first that is closed ends it."""


@shows(Coverage, "words")
class CoverageOut(ResponseBody):
    """The experts that a placement loses with one fault domain."""


class ResizeIn(RequestBody):
    """A request to take ranks out of a group: `to_ranks` or `retire`."""

    to_ranks: int | None = Field(None, ge=1, le=2**31)
    """Ranks that stay; those retire on which the fewest experts live alone."""
    retire: tuple[Annotated[int, Field(ge=0, le=2**31)], ...] = Field((), max_length=MOST_RANKS)
    """The ranks that retire."""
    whole_nodes: bool = False
    """Only all ranks of a node retire."""
    from_ranks: int | None = Field(None, ge=1, le=2**31)
    """Ranks that the group has to have; with another number of ranks 409 `stale_base`."""
    plan_id: str | None = Field(None, pattern=PLAN_ID_PATTERN)
    """Id of the plan that moves experts away; the controller chooses one otherwise."""


@shows(ResizeStatus, "words")
class ResizeOut(ResponseBody):
    """Ranks that retire from a group."""


@shows(DeploymentStatus, without="at_unix rules", nullable=True)
class DeploymentOut(ReasonedBody):
    """One deployment; null means unknown, never zero.

    In a list, a deployment that another controller replica leads has only its name and its leader.
    """

    deployment: str
    health: Health
    state: str
    reason: str
    leader: TextOrNull
    """Id of the controller replica that leads; null while none leads."""
    cost_model: CostModelOut | None
    """The cost model of predicted MoE times; null before the first cycle."""
    active_plan: PlanSummary | None
    proposals: list[PlanSummary] | None
    """Plans that wait for approval, oldest first."""
    last_decision: JsonObject | None
    """The newest row of `decisions`."""
    held_text: str | None
    """Sentences that say why automatic plans are held, and what the hold stops in this mode; null
    if they are not held."""
    findings: list[FindingOut] | None
    """What is wrong with the counts of the newest steps; null if there are no counts to check."""
    resize: ResizeOut | None
    """The ranks that retire; null if none do."""
    coverage: list[CoverageOut] | None
    """The experts that are lost with one rank and, if there are several nodes, with one node; null
    before the ranks reported their placement."""


class DeploymentPage(ResponseBody):
    """Deployments by name."""

    items: list[DeploymentOut]
    next_page_token: str | None


# --- placements and plans -------------------------------------------------------------------


class PlacementOut(ResponseBody):
    """A placement and the maps that follow from it."""

    epoch: int | None
    """Null for a target that has no epoch yet."""
    digest: str
    num_ranks: int
    slots_per_rank: int
    physical_to_logical: list[list[int]]
    """(layers, slots) logical expert of each slot, -1 if empty; rank = slot // slots_per_rank."""
    logical_to_physical: list[list[list[int]]]
    """(layers, experts) slots of each expert."""
    replica_count: list[list[int]]
    """(layers, experts)."""


class WaveOut(ResponseBody):
    """One wave: whole layers that change on the same step."""

    index: int
    layers: list[int]
    moves: int
    nbytes: int | None
    """Bytes copied between ranks; null if the size of an expert is not known."""


class PlanOut(PlanSummary):
    """A plan with its target, waves and story."""

    generation: str
    weights_version: int
    target: PlacementOut
    wave_list: list[WaveOut]
    story: list[JsonObject]
    """The events in order, each with `text` and `phase_text`: the event and the phase in words."""
    gain_by_tokens: bool
    """True if the predicted gain counts tokens, because nothing was known of time."""
    figures: list[Figure]
    """The plan promises, delivered and costs these."""
    details: list[Figure]
    """The decision rests on these other figures."""


class RollbackPreviewOut(ResponseBody):
    """The plan that a rollback would carry out now."""

    to_epoch: int
    """Epoch of the placement to which it returns."""
    base_epoch: int
    """The present epoch."""
    waves: int
    moves: int
    """Number of copies between ranks."""
    nbytes: int | None
    """Bytes copied between ranks; null if the size of an expert is not known."""
    expected_stall_s: float | None
    """Seconds of one step that each wave is expected to cost; null before a swap was measured."""
    undoes: PlanSummary | None
    """The plan that led from there to the present placement, among the newest hundred; null if
    there is none, or several did."""
    figures: list[Figure]
    """The rollback would move and cost these."""
    hold_text: str
    """A sentence that says what the hold after the rollback stops in the deployment's mode."""


class StoryOut(ReasonedBody):
    """The events of a plan, in order."""

    plan_id: str
    phase: str
    reason: str
    rows: list[JsonObject]
    """Each with `text` and `phase_text`: the event and the phase in words."""


class PlanPage(ResponseBody):
    """Plans, newest first."""

    items: list[PlanSummary]
    next_page_token: str | None


# --- load and decisions ---------------------------------------------------------------------


class PhaseLoad(ResponseBody):
    """The window of one phase under the committed placement; tokens are means per step."""

    steps: int
    first_step: int
    newest_step: int
    tokens_per_expert: Matrix
    """(layers, experts)."""
    tokens_per_rank: Matrix | None
    """(layers, ranks); null before the placement is known."""
    balancedness_by_layer: Annotated[list[float | None] | None, PLAIN]
    """Mean over the window's steps; null for a layer without load."""


class LoadOut(ResponseBody):
    """Load matrices by phase; null for a phase without steps."""

    deployment: str
    epoch: int | None
    """Null before the ranks reported it."""
    phases: dict[Phase, PhaseLoad | None]


class DecisionPage(ResponseBody):
    """Decisions of the control loop, newest first."""

    items: list[JsonObject]
    """Each with `reason` and `reason_text`, the reason as a sentence."""
    next_page_token: str | None


# --- recommendations ------------------------------------------------------------------------


@shows(Verdict, without="cost")
class VerdictOut(ResponseBody):
    """The verdict of later steps on a plan. Shares are of predicted MoE time; null is unknown."""

    gain: Number
    """Share saved, without the cost of the copies; calibrated, like all that follows from it."""
    gain_modelled: Number
    """The same before calibration, as the cost model has it."""
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
    payback_steps: Number
    """Null if nothing is saved."""
    payback_s: Number
    """Null also if the duration of a step is unknown."""
    cost_model: CostModelOut
    """The cost model of the predicted MoE times."""


@shows(PolicyScore)
class PolicyScoreOut(ResponseBody):
    """The plan that one policy would have made on the same steps."""

    reason: str
    """plan_started if every gate would have opened; else the gate that closed, or the error."""
    reason_text: str
    """A sentence that says how a cycle with it would end in the deployment's mode."""
    balancedness_expected: Number
    verdict: VerdictOut | None
    """Null if the policy could not plan."""
    detail: TextOrNull


@shows(Advice, without="at_unix kv recommendation")
@shows(Recommendation)
class RecommendationOut(ResponseBody):
    """The recommended action and its figures. Nothing is moved or started to find it."""

    at: float
    """Unix seconds when it was computed."""
    call_text: str
    """The same as `call`, in words."""
    reason_text: str
    """A sentence that says how the next cycle would end in the deployment's mode."""
    cost_model: CostModelOut
    """The cost model of the predicted MoE times."""
    scored_on_steps: int
    """The newest steps of the window; no plan was made on them."""
    verdict: VerdictOut | None
    policies: list[PolicyScoreOut]
    """The deployment's own policy first."""
    replica_tradeoff: ReplicaTradeoff | None
    """Null if there were too few steps."""
    shadow: Annotated[dict[str, dict[str, Any]], PLAIN]
    """Newest score of each shadow policy."""


@shows(CapacityAdvice, without="at_unix capacity")
@shows(Capacity)
class CapacityOut(ResponseBody):
    """Numbers of ranks compared. Nothing is moved or started to find it."""

    at: float
    """Unix seconds when they were compared."""
    cost_model: CostModelOut
    """The cost model of the predicted MoE times."""


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


@shows(QuarantineRow)
class QuarantineRowOut(ReasonedBody):
    """The rejections for one reason."""


class QuarantineOut(ResponseBody):
    """The rejected parts of the ranks' reports, by reason."""

    deployment: str
    items: list[QuarantineRowOut]


@shows(AuditEntry)
class AuditRow(ResponseBody):
    """One request for a change, as it is stored."""

    at: float
    """Unix seconds."""
    id: str
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


# --- requests -------------------------------------------------------------------------------


class LimitsIn(ChangeBody):
    """Bounds on one plan; null is no bound."""

    max_moves: Bound = None
    """Copies between ranks."""
    max_bytes: Bound = None
    """Bytes copied between ranks. Copies of unknown size exceed any number."""
    max_layers: Bound = None
    """Layers that may change."""


class ScheduleIn(ChangeBody):
    """Weekly times in UTC at which plans may start, such as `sat 22:00 - sun 04:00`."""

    windows: Spans = []
    """Spans in which plans may start; without any they always may."""
    blackouts: Spans = []
    """Spans in which no plan may start, even inside windows."""


class PolicyDocument(ChangeBody):
    """The policy says how a deployment is balanced. A change has only the fields to change."""

    mode: Annotated[Mode, WORD] = _DEFAULT.mode
    policy: Name = _DEFAULT.policy
    """The planning algorithm, by its name."""
    shadow_policies: Annotated[list[Name], FailFast(), Field(max_length=8)] = []
    """Planning algorithms that are only scored, once every cycle."""
    limits: LimitsIn = LimitsIn()
    """Bounds on every plan; only role admin may change them."""
    cycle_s: FiniteSeconds = _DEFAULT.cycle_s
    """Seconds between cycles."""
    proposal_ttl_s: FiniteSeconds = _DEFAULT.proposal_ttl_s
    """Seconds until a proposal that nobody approved expires."""
    schedule: ScheduleIn = ScheduleIn()
    thresholds: Annotated[dict[Name, Finite], Field(max_length=32)] = {}
    """Gate settings by name."""
    policy_options: OptionsByPolicy = {}
    """Options of planning algorithms, by algorithm and option. In a change null removes one option,
    or all of an algorithm."""
    replica_budget: Bound = None
    """Redundant slots per layer that plans may fill, on average over the layers; null is all."""
    dispatch: Annotated[DispatchModel, WORD] | None = None
    """The engines' rule to split tokens over replicas; null takes what the ranks told."""
    cost: Annotated[CostChoice, WORD] = _DEFAULT.cost
    observe_lock: StrictBool = False
    """True if in mode observe no request may move weights either."""
    separate_approval: StrictBool = False
    """True if a plan made by hand starts only when another token than its maker's approves it."""


class TargetIn(RequestBody):
    """An explicit placement."""

    physical_to_logical: Annotated[list[SlotRow], FailFast()] = Field(min_length=1)
    """(layers, slots) logical expert of each slot, -1 if empty."""


class PlanIn(RequestBody):
    """A manual plan."""

    plan_id: str | None = Field(default=None, pattern=PLAN_ID_PATTERN)
    """Chosen by the client, so that a repeated call gives the same plan."""
    policy: str | None = Field(default=None, max_length=64)
    """Null uses the deployment's policy."""
    limits: LimitsIn = LimitsIn()
    policy_options: OptionsByPolicy = {}
    """Changes to the deployment's options of planning algorithms, for this plan alone."""
    replica_budget: Bound = None
    """Redundant slots per layer that this plan may fill, on average; null is the deployment's."""
    phases: Annotated[list[Annotated[Phase, WORD]], FailFast()] = []
    """Windows to plan on; empty uses all, weighted by their tokens."""
    dry_run: bool = False
    """Make the plan and keep nothing."""
    approve: bool = False
    """Start at once. Else the plan waits as a proposal; approving it starts this very plan."""
    target: TargetIn | None = None
    """A placement to reach, instead of a policy."""


@shows(RecordedEpoch, "digest", without="placement")
class EpochOut(ResponseBody):
    """A recorded placement."""


class EpochsOut(ResponseBody):
    """The recorded placements."""

    items: list[EpochOut]


class RollbackQuery(QueryBody):
    """The placement to return to."""

    to_epoch: int | None = Field(default=None, ge=0, le=2**53)
    """An epoch of the group's history."""
    to_placement: str | None = Field(default=None, pattern=DIGEST_PATTERN)
    """Digest of a recorded placement, also a replaced one."""


class RollbackIn(RequestBody, RollbackQuery):
    """The placement to return to; that before the last plan if the body names none."""

    plan_id: str | None = Field(default=None, pattern=PLAN_ID_PATTERN)
    """Chosen by the client, so that a repeated call is not a second rollback."""


class FreezeIn(RequestBody):
    """The time during which no new plan may start."""

    seconds: float = Field(ge=0, le=7 * 86400, allow_inf_nan=False)
    """From now on; 0 ends the pause."""
