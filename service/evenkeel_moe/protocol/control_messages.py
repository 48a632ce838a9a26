"""Events and actions of the controller's machines, coordinator and control.

The shell carries out a batch of actions in order. All Persist actions of a batch finish before its
first SendToRank starts. If a Persist action fails, `PersistFailed` names the writes that are not
known to be stored. The batch's SendToRank actions are then skipped, except questions; all other
actions are carried out. The machine takes `PersistFailed` before any other event: a tick would make
it send again what has to wait for the write.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.hold import Hold, Retirement
from evenkeel_moe.model.ids import Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanRecord, WaveKey
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.protocol.messages import (
    ControllerMessage,
    Leader,
    Prepare,
    QueryState,
    RankMessage,
)

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromRank:
    """A rank's message, with the process and the stream it came from (R1)."""

    rank: EpRank
    incarnation: int
    """The incarnation in the stream's Hello."""
    stream: int
    """The shell's number of the stream; a newer stream has a higher one."""
    message: RankMessage
    certified: bool = False
    """True if the certificate of the connection names the rank."""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A rank's stream ended; messages sent on it may be lost."""

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
class RankStopped:
    """A rank said on this stream that its engine stops as planned."""

    rank: EpRank
    stream: int


@dataclass(frozen=True, slots=True)
class ClockStepped:
    """The Unix clock was set, or ran on while the monotonic clock stood still."""

    unix_offset_s: float
    """Unix seconds minus monotonic seconds."""


# --- requests of operators ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanSubmitted:
    """A plan made by hand or for a rollback. The same id with the same digest changes nothing."""

    plan: Plan
    approve: bool = False
    """Start it at once."""
    by: str = ""
    request_digest: str | None = None
    bounded: bool = True
    """Started at once, it keeps within the limits of the policy."""

    @property
    def plan_id(self) -> PlanId:
        """The plan's."""
        return self.plan.plan_id


@dataclass(frozen=True, slots=True)
class RequestRepeated:
    """A request that may have created a plan before: writes that failed then are tried again."""

    plan_id: PlanId
    request_digest: str | None


@dataclass(frozen=True, slots=True)
class PlanApproved:
    """An operator starts a proposed plan."""

    plan_id: PlanId
    by: str
    bounded: bool = True
    """The plan keeps within the present limits of the policy."""


@dataclass(frozen=True, slots=True)
class PlanCancelled:
    """An operator stops a plan: at once until all votes are in, then before its next wave (R16)."""

    plan_id: PlanId
    by: str


@dataclass(frozen=True, slots=True)
class PolicySet:
    """An operator replaced the policy."""

    policy: DeploymentPolicy
    document: Mapping[str, Any]
    """The policy as it is stored."""


@dataclass(frozen=True, slots=True)
class PlansFrozen:
    """An operator lets no plan begin for a while; a plan that has begun goes on."""

    seconds: float
    """0 ends the freeze."""


@dataclass(frozen=True, slots=True)
class RanksRetired:
    """An operator takes ranks out of the group: no other plan begins until it has another size."""

    retiring: Retirement
    base: Placement
    """The placement that was looked at."""
    evacuation: PlanSubmitted | None
    """The plan after which no expert lives on them alone; None if none does now."""


@dataclass(frozen=True, slots=True)
class AutomaticPlansResumed:
    """An operator lets plans begin again: ends a freeze, a retirement of ranks, and the hold on
    automatic plans (R16)."""


OperatorRequest = (
    PlanSubmitted
    | RequestRepeated
    | PlanApproved
    | PlanCancelled
    | PolicySet
    | PlansFrozen
    | RanksRetired
    | AutomaticPlansResumed
)
"""A request that is refused raises its error and changes nothing. All may be repeated."""


# --- events of the lease, the planner and the store -----------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """The contents of the store when the lease was won; all defaults if it was flushed (R15)."""

    plans: tuple[PlanRecord, ...] = ()
    epochs: Mapping[Epoch, Placement] = field(default_factory=dict)
    hold: Hold = Hold()
    frozen_until: float = 0.0
    """Unix seconds."""
    policy: DeploymentPolicy | None = None
    """The policy operators set last; None if the machine keeps the one it has."""
    loss: Mapping[str, Any] | None = None
    """A row for the decision log that reports what the store lost; None if it lost nothing."""


