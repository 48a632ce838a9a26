"""What an operator sets per deployment: the mode, the policy and how often to look."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.schedule import Schedule

__all__ = ["DeploymentPolicy", "Mode"]


class Mode(StrEnum):
    """Who starts a plan."""

    OBSERVE = "observe"
    """Nobody: decisions are recorded, no weight moves."""
    PROPOSE = "propose"
    """A person: plans wait for approval."""
    AUTO = "auto"
    """The control loop."""


@dataclass(frozen=True, slots=True)
class DeploymentPolicy:
    """Operator's wishes for one deployment."""

    mode: Mode = Mode.OBSERVE
    policy: str = "keel"
    """Name of the planning algorithm."""
    limits: PlanLimits = PlanLimits()
    cycle_s: float = 30.0
    """Seconds between cycles; a cycle ends in one recorded decision."""
    proposal_ttl_s: float = 3600.0
    """A proposal not approved within this is EXPIRED: loads have moved on."""
    shadow_policies: tuple[str, ...] = ()
    """Planning algorithms scored beside `policy` on the same steps; they never move anything."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Gate settings by name, read where the gates are evaluated; absent names have defaults there."""
    schedule: Schedule = Schedule()
    """When a plan may begin; a rollback always may, and a plan under way goes on."""

    def __post_init__(self) -> None:
        if not self.cycle_s > 0:
            raise InvalidInput(f"cycle_s is {self.cycle_s}, must be above 0")
        if not self.proposal_ttl_s > 0:
            raise InvalidInput(f"proposal_ttl_s is {self.proposal_ttl_s}, must be above 0")
