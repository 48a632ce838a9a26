"""What machines say to each other, and the words they are said in.

Wire messages are events when received and the payload of Send actions when sent. Local events
come from the shell: a finished copy, a resolved poll, a lost lease. Machines take (event, now)
and return actions; a shell carries the actions out and feeds each result back as an event.
Rule numbers refer to docs/protocol.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape

# --- who speaks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads a deployment. A rank binds a term to the first leader id that used it (R2)."""

    leader_id: str
    term: int


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One life of one rank process inside one generation of its EP group (R1)."""

    deployment: DeploymentId
    rank: EpRank
    generation: Generation
    incarnation: int
    """Unix nanoseconds at process start; the newest wins."""


class ParticipantState(StrEnum):
    """Where a rank stands with the wave it holds."""

    IDLE = "idle"
    STAGING = "staging"
    PREPARED = "prepared"
    ARMED = "armed"
    SWAPPING = "swapping"
    ABORTED = "aborted"
    """The wave is given up here, its transport not yet drained (R7)."""


class WaveOutcome(StrEnum):
    """How a wave ended on a rank."""

    SWAPPED = "swapped"
    REFUSED = "refused"
    DROPPED = "dropped"


# --- rank -> controller ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a stream: everything the controller must know of a rank."""

    identity: RankIdentity
    shape: ModelShape
    node: str
    gpu_uuid: str
    """Empty on CPU."""
    epoch: Epoch
    placement_digest: str
    weights_version: int
    """Raised by every weight reload; equal on all ranks (R4)."""
    checksums_digest: str
    """Digest over the (L, E) expert checksums; equal on all ranks (R4)."""
    free_bytes: int
    staging_bytes: int
    """Room for staged experts; a wave's largest rank share must fit."""
    gate_digest: str
    """Digest of K, D and the gate vector's layout, agreed by the EP group (R9)."""
    capabilities: frozenset[str] = frozenset({"migrate"})
    """`migrate` absent means observe only."""
    highest_term: int = 0


@dataclass(frozen=True, slots=True)
class Vote:
    """Answer to Prepare. A yes says: staged, verified, allocated, nothing left that can fail."""

    wave: WaveKey
    yes: bool
    reason: Reason = Reason.COMMITTED
    """Why not, when `yes` is false."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ack:
    """The rank swapped: it is at the new epoch."""

    wave: WaveKey
    epoch: Epoch
    placement_digest: str
    swap_s: float = 0.0
    """Seconds the swap held up the step."""


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    """Answer to Abort or to a Commit of a wave that is gone; sent after polls in flight resolved (R7)."""

    wave: WaveKey
    epoch: Epoch
    """The new epoch if the gate passed all the same."""
    outcome: WaveOutcome
    drained: bool
    """No byte of the wave is still on its way to this rank."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Answer to QueryState: what a new leader rules on (R12)."""

    identity: RankIdentity
    state: ParticipantState
    wave: WaveKey | None
    """The wave held, None when IDLE."""
    epoch: Epoch
    placement_digest: str
    weights_version: int
    drained: bool
    last_wave: WaveKey | None
    """The last wave that ended here."""
    last_outcome: WaveOutcome | None
    placement: Placement | None = None
    """The full map when asked for (R15)."""
    checksums: tuple[int, ...] | None = None
    """Unsigned 64-bit, layer-major (L * E), when asked for (R4)."""
    highest_term: int = 0
    step: int = 0
    """step_boundary calls of the rank's EP group as of its last poll, dummy steps included (R14)."""
    query: int = 0
    """The `QueryState.query` answered; 0 when the rank reports unasked, after a reload."""


@dataclass(frozen=True, slots=True)
class TermRefused:
    """The rank knows a newer leader, or bound this term to another one (R2)."""

    identity: RankIdentity
    leader: Leader
    """The newest leader the rank has bound."""


@dataclass(frozen=True, slots=True)
class StagingProgress:
    """Bytes copied so far, for progress bars; never a decision's input."""

    wave: WaveKey
    bytes_done: int
    bytes_total: int


RankMessage = Hello | Vote | Ack | AbortAnswer | RankState | TermRefused | StagingProgress