@dataclass(frozen=True, slots=True)
class LeaseAcquired:
    """This replica leads; its term is above the stored one and above every `RaiseTerm`."""

    leader: Leader
    stored: StoredRecords = StoredRecords()


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease is lost or may be lost: the machine sends nothing more under its term (R13).

    Events that came before it are still answered; ranks refuse them once they know a newer leader
    (R2). The streams stay open until another replica leads, to which the shell sends the ranks.
    """


@dataclass(frozen=True, slots=True)
class CycleDecided:
    """The planner answered a RunCycle."""

    cycle: int
    reason: Reason
    plan: Plan | None = None
    """The plan if the gates passed; its base is the placement of RunCycle."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    shadow: Mapping[str, Any] = field(default_factory=dict)
    """The last scores of the shadow policies by name, for the decision row."""


@dataclass(frozen=True, slots=True)
class PlanMeasured:
    """The gain of a committed plan was measured, or it is known that it cannot be."""

    plan_id: PlanId
    delivered: DeliveredGain


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """Some writes are not known to be stored."""

    failed: "tuple[PersistAction, ...]"
    detail: str = ""


# --- events of a coordinator, made by control -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankConnected:
    """The rank has a stream; it may be a new one."""

    rank: EpRank
    incarnation: int
    stream: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """The rank was not heard for the length of its lease."""

    rank: EpRank


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The number of steps the group has taken, dummy steps included (R14)."""

    step: int
    swapping: WaveKey | None = None
    """The wave that a rank's engine is carrying out, if no rank has trouble with it."""


@dataclass(frozen=True, slots=True)
class CancelWave:
    """Give the wave up, with this reason, unless all ranks have voted yes already."""

    reason: Reason


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToRank:
    """Send on this stream. If it is gone the message is dropped; the machine sends it again."""

    rank: EpRank
    stream: int
    message: ControllerMessage

    @property
    def needs_store(self) -> bool:
        """Return True if it must wait until its batch is stored; a question need not wait."""
        return not isinstance(self.message, QueryState)


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream and tell the rank why: its Hello is refused, or its place is taken."""

    rank: EpRank
    stream: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class PersistEpoch:
    """The group is at this epoch with this placement.

    The write sets aside all later epochs, and all others if a history begins.
    """

    generation: Generation
    epoch: Epoch
    placement: Placement
    begins_history: bool = False
    """True if the group did not come from the recorded epochs, for instance after a cold start."""


@dataclass(frozen=True, slots=True)
class PersistPlan:
    """Replace a plan record."""

    record: PlanRecord


@dataclass(frozen=True, slots=True)
class PersistDocument:
    """Replace a small named document: `control` holds {held, frozen_until}; `policy` the policy."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PersistDecision:
    """Append a row to the decision log."""

    row: Mapping[str, Any]


PersistAction = PersistEpoch | PersistPlan | PersistDocument | PersistDecision


@dataclass(frozen=True, slots=True)
class WaveBegins:
    """A wave is about to be sent out, for the first time."""

    prepare: Prepare


@dataclass(frozen=True, slots=True)
class WaveEnded:
    """It is known how a wave ended, for the first time; a wave never ends in both ways."""

    wave: WaveKey
    committed: bool
    reason: Reason
    newly_counted: bool = True
    """False if the record of a committed wave's plan counted it before, had ended, or is left to
    another leader."""


@dataclass(frozen=True, slots=True)
class WaveHealth:
    """A wave began to wait, or goes on: then the reason is None (R14).

    `stalled` False with a reason means `paused`: the group runs no steps, and nothing is wrong.
    """

    wave: WaveKey | None
    stalled: bool
    reason: Reason | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """A person should look into it; counted by reason."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class RaiseTerm:
    """Give the lease up and try to acquire it again with a term above `at_least` (R2).

    Some rank knows that term. The machine is a follower again until LeaseAcquired.
    """

    at_least: int


@dataclass(frozen=True, slots=True)
class RunCycle:
    """Evaluate the gates and plan in the background; the result is CycleDecided, same number."""

    cycle: int
    epoch: Epoch
    placement: Placement
    generation: Generation
    weights_version: int
    closed_by: Reason | None = None
    """Why no plan may begin now: the cycle only measures the balance, and ends with this reason."""


CoordinatorAction = SendToRank | WaveHealth | Alert
ControlAction = (
    SendToRank
    | CloseStream
    | PersistAction
    | WaveBegins
    | WaveEnded
    | WaveHealth
    | Alert
    | RaiseTerm
    | RunCycle
)
