"""Messages of a rank's stream that are not part of the placement protocol: liveness, load, pace."""

from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol.messages import ControllerMessage, Leader, MovedAnswers, RankMessage


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent by a rank every `heartbeat_interval_s`, also when no step runs.

    A rank that sends other messages sends it more rarely.
    """

    step: int
    """Steps run so far in this generation."""
    free_bytes: int
    staging_bytes: int
    trouble: str = ""
    """The reason, in words, that the rank takes no more waves; empty if it takes them."""
    stopping: bool = False
    """True if the engine stops as planned; this is the last message of the stream."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Time of one MoE layer on one rank by its tokens: a row of `planning.problem.CostCurves`."""

    tile_tokens: int
    """Tokens per tile."""
    tile_seconds: tuple[float, ...]
    """(K,) seconds at 1..K tiles, never falling."""
    slope_s_per_token: float
    """Seconds per token beyond K tiles."""
    fit_error: float | None = None
    """Mean error of the curve at every point of its profile, by tokens and by replicas, as a share
    of the time; None if the profile has no points by replicas."""
    line_error: float | None = None
    """The same of the `ReplicaCost` of that profile."""


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """Time of one MoE layer on one rank by its tokens and its active replicas.

    `fixed_s + sum over replicas with tokens of (s_per_replica + max(read_s, s_per_token * tokens))`
    """

    fixed_s: float
    s_per_token: float
    """Above 0."""
    s_per_replica: float
    """Seconds that every replica with tokens adds, however many tokens it has."""
    read_s: float
    """Seconds in which the weights of one expert are read; 0 if the profile shows no limit."""
    fit_error: float
    """Mean error of the fit as a share of the time."""
    measured_unix_s: float
    """Unix seconds of the measurement."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a rank, once its engine has allocated it."""

    bytes_per_token: int
    """Bytes of one token over all layers; at least 1."""
    free_bytes: int
    """Bytes of the cache with the present slots while no sequence runs."""


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """The clock of a rank's device under load."""

    ratio: float
    """Present clock of the multiprocessors over the highest one: above 0, at most 2."""
    limited_by: str = ""
    """What keeps the clock down, for example "power"; empty if nothing does."""


RankFact = CostCurve | ReplicaCost | KvCache | DeviceClock | MovedAnswers
"""Facts that a rank tells when it knows them, and again on each new stream."""


@dataclass(frozen=True, slots=True)
class FlowControl:
    """Tells a rank when to report, and which steps. It replaces the one sent before."""

    report_interval_s: float
    """Seconds between reports."""
    stride: int = 1
    """Only steps with step % stride == 0 are reported (R18)."""
    from_step: int = 0
    """First step that the stride applies to."""
    max_steps_per_report: int = 256


class RegistrationOutcome(StrEnum):
    """Result of a Hello."""

    ACCEPTED = "accepted"
    OBSERVE_ONLY = "observe_only"
    """Loads are used; the group gets no waves."""
    REFUSED = "refused"
    """The stream ends; the rank goes on serving and may try again later."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer to a Hello: the first message to a rank."""

    outcome: RegistrationOutcome
    heartbeat_interval_s: float
    lease_s: float
    """Silence after which each side considers the other one gone."""
    flow: FlowControl
    reason: Reason | None = None
    """The reason not to accept; None if accepted."""
    detail: str = ""
    leader: Leader | None = None
    highest_step: int | None = None
    """Highest step already received from this incarnation; None before the first."""


@dataclass(frozen=True, slots=True)
class ReportAck:
    """Answer to a LoadReport: the rank may forget every step up to `highest_step`."""

    highest_step: int | None
    rejected_steps: int = 0
    """Steps of the report that were not used."""
    reason: Reason | None = None
    """The reason not to use them; None if all were used."""


@dataclass(frozen=True, slots=True)
class NotLeader:
    """Another replica leads this deployment; the stream ends."""

    leader_id: str
    address: str
    """host:port of its gRPC server; empty while there is no leader."""
    retry_after_s: float


FromRankLink = RankMessage | Heartbeat | LoadReport | RankFact
ToRankLink = ControllerMessage | Registration | ReportAck | FlowControl | NotLeader
