"""Messages between controller and ranks, and the events and actions of a rank's machine.

A machine takes an event and the time, and returns actions. Its shell does the I/O: it carries the
actions out and reports each result as a further event. A message is an event where it is received
and part of a send action where it is sent. Rule numbers (R1) refer to docs/protocol.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape

# --- identities -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of a deployment. A rank binds a term to the first leader id that used it (R2)."""

    leader_id: str
    term: int


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One process of one rank, in one generation of its EP group (R1)."""

    deployment: DeploymentId
    rank: EpRank
    generation: Generation
    incarnation: int
    """Start of the process in Unix nanoseconds; the newest process speaks for the rank."""


class ParticipantState(StrEnum):
    """The state of a rank with respect to the wave it holds."""

    IDLE = "idle"
    STAGING = "staging"
    PREPARED = "prepared"
    ARMED = "armed"
    SWAPPING = "swapping"
    ABORTED = "aborted"
    """The rank has given the wave up, and its copies have not drained yet (R7)."""


class WaveOutcome(StrEnum):
    """The way a wave ended on a rank."""

    SWAPPED = "swapped"
    REFUSED = "refused"
    DROPPED = "dropped"


# --- rank -> controller ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lineage:
    """The group of another size that a rank's group came from: steps and epochs go on from there.

    All ranks name the same generation, and no two of them the same rank.
    """

    generation: Generation
    rank: EpRank | None
    """The number of this process there; None if it was none of its ranks."""


MIGRATE = "migrate"
"""The capability of a rank that takes waves."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a stream: all that the controller must know about a rank."""

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
    """Space for staged experts; the rank's share of every wave must fit."""
    gate_digest: str
    """Digest of K, D and the layout of the gate's vector; equal on all ranks (R9)."""
    capabilities: frozenset[str] = frozenset({MIGRATE})
    highest_term: int = 0
    device: str = ""
    """Name of the device as its driver gives it; empty if unknown or a CPU."""
    weight_format: str = ""
    """Number type in which the experts' weights are computed, such as "bf16"; empty if unknown."""
    dispatch: str = ""
    """How the engine splits tokens over replicas, if known; a `DispatchModel` or another name."""
    slots_stay_filled: bool = False
    """True if the engine cannot leave a slot empty. If any rank says so, it holds for the group."""
    lineage: Lineage | None = None
    """Where the group came from; None if it did not come from one of another size."""

    @property
    def migrates(self) -> bool:
        """True if the rank takes waves; else it only observes, and refuses every wave."""
        return MIGRATE in self.capabilities


@dataclass(frozen=True, slots=True)
class Vote:
    """Answer to Prepare. After a yes nothing can fail: all is staged, verified and allocated.

    A rank that gives the wave up for a reload says no after its yes (R4).
    """

    wave: WaveKey
    yes: bool
    reason: Reason = Reason.COMMITTED
    """The reason for a no."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ack:
    """The rank has swapped and is at the new epoch."""

    wave: WaveKey
    epoch: Epoch
    placement_digest: str
    swap_s: float = 0.0
    """Time the swap delayed the step."""


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    """Answer to Abort, or to a Commit of a wave the rank no longer holds.

    It is sent only after every poll that took the rank as armed has resolved (R7).
    """

    wave: WaveKey
    epoch: Epoch
    """The rank's epoch; the new one if the gate passed before the abort."""
    outcome: WaveOutcome
    drained: bool
    """No byte of the wave is still in flight to this rank."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Answer to QueryState; a new leader decides from these answers how a wave ended (R12)."""

    identity: RankIdentity
    state: ParticipantState
    wave: WaveKey | None
    """The wave the rank holds; None in IDLE."""
    epoch: Epoch
    placement_digest: str
    weights_version: int
    drained: bool
    last_wave: WaveKey | None
    """The last wave that ended on this rank."""
    last_outcome: WaveOutcome | None
    placement: Placement | None = None
    """The whole placement; None unless asked for (R15)."""
    checksums: tuple[int, ...] | None = None
    """(L * E) unsigned 64-bit, layer-major; None unless asked for (R4)."""
    highest_term: int = 0
    step: int = 0
    """`step_boundary` calls so far, dummy steps included (R14)."""
    query: int = 0
    """The number of the query it answers; 0 if the rank reports unasked, after a reload."""


@dataclass(frozen=True, slots=True)
class TermRefused:
    """The rank knows a newer leader, or has bound this term to another one (R2)."""

    identity: RankIdentity
    leader: Leader
    """The newest leader the rank knows."""


