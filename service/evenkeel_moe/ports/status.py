"""The state of a deployment and of its ranks, as the REST API and the metrics show it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.finding import Finding
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.quantities import counted, numbered
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.survival import Coverage

_Bound = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class HealthBounds:
    """Beyond these a deployment is not healthy. The chart sets them to its alerts' thresholds."""

    balancedness_min: _Bound = 0.75
    """Least mean balancedness of a phase's window."""
    time_balance_min: _Bound = 0.75
    """Least time balance."""
    data_stale_s: _Bound = 120.0
    """Largest age of the newest complete step."""
    slow_rank_ratio: _Bound = 1.3
    """Largest time of a rank / that of the median rank for the same tokens."""
    plan_stuck_s: _Bound = 600.0
    """Longest time in which a plan changes neither phase nor wave."""
    plan_failed_s: _Bound = 900.0
    """Time for which an aborted plan is told."""
    plans_lost_time: Annotated[int, Field(ge=1)] = 2
    """Newest measured plans in a row that cost time."""
    no_decision_s: _Bound = 300.0
    """Longest time in which no cycle ends."""
    epoch_mismatch_s: _Bound = 120.0
    """Longest time in which ranks of a running plan are at different epochs."""


DELIVERED_BOUNDS = HealthBounds()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank. The REST API shows it as it is."""

    rank: int
    node: str
    gpu_uuid: str
    fresh: bool
    """True while the rank's heartbeat lease is valid and it has not stopped as planned."""
    stopped: bool
    """True if its engine said that it stops as planned; a restart ends this."""
    last_seen_unix: float
    epoch: int | None
    """Null while the rank is not connected: what it named at its start may be over."""
    state: str
    """State of the wave the rank holds; unknown before it told one, and once it is lost."""
    load_share: float | None
    """Share of the window's tokens; 1/ranks is balanced. Null without data."""
    seconds_per_token: float | None
    """Median seconds of MoE computation per token, before the collective. Null if not measured."""
    free_bytes: int | None
    """Bytes of memory that its device has free. Null while the rank is not connected."""
    staging_bytes: int
    slowness: float | None
    """Seconds per token divided by the median rank's; above 1 is slower. Null if unknown."""
    trouble: str
    """The reason, in words, that the rank takes no more waves; empty if it takes them."""
    device: str
    """Name of the rank's device; empty if unknown."""
    weight_format: str
    """Number type of the weights of its experts, such as bf16; empty if unknown."""


@dataclass(frozen=True, slots=True)
class ResizeStatus:
    """Ranks that retire from a group. The REST API shows it as it is."""

    retire: tuple[int, ...]
    num_ranks: int
    """Ranks of the group with those that retire."""
    to_ranks: int
    """Ranks that stay."""
    stranded: int | None
    """Experts, over all layers, that live on retiring ranks alone. Null while the placement is not
    known."""
    ready: bool
    """True if every expert lives on a rank that stays, and no plan runs: the ranks may leave."""
    plan_id: str | None
    """The newest evacuation; null if there was none."""

    @property
    def words(self) -> str:
        """The same as a sentence."""
        who = f"Ranks {numbered(self.retire)} of {self.num_ranks}"
        if self.ready:
            return f"{who} are ready to retire: every expert lives on a rank that stays."
        if self.stranded is None:
            return f"{who} retire; the ranks have not told their placement."
        if self.stranded == 0:
            return f"{who} retire; a plan is running."
        lives = counted(self.stranded, "expert lives", "experts live")
        return f"{who} retire; {lives} on them alone."


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """The state of one deployment. None means unknown, never zero."""

    deployment: DeploymentId
    at_unix: float
    """Unix seconds of this status."""
    state: str
    """State of the control machine: waiting_for_ranks, recovering, ready, migrating, ..."""
    reason: str
    """The Reason for the state."""
    mode: str
    """observe, propose or auto."""
    policy: str
    rules: DeploymentPolicy
    """The policy document, with mode and policy too."""
    leader: str
    term: int
    generation: str
    epoch: int | None
    """Null before the ranks reported it."""
    rollback_epoch: int | None
    """The epoch to which a rollback without `to_epoch` leads; None if there is none."""
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
    """The origin of predicted times; None before the first cycle."""
    active_plan: PlanRecord | None
    proposals: tuple[PlanRecord, ...] = ()
    """The plans that wait for approval, oldest first."""
    staging_bytes_done: int = 0
    staging_bytes_total: int = 0
    last_decision: Mapping[str, Any] | None = None
    frozen_until_unix: float | None = None
    held: bool = False
    """True while automatic plans wait for `resume`."""
    resize: ResizeStatus | None = None
    """None unless ranks retire."""
    held_because: str | None = None
    """held_after_rollback, held_after_data_loss or gains_not_delivered; None if not held."""
    leader_address: str | None = None
    """host:port by which ranks reach the leader."""
    dispatch: str = ""
    """The model of the engines' dispatcher, by which plans are made and balance is computed."""
    dispatch_warning: str = ""
    """A sentence that names two dispatchers that disagree; empty if none do."""
    balancedness_by_phase: Mapping[Phase, float | None] = field(default_factory=dict)
    """As `balancedness_mean`, for the window of each phase."""
    balancedness_worst_by_phase: Mapping[Phase, float | None] = field(default_factory=dict)
    """As `balancedness_worst`, for the window of each phase."""
    newest_step_unix: float | None = None
    """Unix seconds at which the newest complete step was counted."""
    plan_aborted_unix: float | None = None
    """Unix seconds at which the newest plan that was aborted ended."""
    plans_lost_time: int | None = None
    """Newest measured plans in a row that cost time; None before a plan was measured."""
    findings: tuple[Finding, ...] | None = None
    """What is wrong with the counts of the newest steps; None if there are no counts to check."""
    coverage: tuple[Coverage, ...] | None = None
    """The experts that are lost with one rank and, if there are several nodes, with one node; None
    before the ranks reported their placement."""
    start_refused_text: str | None = None
    """Why a plan made by hand could not start now, in words; None if it could."""
