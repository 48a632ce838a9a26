"""One rank: its participant, gate and save barrier, its bytes, and the shell around them.

All ranks are alike, so each runs as rank 0. The controller's side gets a rank's messages with the
number of their stream's rank (`tests.explore.leader`).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.rank.gate import PollFailed, PollResolved
from tests.explore.freeze import AGES_AGO
from tests.explore.invariants import EPOCH_FALLS, TOLD_UNSAVED, WRONG_BYTES
from tests.explore.small import (
    DEPLOYMENT,
    NEVER_S,
    SLOTS,
    bytes_of,
    checksum,
    checksums_of,
    flip,
    numbered,
    shape_of,
)
from tests.sim.checks import Violation
from tests.sim.kit import Kit

CORRUPT = ("corrupt",)
COPYING, STAGED, FAILED, CANCELLED, DRAINING = "copying staged failed cancelled draining".split()


@dataclass(slots=True)
class Copies:
    """The copies of one wave into the staging memory of this rank."""

    prepare: msg.Prepare
    phase: str = COPYING


@dataclass(slots=True)
class Outputs:
    """The effects of one event of a rank on the others."""

    sends: list[tuple[int, msg.RankMessage]] = field(default_factory=list)
    """(stream, message) in order."""
    swapped: WaveKey | None = None
    installed: tuple[Epoch, str] | None = None
    saved: tuple[Epoch, str] | None = None
    left: bool = False
    permitted: bool = False


class RankProcess:
    """One process of a rank."""

    def __init__(
        self, kit: Kit, generation: Generation, life: int, epoch: Epoch, placement: Placement,
        version: int,
    ) -> None:  # fmt: skip
        layers = placement.num_layers
        identity = msg.RankIdentity(DEPLOYMENT, numbered(0), generation, life)
        self.participant = kit.participant(
            identity,
            shape_of(placement.num_ranks, layers),
            placement,
            epoch=epoch,
            weights_version=version,
            checksums=checksums_of(layers, version),
            staging_bytes=SLOTS,
            drop_after_s=NEVER_S,
        )
        self.gate = kit.gate(self.participant, poll_every=1, resolve_after=1)
        self.gate.settle(self.gate.agreement())
        self.barrier = kit.barrier()
        self.version = version
        self.map, self.epoch = placement, epoch
        self.bytes: list[tuple] = list(bytes_of(placement, version))
        """The content of each slot, by layer and slot."""
        self.staging: list[tuple | None] = [None] * SLOTS
        self.copies: list[Copies] = []
        """Oldest first; more than one only if a rank takes a wave before the last has drained."""
        self.saving: list[tuple[Epoch, Placement]] = []
        self.saved_epoch = epoch
        self.stream = 0
        """The stream in use; 0 for none."""
        self.passed = False
        """True if it has passed the boundary of this step, and others have not."""
        self.vector: tuple[int, ...] | None = None
        """Its vector in the newest poll; None if it did not begin one."""
        self.earlier: tuple[int, ...] | None = None
        """Its vector in the poll before, which ranks that have not passed still need."""
        self.reload = ""
        """`asked`, `permitted` or `loaded`, until it reports the new weights."""
        self.serial, self.broken = 0, False
        """The number of its transfer communicator; True if that is aborted."""

    # --- the shell --------------------------------------------------------------------------------

    def feed(self, event: object, out: Outputs) -> None:
        self.carry(self.participant.handle(event, 0.0), out)

    def carry(self, actions: list[msg.ParticipantAction], out: Outputs) -> None:
        for action in actions:
            match action:
                case msg.SendToController():
                    for answer in self.barrier.outgoing(action):
                        self.send(answer, out)
                case msg.StartStaging(prepare=prepare):
                    self.copies.append(Copies(prepare, FAILED if self.broken else COPYING))
                case msg.CancelStaging(wave=wave):
                    self.cancel(wave)
                case msg.PermitReload():
                    self.reload = "permitted" if self.reload == "asked" else self.reload
                case msg.LeaveGroup():
                    out.left = True
                case msg.Swap():  # Only a mutant swaps outside a boundary.
                    self.swap(action, out)
                    self.feed(msg.SwapFinished(action.wave, self.map.digest), out)
                case msg.RebuildTransport(serial=serial):
                    self.rebuild(serial)
                case _:
                    raise AssertionError(action)

    def send(self, action: msg.SendToController, out: Outputs) -> None:
        """Send an answer; the epoch it names must be that of a saved placement (R3)."""
        told = getattr(action.message, "epoch", None)
        if told is not None and told > self.saved_epoch:
            detail = f"{type(action.message).__name__} names epoch {told}, which is not saved"
            raise Violation(TOLD_UNSAVED, detail)
        out.sends.append((action.stream, action.message))

    def hello(self, stream: int, out: Outputs) -> None:
        """Open a stream."""
        part, self.stream = self.participant, stream
        epoch, digest = self.barrier.told(part.epoch, part.placement.digest)
        hello = msg.Hello(
            identity=part.identity,
            shape=part.shape,
            node="n0",
            gpu_uuid="",
            epoch=epoch,
            placement_digest=digest,
            weights_version=part.weights_version,
            checksums_digest=str(part.weights_version),
            free_bytes=0,
            staging_bytes=part.staging_bytes,
            gate_digest=self.gate.digest,
            highest_term=part.leader.term if part.leader is not None else 0,
        )
        self.send(msg.SendToController(hello, stream), out)

    # --- copies -----------------------------------------------------------------------------------

    @property
    def moving(self) -> list[Copies]:
        """The copies whose bytes have not arrived."""
        return [copies for copies in self.copies if copies.phase in (COPYING, CANCELLED)]

    def arrived(self, copies: Copies, contents: tuple, out: Outputs) -> None:
        """The bytes of a wave arrive, also after the wave was given up."""
        self.staging[:] = contents
        if copies.phase == CANCELLED:
            copies.phase = DRAINING
            return
        copies.phase, wave = STAGED, copies.prepare.wave
        # The first transfers of a wave are those of rank 0, and every rank's share is the same.
        if tuple(map(checksum, self.staging)) == copies.prepare.checksums[:SLOTS]:
            self.feed(msg.StagingFinished(wave), out)
        else:
            self.fail_copies(copies, Reason.CHECKSUM_MISMATCH, out)

    def fail_copies(self, copies: Copies, reason: Reason, out: Outputs) -> None:
        copies.phase = FAILED
        self.feed(msg.StagingFailed(copies.prepare.wave, reason), out)

    def cancel(self, wave: WaveKey) -> None:
        for copies in self.copies:
            if copies.prepare.wave == wave:
                copies.phase = CANCELLED if copies.phase == COPYING else DRAINING

    def drained(self, out: Outputs) -> None:
        copies = next(one for one in self.copies if one.phase == DRAINING)
        self.copies.remove(copies)
        self.feed(msg.TransportDrained(copies.prepare.wave), out)

    def abort_communicator(self, out: Outputs) -> None:
        """A batch has run into its deadline: nothing of it arrives any more (R10)."""
        self.broken = True
        self.gate.request_rebuild(self.serial)
        for copies in self.moving:
            if copies.phase == COPYING:
                self.fail_copies(copies, Reason.TRANSFER_TIMEOUT, out)
            else:
                copies.phase = DRAINING

    def rebuild(self, serial: int) -> None:
        """Replace the communicator. Copies on the old one fail; `lost` reports it."""
        self.serial, self.broken = serial, False
        for copies in self.moving:
            copies.phase = FAILED if copies.phase == COPYING else DRAINING

    def lost(self, out: Outputs) -> None:
        """Report that the copies of the held wave failed with their communicator."""
        copies = next(one for one in self.copies if one.phase == FAILED)
        self.fail_copies(copies, Reason.TRANSFER_FAILED, out)

    # --- step boundary ----------------------------------------------------------------------------

    def boundary(self, minima: tuple[int, ...] | None, out: Outputs) -> None:
        """Use the result of the last poll, None if it failed here, and begin the next.

        The agent holds its lock from the result to the end of a swap, so nothing comes between.
        """
        gate = self.gate
        self.earlier = self.vector
        if not gate.advance():
            self.vector, self.passed = None, True
            return
        if gate.resolve_due:
            failed = PollFailed("injected")
            result = failed if minima is None else PollResolved(np.array(minima, np.int64))
            for action in gate.handle(result, 0.0):
                if isinstance(action, msg.Swap):
                    self.swap(action, out)
                    self.finish_swap(out)
                else:
                    self.carry([action], out)
        self.passed, self.vector = True, None
        if gate.poll_due and not out.left:
            self.vector = tuple(gate.begin_poll(0.0).tolist())

    def swap(self, action: msg.Swap, out: Outputs) -> None:
        """Copy staging to the slots and install the new map."""
        prepare, placement = self.participant.prepare, self.participant.next_placement
        assert prepare is not None and placement is not None
        for layer in prepare.body.layers:
            self.bytes[layer * SLOTS : (layer + 1) * SLOTS] = self.staging  # type: ignore[assignment]
        self.copies = [one for one in self.copies if one.prepare.wave != action.wave]
        self.staging = [None] * SLOTS
        self.install(placement, action.epoch, out)
        out.swapped = action.wave

    def install(self, placement: Placement, epoch: Epoch, out: Outputs) -> None:
        if epoch < self.epoch:
            raise Violation(EPOCH_FALLS, f"a rank at epoch {self.epoch} goes to {epoch}")
        self.map, self.epoch = placement, epoch
        out.installed = epoch, placement.digest

    def finish_swap(self, out: Outputs) -> None:
        """Go on under the new map, and save it meanwhile."""
        part = self.participant
        wave, placement = part.wave, part.next_placement
        assert wave is not None and placement is not None
        self.barrier.begin(part.epoch, part.placement.digest)
        self.feed(msg.SwapFinished(wave, placement.digest), out)
        self.saving.append((part.epoch, placement))

    def save(self, out: Outputs) -> None:
        """The map of a swap is saved: tell the controller what had to wait for it."""
        epoch, placement = self.saving.pop(0)
        self.saved_epoch = max(self.saved_epoch, epoch)
        out.saved = epoch, placement.digest
        for answer in self.barrier.end():
            self.send(answer, out)

    def next_step(self) -> None:
        """All ranks have passed the boundary."""
        self.passed, self.earlier = False, None

    # --- the engine -------------------------------------------------------------------------------

    def load(self, version: int) -> None:
        self.version, self.reload = version, "loaded"
        self.bytes = list(bytes_of(self.map, version))

    def report_reload(self, out: Outputs) -> None:
        self.reload = ""
        sums = checksums_of(self.map.num_layers, self.version)
        self.feed(msg.WeightsReloaded(self.version, sums), out)

    def move_experts(self, out: Outputs) -> None:
        """The engine swaps the slots of the last layer by itself, and saves its map."""
        self.feed(msg.EngineRebalanced(flip(self.map, self.map.num_layers - 1)), out)
        part = self.participant
        self.install(part.placement, part.epoch, out)
        self.bytes = list(bytes_of(self.map, self.version))
        self.saved_epoch, out.saved = self.epoch, (self.epoch, self.map.digest)

    def take(self, event: tuple[Any, ...]) -> Outputs:
        """Take one event of the search: its name and its arguments."""
        out = Outputs()
        match event:
            case ("message", stream, message):
                self.feed(msg.FromController(stream, message), out)
            case ("boundary", minima):
                self.boundary(minima, out)
            case ("corrupt",):
                self.arrived(self.moving[0], (CORRUPT,) * SLOTS, out)
            case ("connect", stream):
                self.hello(stream, out)
            case ("leaderless",):
                self.participant._heard_at = AGES_AGO
            case ("ask reload",):
                self.reload = "asked"
                self.feed(msg.ReloadRequested(), out)
            case ("load", version):
                self.load(version)
            case ("next step",):
                self.next_step()
            case ("arrived", index, contents):
                self.arrived(self.moving[index], contents, out)
            case (name,):
                getattr(self, name)(out)
            case _:
                raise AssertionError(event)
        self.check()
        return out

    def check(self) -> None:
        """Check that every slot holds the bytes that the map names."""
        wanted = list(bytes_of(self.map, self.version))
        if self.bytes != wanted:
            raise Violation(WRONG_BYTES, f"the slots hold {self.bytes}, the map names {wanted}")
