"""Bodies of requests and responses.

A value that is shown as it is has no body here: a response contains its dataclass, such as
`RankStatus`. Other bodies read their fields from the attributes of the value they show
(`model_validate`), so that `convert` states only what differs. The docstrings of both are the
descriptions in docs/openapi.json.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import FailFast, Field, StrictBool, StrictInt, StrictStr, computed_field

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
)
from evenkeel_moe.api.words.gates import PlanningGate
from evenkeel_moe.api.words.health import Health
from evenkeel_moe.api.words.plan_figures import Figure
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.policy import CostChoice, DeploymentPolicy, Mode
from evenkeel_moe.planning.decision.capacity import MOST_RANKS
from evenkeel_moe.ports.status import RankStatus

Matrix = list[list[float]]
Bound = Annotated[int | None, Field(ge=0, le=2**62, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
FiniteSeconds = Annotated[Finite, Field(gt=0)]
Spans = Annotated[list[str], FailFast()]
Name = Annotated[str, Field(max_length=64)]
PolicyOptions = Annotated[dict[Name, StrictInt | Finite | StrictStr | None], Field(max_length=32)]
OptionsByPolicy = Annotated[dict[Name, PolicyOptions | None], Field(max_length=32)]
_DEFAULT = DeploymentPolicy()
SlotRow = Annotated[list[Annotated[int, Field(ge=-1, le=2**31 - 1)]], FailFast()]


class ProblemOut(ResponseBody):
    """Problem details (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    reason: str | None = None
    """One of the closed list of reasons."""
    leader: str | None = None
    """With `not_leader`: id of the controller replica that leads; null while none leads."""
    leader_address: str | None = None
    """host:port where ranks reach the leader; null if unknown."""


def problem_answers(descriptions: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Return how a route documents problems, by status."""
    return {
        code: {"model": ProblemOut, "description": words} for code, words in descriptions.items()
    }


CONFLICT = problem_answers({409: "The request does not fit the current state"})


# --- deployments ----------------------------------------------------------------------------


class ShapeOut(ResponseBody):
    """The sizes that the ranks declared."""

    num_layers: int
    num_logical_experts: int
    num_ranks: int
    slots_per_rank: int
    top_k: int
    bytes_per_expert: int
    num_expert_groups: int
    pool_slots_per_rank: int | None
    shared_experts: Number
    """Work of the shared experts for one token, in routed experts; null if unknown."""


class ServingSpeedOut(ResponseBody):
    """The speed at which the engine served. It also changes with the traffic."""

    step_s: float
    """Seconds from one step to the next."""
    tokens_per_s: float
    """Real tokens of all ranks."""


class DeliveredOut(ResponseBody):
    """The gain that a plan promised, and the one it delivered by the seconds that ranks reported.

    Gains are shares of MoE time. Null is unknown, never zero.
    """

    gain: Number
    """The measured gain; negative if the plan cost time."""
    lower: Number
    """Lower bound of its 95 % interval."""
    upper: Number
    error: Number
    """Its standard error."""
    promised: Number
    """The gain of the verdict; null if the plan had none."""
    promised_lower: Number
    over_promised: Number
    """gain / promised; null also if nothing was promised."""
    modelled: Number
    """Gain of the same steps under the cost model."""
    steps: int
    """Compared steps, as many before the plan as after it."""
    cost_source: TextOrNull
    """Source of the cost model that the plan was scored by."""
    unknown_because: TextOrNull
    """The reason that the gain is unknown."""
    at: float
    """Unix seconds at which it was measured."""
    before: ServingSpeedOut | None
    """The speed in up to 512 steps before the plan; null if unknown."""
    after: ServingSpeedOut | None
    """The speed in up to 512 steps after it; null if unknown."""


class PlanSummary(ReasonedBody):
    """A plan without its maps."""

    plan_id: str
    deployment: str
    kind: str
    """automatic, manual, rollback or evacuation."""
    may_cost_text: str | None
    """Says why the plan may cost MoE time; null if it is made to save some."""
    policy: str
    phase: str
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
    error: str | None
    base_epoch: int
    waves: int
    waves_committed: int
    moves: int
    """Number of copies between ranks."""
    nbytes: int
    """Bytes copied between ranks."""
    created_at: float
    updated_at: float
    expires_at: float | None
    approved_by: str | None
    numbers: Annotated[dict[str, float | None], PLAIN]
    delivered: DeliveredOut | None
    """Null before the plan was measured, and if it was not carried out."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def planned_because_text(self) -> str:
        """The reason the plan was made, as a sentence."""
        return sentence(self.planned_because)


class FindingOut(ResponseBody):
    """One way in which the counts of a deployment contradict how an engine routes."""

    code: str
    """uneven_layers, idle_layers or idle_experts."""
    severity: str
    """doubt: nothing is planned on the counts. note: below the thresholds of the policy."""
    words: str
    """The finding as one line."""
    where: str
    """The layers, experts or ranks."""
    share: Number
    """How much, as a share of the choices, layers or experts that there are."""


class GatesOut(ResponseBody):
    """The gates of the newest cycle."""

    items: list[PlanningGate]
    """In the order in which a cycle meets them; the first that is closed ends it."""


class CoverageOut(ResponseBody):
    """The experts that a placement loses with one fault domain."""

    domain: str
    """rank or node."""
    most_lost: int
    """Experts, over all layers, that are lost with the domain that holds the most alone."""
    covered: int
    """Experts, over all layers, that the loss of no domain takes."""
    experts: int
    words: str
    """The same as a phrase."""


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


class ResizeOut(ResponseBody):
    """Ranks that retire from a group."""

    retire: list[int]
    num_ranks: int
    """Ranks of the group with those that retire."""
    to_ranks: int
    """Ranks that stay."""
    stranded: int | None
    """Experts, over all layers, that live on retiring ranks alone; null while the placement is not
    known."""
    ready: bool
    """True if every expert lives on a rank that stays, and no plan runs: the ranks may leave."""
    plan_id: str | None
    """The newest plan that moves experts away; null if there was none."""
    words: str
    """The same as a sentence."""


class DeploymentOut(ReasonedBody):
    """One deployment; null means unknown, never zero.

    In a list, a deployment that another controller replica leads has only its name and its leader.
    """

    deployment: str
    health: Health
    state: str
    reason: str
    mode: str | None
    policy: str | None
    leader: TextOrNull
    """Id of the controller replica that leads; null while none leads."""
    leader_address: str | None
    """host:port where ranks reach the leader."""
    term: int | None
    generation: str | None
    epoch: int | None
    rollback_epoch: int | None
    """The epoch to which a rollback without `to_epoch` leads; null if there is none."""
    shape: ShapeOut | None
    ranks: list[RankStatus] | None
    step: int | None
    """Newest complete step."""
    window_steps: int | None
    """Complete steps in the fullest window."""
    balancedness_mean: Number
    """Mean over the window's steps and layers."""
    balancedness_worst: Number
    """Mean over the window's steps, of the worst layer."""
    time_balance: Number
    """Fluid time / predicted time of the window in the newest cycle; null if the cost model is by
    tokens."""
    time_balance_worst: Number
    """The same of the worst layer."""
    cost_model: CostModelOut | None
    """The cost model of predicted MoE times; null before the first cycle."""
    active_plan: PlanSummary | None
    proposals: list[PlanSummary] | None
    """Plans that wait for approval, oldest first."""
    staging_bytes_done: int | None
    staging_bytes_total: int | None
    last_decision: JsonObject | None
    """The newest row of `decisions`."""
    frozen_until_unix: float | None
    held: bool | None
    """True while automatic plans wait for `resume`."""
    held_because: str | None
    """held_after_rollback, held_after_data_loss or gains_not_delivered; null if not held."""
    held_text: str | None
    """Sentences that say why automatic plans are held, and what the hold stops in this mode; null
    if they are not held."""
    dispatch: str | None
    """Model of the engines' dispatcher, for which plans are made."""
    dispatch_warning: str | None
    """A sentence that names two dispatchers that disagree; empty if none do."""
    balancedness_by_phase: dict[Phase, Number] | None
    """Mean over the steps and layers of the window of each phase."""
    newest_step_unix: Number
    """Unix seconds at which the newest complete step was counted."""
    plan_aborted_unix: Number
    """Unix seconds at which the newest plan that was aborted ended."""
    plans_lost_time: int | None
    """Newest measured plans in a row that cost time; null before a plan was measured."""
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
    nbytes: int


class PlanOut(PlanSummary):
    """A plan with its target, waves and story."""

    generation: str
    weights_version: int
    target: PlacementOut
    wave_list: list[WaveOut]
    story: list[JsonObject]
    """The events in order, each with `text` and `phase_text`: the event and the phase in words."""
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
    nbytes: int
    """Bytes copied between ranks."""
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


# --- requests -------------------------------------------------------------------------------


class LimitsIn(ChangeBody):
    """Bounds on one plan; null is no bound."""

    max_moves: Bound = None
    """Copies between ranks."""
    max_bytes: Bound = None
    """Bytes copied between ranks."""
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


class EpochOut(ResponseBody):
    """A recorded placement."""

    epoch: int
    digest: str
    """Digest of the placement."""
    replaced: bool
    """True if it belongs to another history than the group's: one before a cold start, or that of
    other ranks of the same name."""


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
