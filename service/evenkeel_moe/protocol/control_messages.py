"""Events and actions of the controller's machines: coordinator and control.

The shell carries out a batch of actions in order. Every Persist action of a batch finishes before
its first SendToRank starts. If one fails, the batch's SendToRank actions are not carried out, but for
questions, and `PersistFailed` names the persists that are not known to be stored; all else of the
batch is carried out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanRecord, WaveKey
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.protocol.messages import ControllerMessage, Leader, QueryState, RankMessage

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromRank:
    """A rank's message as the controller's shell hands it in (R1)."""

    rank: EpRank
    incarnation: int
    """As the stream's Hello said; for a Hello, its own."""
    stream: int
    """Number the shell gave the stream; rises, so a newer stream has a higher one."""
    message: RankMessage


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A rank's stream ended; what was sent on it may be lost."""

    rank: EpRank
    stream: int


@dataclass(frozen=True, slots=True)
class RankHeard:
    """A rank sent telemetry, which only the shell reads: the rank is alive (R1)."""

    rank: EpRank
    incarnation: int
    stream: int


@dataclass(frozen=True, slots=True)
class RankTroubled:
    """A rank reported on this stream that it refuses every wave."""

    rank: EpRank
    stream: int
    trouble: str
    """The rank's explanation; empty if the rank takes waves again."""


@dataclass(frozen=True, slots=True)
class PolicySet:
    """An operator replaced the policy."""

    policy: DeploymentPolicy
    document: Mapping[str, Any]
    """The policy as it is stored."""


@dataclass(frozen=True, slots=True)
class PlansFrozen:
    """An operator froze the deployment, or ended a freeze."""

    until: float
    """Unix seconds until which no plan begins; 0 ends the freeze."""


@dataclass(frozen=True, slots=True)
class AutomaticPlansResumed:
    """An operator lets automatic plans begin again after a rollback (R16)."""


@dataclass(frozen=True, slots=True)
class ClockStepped:
    """The Unix clock was set, or ran on while the monotonic clock stood still."""

    unix_offset_s: float
    """Unix seconds minus monotonic seconds."""


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """What the store held when the lease was won. A flushed store is all defaults (R15)."""

    plans: tuple[PlanRecord, ...] = ()
    epochs: Mapping[Epoch, Placement] = field(default_factory=dict)
    held: bool = False
    frozen_until: float = 0.0
    """Unix seconds."""
    policy: DeploymentPolicy | None = None
    """The policy operators set last; None if the machine keeps the one it has."""
    loss: Mapping[str, Any] | None = None
    """A row for the decision log that reports what the store lost; None if it lost nothing."""


@dataclass(frozen=True, slots=True)
class LeaseAcquired:
    """This replica leads, with a term above the stored one and any `RaiseTerm` asked for."""

    leader: Leader
    stored: StoredRecords = StoredRecords()


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease is gone or may be: nothing more may be sent under its term (R13).

    The shell closes the deployment's rank streams: the ranks look for the new leader.
    """


@dataclass(frozen=True, slots=True)
class CycleDecided:
    """How a RunCycle ended."""

    cycle: int
    reason: Reason
    plan: Plan | None = None
    """Set when the gates passed; its base is what RunCycle was given."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    shadow: Mapping[str, Any] = field(default_factory=dict)
    """What the deployment's shadow policies last scored, by name, for the decision row."""


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """Writes that are not known to be stored, and why."""

    failed: "tuple[PersistAction, ...]"
    detail: str = ""


# --- events of a coordinator, made by control --------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankConnected:
    """The rank has a stream, perhaps a new one."""

    rank: EpRank
    incarnation: int
    stream: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """The rank's heartbeat lease ran out."""

    rank: EpRank


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Steps the fleet has taken, dummy steps included (R14)."""

    step: int


@dataclass(frozen=True, slots=True)
class CancelWave:
    """Give the wave up if it was not voted through yet; `reason` is what the wave ends with."""

    reason: Reason


# --- actions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToRank:
    """Send on this stream; dropped if it is gone, the machine resends."""

    rank: EpRank
    stream: int
    message: ControllerMessage

    @property
    def decides(self) -> bool:
        """Whether it may go out only once its batch is stored: a question rests on nothing that is."""
        return not isinstance(self.message, QueryState)


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Refuse a rank's Hello: tell it why and close the stream."""

    rank: EpRank
    stream: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class PersistIntent:
    """All ranks voted yes, Commit follows: for the audit trail; recovery asks the ranks (R12)."""

    wave: WaveKey
    base_epoch: Epoch


@dataclass(frozen=True, slots=True)
class PersistOutcome:
    """How a wave ended, for the audit trail; never both outcomes for one wave."""

    wave: WaveKey
    committed: bool
    reason: Reason


@dataclass(frozen=True, slots=True)
class PersistEpoch:
    """The group is at this epoch with this map; recorded epochs above it are dropped by the write."""

    generation: Generation
    epoch: Epoch
    placement: Placement


@dataclass(frozen=True, slots=True)
class PersistPlan:
    """Replace a plan record."""

    record: PlanRecord


@dataclass(frozen=True, slots=True)
class PersistDocument:
    """Replace a small named document: `control` holds {held, frozen_until}."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PersistDecision:
    """Append a row to the decision log."""

    row: Mapping[str, Any]


PersistAction = (
    PersistIntent | PersistOutcome | PersistEpoch | PersistPlan | PersistDocument | PersistDecision
)


@dataclass(frozen=True, slots=True)
class WaveHealth:
    """A wave began to wait, or waits no longer: reason None means it runs again (R14).

    `stalled` False with a reason is `paused`: the fleet runs no steps, nothing is wrong.
    """

    wave: WaveKey | None
    stalled: bool
    reason: Reason | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """A person should look; counted by reason."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class RaiseTerm:
    """Ranks know a higher term: give the lease up, acquire it anew above `at_least`, if it is ours to take (R2).

    Control has dropped its machine; LeaseAcquired starts it again.
    """

    at_least: int


@dataclass(frozen=True, slots=True)
class RunCycle:
    """Evaluate the gates and plan, off the loop; answer with CycleDecided of the same number."""

    cycle: int
    epoch: Epoch
    placement: Placement
    generation: Generation
    weights_version: int


CoordinatorAction = SendToRank | PersistIntent | PersistOutcome | WaveHealth | Alert
ControlAction = SendToRank | CloseStream | PersistAction | WaveHealth | Alert | RaiseTerm | RunCycle
