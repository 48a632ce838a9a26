"""Copies between ranks: batches in order, posted operations, late bytes, deadlines (R10, R11)."""

from evenkeel_moe.errors import Reason
from evenkeel_moe.protocol.messages import (
    SendToController,
    StagingFailed,
    StagingFinished,
    StagingProgress,
    TransportDrained,
)
from tests.sim.checks import UNMATCHED_OPERATION


def checksum(value) -> int:
    """Return a number that stands for the checksum of an expert's bytes."""
    if value is None or value[0] == "corrupt":
        return 0
    version, layer, expert = value
    return 1 + version * 1_000_003 + layer * 1009 + expert


class Job:
    """The copies of one wave on one rank."""

    def __init__(self, site, prepare) -> None:
        self.site = site
        self.world = site.world
        self.prepare = prepare
        self.wave = prepare.wave
        self.me = site.rank.rank
        self.index = 0
        self.staged: dict = {}
        """(layer, local slot) -> buffer, for slots of this rank."""
        self.expected: dict = {}
        self.landing = 0
        """Copies in flight into this rank's staging."""
        self.posted: tuple | None = None
        """(peer, key, serial) of the operation this rank waits in."""
        self.matched = False
        self.cancelled = False
        self.failed = False
        self.finished = False
        self.told_drained = False
        self.reserve()

    # --- staging ----------------------------------------------------------------------------------

    def reserve(self) -> None:
        """The participant was told that nothing is in flight: all staging is free."""
        per_rank = self.site.shape.slots_per_rank
        for transfer, expected in zip(
            self.prepare.body.transfers, self.prepare.checksums, strict=True
        ):
            rank, local = divmod(transfer.dst_slot, per_rank)
            if rank != self.me:
                continue
            taken = set(self.staged.values())
            buffer = self.site.buffer_for(transfer.layer, local, taken, self.prepare.body)
            if buffer is None:
                self.fail(Reason.STAGING_TOO_SMALL)
                return
            self.staged[transfer.layer, local] = buffer
            self.expected[transfer.layer, local] = expected

    def mine(self, batch):
        per_rank = self.site.shape.slots_per_rank
        return [t for t in batch if self.me in (t.src_slot // per_rank, t.dst_slot // per_rank)]

    # --- batches ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run the batches until one has to wait for a peer."""
        if self.failed or self.finished:
            return
        rank, body = self.site.rank, self.prepare.body
        if rank.comm_broken:
            self.fail(Reason.TRANSPORT_NOT_DRAINED)
            return
        per_rank = self.site.shape.slots_per_rank
        while self.index < len(body.batches):
            if self.cancelled:
                self.check_drained()
                return
            peer = None
            for t in self.mine(body.batches[self.index]):
                src, dst = t.src_slot // per_rank, t.dst_slot // per_rank
                if src == dst:
                    self.land(t, self.site.read(t.layer, t.src_slot % per_rank))
                else:
                    peer = dst if src == self.me else src
            if peer is not None:
                self.post(peer)
                return
            self.index += 1
        if self.cancelled:
            self.check_drained()
            return
        self.world.after(0.002 + 0.02 * self.world.rng.random(), self.verify)

    def post(self, peer: int) -> None:
        """Post this batch's operation with its peer; it runs when both have posted the same."""
        rank = self.site.rank
        key = (self.wave, self.index)
        self.posted = (peer, key, rank.comm_serial)
        self.matched = False
        self.world.after(self.prepare.batch_deadline_s, self.deadline, self.posted)
        other = self.other(peer)
        if other is None:
            return
        if other.posted[1] != key:
            mine = f"{key[0].plan_id}/{key[1]}"
            detail = f"ranks {self.me} and {peer} meet in {mine} and {other.posted[1]}"
            self.world.checks.fail(UNMATCHED_OPERATION, detail)
        self.exchange(other)

    def other(self, peer: int):
        """Return the peer's job if it waits in an operation with this rank on this communicator."""
        ranks = self.site.rank.fleet.ranks
        if peer >= len(ranks) or not ranks[peer].alive:
            return None
        job = ranks[peer].sites[self.site.deployment].job
        if job is None or job.posted is None or job.matched:
            return None
        waits_for, _, serial = job.posted
        return job if waits_for == self.me and serial == self.site.rank.comm_serial else None

    def exchange(self, other: "Job") -> None:
        self.matched = other.matched = True
        per_rank = self.site.shape.slots_per_rank
        slowest = 0.0
        for t in self.mine(self.prepare.body.batches[self.index]):
            src, dst = t.src_slot // per_rank, t.dst_slot // per_rank
            if {src, dst} != {self.me, other.me}:
                continue
            giver, taker = (self, other) if src == self.me else (other, self)
            value = giver.site.read(t.layer, t.src_slot % per_rank)
            delay = self.world.copy_delay(self.prepare.batch_deadline_s)
            if self.world.corrupts():
                value = ("corrupt",)
            slowest = max(slowest, delay)
            taker.landing += 1
            self.world.after(delay, taker.landed, t, value)
        for job in (self, other):
            self.world.after(slowest + 0.001, job.completed, job.posted)

    def land(self, transfer, value) -> None:
        local = transfer.dst_slot % self.site.shape.slots_per_rank
        self.site.buffers[self.staged[transfer.layer, local]] = value
        self.site.rank.fleet.dirty = True

    def landed(self, transfer, value) -> None:
        """Bytes arrive, also after the wave was given up."""
        self.landing -= 1
        if self.site.rank.alive:
            self.land(transfer, value)
            self.check_drained()

    def completed(self, operation) -> None:
        if self.posted == operation and self.site.rank.alive:
            self.posted = None
            self.index += 1
            total = len(self.prepare.body.batches)
            self.site.carry(
                [
                    SendToController(
                        StagingProgress(self.wave, self.index, total), self.site.streaming
                    )
                ]
            )
            self.advance()

    def deadline(self, operation) -> None:
        if self.posted == operation and self.site.rank.alive and not self.finished:
            self.site.rank.abort_communicator()

    def verify(self) -> None:
        """Compare the checksums of the arrived bytes with the registered ones (R4)."""
        if self.failed or self.cancelled or not self.site.rank.alive:
            return
        self.finished = True
        for key, buffer in self.staged.items():
            if checksum(self.site.buffers[buffer]) != self.expected[key]:
                self.failed = True
                self.site.feed_soon(
                    StagingFailed(self.wave, Reason.CHECKSUM_MISMATCH, f"slot {key}")
                )
                return
        self.site.feed_soon(StagingFinished(self.wave))

    # --- ends -------------------------------------------------------------------------------------

    def fail(self, reason) -> None:
        """The communicator is gone or there is no space: begin no further copy of this wave."""
        if self.finished or self.failed:
            self.posted = None
            self.check_drained()
            return
        self.failed = True
        self.posted = None
        if not self.cancelled:
            self.site.feed_soon(StagingFailed(self.wave, Reason(reason)))
        self.check_drained()

    def cancel(self) -> None:
        self.cancelled = True
        self.check_drained()

    def check_drained(self) -> None:
        """Return True if nothing of the wave is in flight and the communicator works."""
        site = self.site
        if not self.cancelled or self.told_drained or site.job is not self:
            return
        if self.posted is not None or self.landing or site.rank.comm_broken:
            return
        self.told_drained = True
        site.job = None
        site.feed_soon(TransportDrained(self.wave))
