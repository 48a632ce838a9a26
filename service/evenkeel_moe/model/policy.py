"""An operator's settings of one deployment: mode, policy, limits, thresholds and schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.schedule import Schedule


class Mode(StrEnum):
    """The mode says who starts plans."""

    OBSERVE = "observe"
    """Nobody: decisions are only recorded. Operators may still start plans and rollbacks, unless
    `DeploymentPolicy.observe_lock` is set."""
    PROPOSE = "propose"
    """An operator: plans wait for approval."""
    AUTO = "auto"
    """The control loop."""


class CostChoice(StrEnum):
    """The cost model by which a deployment's plans are made and judged."""

    AUTO = "auto"
    """The best one that is known of the ranks."""
    TOKENS = "tokens"
    """Tokens alone, whatever is known: for an operator who does not trust the numbers."""


OptionValue = float | str
"""The value of a policy's option: a number, or one of several names."""


@dataclass(frozen=True, slots=True)
class DeploymentPolicy:
    """The policy document of one deployment."""

    mode: Mode = Mode.OBSERVE
    policy: str = "keel"
    """Name of the planning algorithm."""
    limits: PlanLimits = PlanLimits()
    cycle_s: float = 2.0
    """Seconds between cycles; a cycle ends in one recorded decision."""
    proposal_ttl_s: float = 3600.0
    """Seconds until a proposal that nobody approved is EXPIRED, because loads change."""
    shadow_policies: tuple[str, ...] = ()
    """Planning algorithms that are only scored, on the same steps as `policy`."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Gate settings by name; `GateSettings` has the defaults."""
    schedule: Schedule = Schedule()
    """Times at which plans may start. Rollbacks may always start; running plans continue."""
    policy_options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    """Options of planning algorithms, by algorithm and option. Those of an algorithm hold wherever
    it is used: as `policy`, as a shadow policy and in a manual plan."""
    dispatch: DispatchModel | None = None
    """The engines' rule to split tokens over replicas; None takes the one that the ranks told, or
    else the setting `planner.dispatch`."""
    cost: CostChoice = CostChoice.AUTO
    observe_lock: bool = False
    """True if in mode observe no request may move weights either."""
    separate_approval: bool = False
    """True if a plan made by hand starts only when another token than its maker's approves it."""
    replica_budget: int | None = None
    """Redundant slots per layer that plans may fill, on average over the layers; None: all."""

    @property
    def locked(self) -> bool:
        """True if nothing may move weights: the mode is observe, and it is locked."""
        return self.mode is Mode.OBSERVE and self.observe_lock

    def __post_init__(self) -> None:
        if not self.cycle_s > 0:
            raise InvalidInput(f"cycle_s is {self.cycle_s}, must be above 0")
        if self.replica_budget is not None and self.replica_budget < 0:
            raise InvalidInput(f"replica_budget is {self.replica_budget}, must not be negative")
        if not self.proposal_ttl_s > 0:
            raise InvalidInput(f"proposal_ttl_s is {self.proposal_ttl_s}, must be above 0")