@dataclass(frozen=True, slots=True)
class StagingProgress:
    """The bytes copied so far. Only for display: no decision depends on it."""

    wave: WaveKey
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class MovedAnswers:
    """How the experts that a wave brought to a rank answer the canary's token there.

    Sent once all of them were asked, also by a rank that got none. Only for display: a difference
    is told as the rank's trouble.
    """

    wave: WaveKey
    moved: int
    """Slots of this rank that got another expert."""
    same: int
    """Those that answer as the expert did when its weights were registered."""
    different: int
    """Those that do not; the others got another expert before they were asked."""
    blind: int
    """Those whose answer another expert of the layer gives too."""


RankMessage = (
    Hello | Vote | Ack | AbortAnswer | RankState | TermRefused | StagingProgress | MovedAnswers
)

# --- controller -> rank ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Tells a rank to copy into staging, verify, allocate, and vote."""

    leader: Leader
    wave: WaveKey
    base_epoch: Epoch
    """The rank refuses the wave as stale unless it is at this epoch (R3)."""
    body: Wave
    checksums: tuple[int, ...]
    """Unsigned 64-bit checksum of each transfer, in batch order, as registered at load (R4)."""
    batch_deadline_s: float
    """Longest time for one batch; after it the communicator is aborted (R10)."""
    max_bytes_per_s: float = 0.0
    """Limit per rank; 0 means no limit."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Arms the rank; the gate decides the rest (R5)."""

    leader: Leader
    wave: WaveKey


@dataclass(frozen=True, slots=True)
class Abort:
    """Tells a rank to give the wave up, unless the gate has passed already (R7)."""

    leader: Leader
    wave: WaveKey


@dataclass(frozen=True, slots=True)
class QueryState:
    """Asks a rank for its state; the regular questions also show the ranks that a leader lives."""

    leader: Leader
    want_placement: bool = False
    want_checksums: bool = False
    query: int = 0
    """The rank repeats this number, so that late answers to earlier queries are recognised."""


ControllerMessage = Prepare | Commit | Abort | QueryState

# --- local events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromController:
    """A controller's message, with the stream it arrived on (R1)."""

    stream: int
    """The shell's number of the stream; an answer goes out on it or not at all."""
    message: ControllerMessage


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines and resends are due for a check."""


@dataclass(frozen=True, slots=True)
class StagingFinished:
    """All transfers of the wave have arrived with the right checksums; the swap is allocated."""

    wave: WaveKey


@dataclass(frozen=True, slots=True)
class StagingFailed:
    """The wave cannot be staged on this rank; nothing the router reaches was touched."""

    wave: WaveKey
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TransportDrained:
    """No operation of the wave is in flight at this rank, and its communicator works again."""

    wave: WaveKey


@dataclass(frozen=True, slots=True)
class SwapFinished:
    """The swap is enqueued on the compute stream, and the placement is installed."""

    wave: WaveKey
    placement_digest: str
    swap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """The swap failed half-way: the contents of the slots are unknown."""

    wave: WaveKey
    detail: str


@dataclass(frozen=True, slots=True)
class ReloadRequested:
    """The engine wants to load other weights, and waits for PermitReload (R4)."""


@dataclass(frozen=True, slots=True)
class WeightsReloaded:
    """The engine has loaded other weights: the version rises, and waves of the old one end (R4)."""

    weights_version: int
    checksums: tuple[int, ...] = ()
    """(L * E) unsigned 64-bit, layer-major, of the new weights."""


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
    """The poll resolved without an agreement."""


@dataclass(frozen=True, slots=True)
class PollDropped:
    """The poll showed no armed rank, and all ranks want to drop: all drop at this boundary (R6)."""


# --- actions of a participant ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToController:
    """Send on the stream the cause arrived on; the message is dropped if the stream is gone."""

    message: RankMessage
    stream: int = 0


@dataclass(frozen=True, slots=True)
class StartStaging:
    """Begin the wave's copies in the background; the result is StagingFinished or StagingFailed."""

    prepare: Prepare


@dataclass(frozen=True, slots=True)
class CancelStaging:
    """Stop the wave's copies and free its staging; the result is TransportDrained."""

    wave: WaveKey


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy staging to slots and install the placement, at this boundary.

    The result is SwapFinished or SwapFailed, before the boundary returns.
    """

    wave: WaveKey
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Leave the group: the gate's result is unknown, and the engine must restart the group (R8)."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class RebuildTransport:
    """Build a new transfer communicator: every rank agreed to it at this boundary (R10)."""

    serial: int


@dataclass(frozen=True, slots=True)
class PermitReload:
    """Let the engine load: no poll can pass a wave of the old weights any more (R4)."""


ParticipantAction = (
    SendToController
    | StartStaging
    | CancelStaging
    | Swap
    | LeaveGroup
    | RebuildTransport
    | PermitReload
)
