"""What the link itself says: words of the stream that no machine hears."""

from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol.messages import ControllerMessage, Leader, RankMessage

__all__ = [
    "CostCurve",
    "FlowControl",
    "FromRankLink",
    "Heartbeat",
    "NotLeader",
    "Registration",
    "RegistrationOutcome",
    "ReportAck",
    "ToRankLink",
]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent by a rank every `heartbeat_interval_s`, also when no step runs; more rarely while other messages are sent."""

    step: int
    """Steps run so far in this generation."""
    free_bytes: int
    staging_bytes: int
    trouble: str = ""
    """Why the rank takes no wave any more; empty while all is well."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of one MoE layer on one rank by the tokens it carries: one row of `planning.problem.CostCurves`."""

    tile_tokens: int
    """Tokens per tile: the width of one stair."""
    tile_seconds: tuple[float, ...]
    """(K,) seconds at 1..K tiles, not falling."""
    slope_s_per_token: float
    """Beyond K tiles."""


@dataclass(frozen=True, slots=True)
class FlowControl:
    """How often and how densely a rank reports; a later one replaces an earlier one."""

    report_interval_s: float
    """Seconds between reports."""
    stride: int = 1
    """Only steps with step % stride == 0 are reported (R18)."""
    from_step: int = 0
    """The stride holds from this step on."""
    max_steps_per_report: int = 256


class RegistrationOutcome(StrEnum):
    """Answer to a Hello."""

    ACCEPTED = "accepted"
    OBSERVE_ONLY = "observe_only"
    """Loads count; no wave will be sent to the group."""
    REFUSED = "refused"
    """The stream ends; the rank serves on and may try again later."""


@dataclass(frozen=True, slots=True)
class Registration:
    """First message to a rank."""

    outcome: RegistrationOutcome
    heartbeat_interval_s: float
    lease_s: float
    """Silence after which either side takes the other as gone."""
    flow: FlowControl
    reason: Reason | None = None
    """Why not accepted; None when accepted."""
    detail: str = ""
    leader: Leader | None = None
    highest_step: int | None = None
    """Highest step already taken in from this incarnation; None before the first."""


@dataclass(frozen=True, slots=True)
class ReportAck:
    """Answer to a LoadReport: the rank may forget every step up to `highest_step`."""

    highest_step: int | None
    rejected_steps: int = 0
    """Steps of the report that were not used."""
    reason: Reason | None = None
    """Why; None when none was rejected."""


@dataclass(frozen=True, slots=True)
class NotLeader:
    """Another replica leads this deployment; the stream ends."""

    leader_id: str
    address: str
    """host:port of its gRPC server; empty while no one leads."""
    retry_after_s: float


FromRankLink = RankMessage | Heartbeat | LoadReport | CostCurve
ToRankLink = ControllerMessage | Registration | ReportAck | FlowControl | NotLeader