# --- controller -> rank ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Copy into staging, verify, allocate, then vote."""

    leader: Leader
    wave: WaveKey
    base_epoch: Epoch
    """Refused as stale unless equal to the rank's epoch (R3)."""
    body: Wave
    checksums: tuple[int, ...]
    """Expected unsigned 64-bit checksum of each transfer in batch order, as registered at load (R4)."""
    batch_deadline_s: float
    """Seconds one batch may take before its communicator is aborted (R10)."""
    max_bytes_per_s: float = 0.0
    """Throttle per rank; 0 is none."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Arm: the gate decides the rest (R5)."""

    leader: Leader
    wave: WaveKey


@dataclass(frozen=True, slots=True)
class Abort:
    """Give the wave up unless the gate already passed (R7)."""

    leader: Leader
    wave: WaveKey


@dataclass(frozen=True, slots=True)
class QueryState:
    """Ask a rank where it stands; also how a leader keeps its lease known to idle ranks."""

    leader: Leader
    want_placement: bool = False
    want_checksums: bool = False
    query: int = 0
    """Number the rank answers with, so that a late answer to an earlier query is known as such."""


ControllerMessage = Prepare | Commit | Abort | QueryState

# --- local events ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromController:
    """A controller's message as a rank's shell hands it in, with the stream it came by (R1)."""

    stream: int
    """Number the rank's shell gave the stream; answers go back by it or not at all."""
    message: ControllerMessage


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; watchdogs and resends look at `now`."""


@dataclass(frozen=True, slots=True)
class StagingFinished:
    """All transfers of the wave arrived, match their checksums, and the swap is allocated."""

    wave: WaveKey


@dataclass(frozen=True, slots=True)
class StagingFailed:
    """The wave cannot be staged here; nothing reachable was touched."""

    wave: WaveKey
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TransportDrained:
    """No operation of the wave is in flight at this rank any more."""

    wave: WaveKey


@dataclass(frozen=True, slots=True)
class SwapFinished:
    """The swap is enqueued on the compute stream and the map installed."""

    wave: WaveKey
    placement_digest: str
    swap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """The swap raised half way: what the slots hold is unknown."""

    wave: WaveKey
    detail: str


@dataclass(frozen=True, slots=True)
class ReloadRequested:
    """The engine wants to load other weights and waits for PermitReload (R4)."""


@dataclass(frozen=True, slots=True)
class WeightsReloaded:
    """The engine loaded other weights: the version rises, waves of the old one end (R4)."""

    weights_version: int
    checksums: tuple[int, ...] = ()
    """Unsigned 64-bit, layer-major (L * E), of the new weights."""


@dataclass(frozen=True, slots=True)
class MigrationDisabled:
    """The rank must refuse every further wave; a wave it already holds goes on."""


@dataclass(frozen=True, slots=True)
class EngineRebalanced:
    """The engine changed its placement by itself, on every rank between the same two steps.

    The epoch rises by one, so that no plan for the earlier placement is taken (R3).
    """

    placement: Placement


@dataclass(frozen=True, slots=True)
class PollPassed:
    """The poll showed every rank armed for the same wave: all swap at this boundary."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PollNotPassed:
    """The poll resolved and nothing was agreed."""


@dataclass(frozen=True, slots=True)
class PollDropped:
    """The poll showed no rank armed and all wanting to drop: all drop at this boundary (R6)."""


# --- actions of a participant ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToController:
    """Send on the stream the cause came by; dropped if that stream is gone."""

    message: RankMessage
    stream: int = 0


@dataclass(frozen=True, slots=True)
class StartStaging:
    """Begin the wave's copies in the background; ends in StagingFinished or StagingFailed."""

    prepare: Prepare


@dataclass(frozen=True, slots=True)
class CancelStaging:
    """Stop the wave's copies and free its staging; ends in TransportDrained.

    TransportDrained may be said only when no operation of the wave is in flight here and, if its
    communicator was aborted, the new one is up: it means "ready for the next wave".
    """

    wave: WaveKey


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy staging to slots and install the map, at this very boundary.

    Ends in SwapFinished or SwapFailed before the boundary returns.
    """

    wave: WaveKey
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Fail-stop: the gate's answer is unknown, the engine must restart the group (R8)."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class RebuildTransport:
    """Every rank of the group agreed, at this boundary, to build a new transfer communicator (R10)."""

    serial: int


@dataclass(frozen=True, slots=True)
class PermitReload:
    """No poll can pass a wave of the old weights any more: the engine may load (R4)."""


ParticipantAction = (
    SendToController
    | StartStaging
    | CancelStaging
    | Swap
    | LeaveGroup
    | RebuildTransport
    | PermitReload
)
