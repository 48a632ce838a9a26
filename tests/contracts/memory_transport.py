"""A WeightTransport in the memory of one process, for tests of the layers above it."""

import queue
import threading
import time

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.transport import StageOutcome
from evenkeel_moe.errors import Reason, Unavailable


class Fabric:
    """Connects the ranks: one mailbox for each (communicator, source, target, transfer)."""

    def __init__(self, size):
        self.size = size
        self._lock = threading.Lock()
        self._boxes = {}
        self.broken = set()
        self._barriers = {}

    def box(self, key):
        with self._lock:
            return self._boxes.setdefault(key, queue.SimpleQueue())

    def meet(self, serial, timeout_s):
        with self._lock:
            barrier = self._barriers.setdefault(serial, threading.Barrier(self.size))
        try:
            barrier.wait(timeout_s)
        except threading.BrokenBarrierError as error:
            raise Unavailable(f"communicator {serial}: not all ranks came") from error


class MemoryTransport:
    """One rank's end of a Fabric."""

    def __init__(self, fabric, rank, slots_per_rank, tensors_of, connect_timeout_s=20.0):
        self._fabric = fabric
        self._rank = rank
        self._per_rank = slots_per_rank
        self._tensors_of = tensors_of
        self._connect_timeout_s = connect_timeout_s
        self.serial = -1
        self.broken = True
        self.staged = {}

    def rebuild(self, serial):
        self.abort()
        self.serial = serial
        self._fabric.meet(serial, self._connect_timeout_s)
        self.broken = False

    def abort(self):
        self.broken = True
        self._fabric.broken.add(self.serial)

    def fence(self):
        """Nothing is pending in a process's memory."""

    def clear(self):
        self.staged = {}

    def stage(self, prepare, cancel, progress):
        self.clear()
        own = [t for t in prepare.body.transfers if t.dst_slot // self._per_rank == self._rank]
        total, done, position, wrong = sum(t.nbytes for t in own), 0, 0, StageOutcome()
        for index, batch in enumerate(prepare.body.batches):
            deadline = time.monotonic() + prepare.batch_deadline_s
            for offset, transfer in enumerate(batch):
                failure = self._copy(prepare, index, transfer, deadline)
                if failure is not None:
                    return failure
                if transfer in own:
                    done += transfer.nbytes
                    expected = prepare.checksums[position + offset]
                    local = transfer.dst_slot % self._per_rank
                    if wrong.ok and checksum(self.staged[transfer.layer, local]) != expected:
                        detail = f"layer {transfer.layer} expert {transfer.logical_expert}"
                        wrong = StageOutcome(Reason.CHECKSUM_MISMATCH, detail)
            position += len(batch)
            progress(done, total)
            if prepare.max_bytes_per_s:
                cancel.wait(sum(t.nbytes for t in batch) / prepare.max_bytes_per_s)
        return wrong

    def _copy(self, prepare, index, transfer, deadline):
        source, target = transfer.src_slot // self._per_rank, transfer.dst_slot // self._per_rank
        key = (self.serial, prepare.wave, index, transfer)
        if self.broken:
            return StageOutcome(Reason.TRANSFER_FAILED, "the communicator is down")
        if source == self._rank:
            tensors = self._tensors_of(transfer.layer, transfer.src_slot % self._per_rank)
            self._fabric.box(key).put(tuple(t.clone() for t in tensors))
        if target == self._rank:
            while True:
                try:
                    got = self._fabric.box(key).get(timeout=0.02)
                    break
                except queue.Empty:
                    late, broken = time.monotonic() > deadline, self.serial in self._fabric.broken
                    if broken and not self._fabric.box(key).empty():
                        continue  # Sent before the peer hung up.
                    if late or broken:
                        self.abort()
                        return StageOutcome(
                            Reason.TRANSFER_TIMEOUT if late else Reason.TRANSFER_FAILED, "late"
                        )
            self.staged[transfer.layer, transfer.dst_slot % self._per_rank] = got
        return None
