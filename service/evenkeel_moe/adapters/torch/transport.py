"""Copies experts between ranks into staging memory, on a communicator of its own.

Every rank runs the same global list of batches in the same order. In a batch it has at most one
peer (R10). Received experts stay in staging, which no router reaches (R11). The receiver compares
their checksums with those registered when the model was loaded (R4).
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import structlog
import torch
from torch import Tensor

from evenkeel_moe.adapters.threads import SYSTEM_THREADS
from evenkeel_moe.adapters.torch.checksum import checksum, flat_bytes
from evenkeel_moe.adapters.torch.connecting import Connector
from evenkeel_moe.adapters.torch.groups import Communicator, Operation, Work
from evenkeel_moe.adapters.torch.staging_memory import StagingMemory
from evenkeel_moe.adapters.torch.streams import OwnStream, mark_queued, wait_for_device
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.plan import Transfer, hash_of
from evenkeel_moe.ports.threads import Event, Threads
from evenkeel_moe.protocol.messages import Prepare

_log = structlog.get_logger(__name__)
_MAX_OPS = 32
"""Point-to-point operations of one chunk."""
_AHEAD_OPS = 128
"""On the host another batch is posted while fewer operations are in flight, so that no rank waits
for Python between two batches. On a GPU one batch runs at a time: a stream runs them in order."""
_CHUNKS_PER_BATCH = 4096
"""Tags reserved for the chunks of one batch."""
_WAIT_GRAIN_S = 0.001
"""Waits count whole milliseconds: one can end this much before its deadline."""
_MAX_BATCH_S = 600.0
"""Longest deadline of a batch, and longest pause for its rate, whatever the controller asks for.
Until then no cancellation ends a batch whose peer does not come."""
_ABORT_WAIT = timedelta(seconds=5)

Progress = Callable[[int, int], None]
"""Called with (bytes staged so far, bytes to stage on this rank)."""


@dataclass(slots=True)
class _Flight:
    """A batch whose first chunk was posted."""

    index: int
    batch: Sequence[Transfer]
    chunks: Iterator[list[Operation]]
    """The chunks not posted yet."""
    tag: int
    """Tag of the next chunk."""
    works: list[Work] = field(default_factory=list)
    """Operations in flight. Gloo would wait for one that has ended until the timeout."""


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """The result of staging a wave on this rank."""

    reason: Reason | None = None
    """The cause of the failure; None when everything arrived and matches."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True if every transfer to this rank is staged and verified."""
        return self.reason is None


class TorchWeightTransport:
    """The transfer communicator of one rank and its staging memory.

    One thread uses it. Other threads may only call `abort` and `fence` and set `cancel`.

    Args:
        rank: this rank.
        slots_per_rank: slots of one rank; rank = slot // slots_per_rank.
        staging_bytes: room for received experts, allocated once.
        tensors_of: (layer, local slot) -> all tensors of the expert there, also for slots that a
            wave fills.
        sample: tensors of one expert; others have as many, and are not smaller.
        connect: serial -> a new communicator over all ranks; collective.
        device: device of the weights and of staging.
        threads: their clock times the copies, and one of them connects.
    """

    def __init__(
        self,
        *,
        rank: int,
        slots_per_rank: int,
        staging_bytes: int,
        tensors_of: Callable[[int, int], Sequence[Tensor]],
        sample: Sequence[Tensor],
        connect: Callable[[int], Communicator],
        device: torch.device,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self._rank = rank
        self._slots_per_rank = slots_per_rank
        self._tensors_of = tensors_of
        self._device = device
        self._memory = StagingMemory(staging_bytes, sample, device)
        self._now = threads.monotonic
        self._lock = threads.lock()
        self._communicator: Communicator | None = None
        self._stream = OwnStream(device)
        self._connector = Connector(connect, device, self._stream, threads)
        self._aborts = 0
        self._fence: Any = None
        self.fence()
        self.serial = -1
        """The number of the communicator in use, or of the one that broke."""

    @property
    def broken(self) -> bool:
        """True if the communicator was aborted; nothing can be staged until `rebuild`."""
        return self._communicator is None

    @property
    def staged(self) -> dict[tuple[int, int], tuple[Tensor, ...]]:
        """(layer, local slot) -> tensors that the wave staged for this rank's slots."""
        return self._memory.staged

    def rebuild(self, serial: int) -> None:
        """Connect all ranks again and warm up every connection; collective.

        Raises:
            Unavailable: not all ranks connected in time, one left, or `abort` was called; `broken`
                stays true.
        """
        self.abort()
        self.serial = serial
        aborts = self._aborts
        fresh = self._connector.connect(serial)
        with self._lock:
            if self._aborts == aborts:
                self._communicator = fresh
                return
        fresh.abort()
        raise Unavailable(
            f"transfer communicator {serial} was aborted at once", Reason.TRANSFER_FAILED
        )

    def abort(self) -> None:
        """Abort the communicator, also while it is being connected; from any thread.

        Operations in flight end with an error, at their deadline at the latest.
        """
        with self._lock:
            self._aborts += 1
            communicator, self._communicator = self._communicator, None
        self._connector.abort()
        if communicator is not None:
            communicator.abort()

    def fence(self) -> None:
        """Order the next wave's copies after the work the engine's thread has queued so far.

        Called on the engine's thread. The copies read the slots that a swap wrote, and overwrite
        the staging memory that it read. On the host no work is pending.
        """
        self._fence = mark_queued(self._device)

    def clear(self) -> None:
        """Drop the staged tensors; the memory serves the next wave."""
        self._memory.clear()

    def stage(self, prepare: Prepare, cancel: Event, progress: Progress) -> StageOutcome:
        """Run all batches of the wave; on return none of its operations is in flight here.

        A wrong checksum or a cancellation does not stop the batches, because the peers wait for
        their halves. A cancellation only lifts the limit on the rate. The communicator is aborted
        when a batch passes its deadline, a peer leaves, or the engine fails to return tensors.
        """
        flights: deque[_Flight] = deque()
        # On a GPU, copy on another stream than the engine's, after its work before `fence`.
        with self._stream.after(self._fence):
            try:
                return self._stage(prepare, cancel, progress, flights)
            except Exception as error:
                # The engine or its device failed. The batches in flight must end all the same.
                _log.exception("staging_broke_off", wave=str(prepare.wave))
                return self._give_up(flights, Reason.TRANSFER_FAILED, f"{error!r:.200}")

    def _stage(
        self, prepare: Prepare, cancel: Event, progress: Progress, flights: deque[_Flight]
    ) -> StageOutcome:
        self.clear()
        total = sum(
            t.nbytes for t in prepare.body.transfers if self._rank_of(t.dst_slot) == self._rank
        )
        outcome, done, pace_s = StageOutcome(), 0, 0.0
        batches, first_tag = enumerate(prepare.body.batches), _first_tag(prepare)
        expected = iter(prepare.checksums)
        ahead = _AHEAD_OPS if self._device.type == "cpu" and prepare.max_bytes_per_s <= 0 else 0
        while True:
            began = self._now()
            try:
                while not flights or sum(len(flight.works) for flight in flights) < ahead:
                    upcoming = next(batches, None)
                    if upcoming is None:
                        break
                    flights.append(self._begin(first_tag, *upcoming))
            except RuntimeError as error:
                return self._give_up(
                    flights, Reason.TRANSFER_FAILED, f"a batch could not begin: {error}"
                )
            if not flights:
                return outcome
            limit_s = min(prepare.batch_deadline_s, _MAX_BATCH_S) + pace_s
            failure = self._end(flights, self._now() + limit_s)
            if failure is not None:
                return failure
            batch = flights.popleft().batch
            for transfer, checksum_ in zip(
                batch, itertools.islice(expected, len(batch)), strict=True
            ):
                if self._rank_of(transfer.dst_slot) != self._rank:
                    continue
                done += transfer.nbytes
                if outcome.ok:
                    outcome = self._verify(transfer, checksum_)
            progress(done, total)
            pace_s = self._pace_s(batch, prepare.max_bytes_per_s)
            cancel.wait(max(0.0, pace_s - (self._now() - began)))

    # --- one batch ------------------------------------------------------------------------------

    def _begin(self, first_tag: int, index: int, batch: Sequence[Transfer]) -> _Flight:
        """Post the first chunk of a batch."""
        tag = first_tag + index * _CHUNKS_PER_BATCH
        flight = _Flight(index, batch, self._chunks(batch), tag)
        self._post(flight)
        return flight

    def _post(self, flight: _Flight) -> None:
        """Post the next chunk of a batch, if one is left."""
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("the communicator is down")
        operations = next(flight.chunks, None)
        if operations is not None:
            flight.works = communicator.start_exchange(operations, flight.tag % 2**31)
            flight.tag += 1

    def _end(self, flights: Sequence[_Flight], deadline: float) -> StageOutcome | None:
        """Finish the oldest batch in flight; return None, or the failure that ends staging."""
        flight = flights[0]
        try:
            while flight.works:
                left = deadline - self._now()
                if left <= 0:
                    detail = f"batch {flight.index}: past its deadline"
                    return self._give_up(flights, Reason.TRANSFER_TIMEOUT, detail)
                flight.works[0].wait(timedelta(seconds=left))
                del flight.works[0]
                if not flight.works:
                    self._post(flight)
            if not wait_for_device(self._device, deadline):
                detail = f"batch {flight.index}: past its deadline on the device"
                return self._give_up(flights, Reason.TRANSFER_TIMEOUT, detail)
        except RuntimeError as error:
            late = self._now() >= deadline - _WAIT_GRAIN_S
            reason = Reason.TRANSFER_TIMEOUT if late else Reason.TRANSFER_FAILED
            return self._give_up(flights, reason, f"batch {flight.index}: {str(error)[:200]}")
        return None

    def _give_up(self, flights: Sequence[_Flight], reason: Reason, detail: str) -> StageOutcome:
        """Abort the communicator and wait for all operations: no byte reaches staging later."""
        self.abort()
        for work in itertools.chain.from_iterable(flight.works for flight in flights):
            with suppress(RuntimeError):
                work.wait(_ABORT_WAIT)
        return StageOutcome(reason, detail)

    def _chunks(self, batch: Sequence[Transfer]) -> Iterator[list[Operation]]:
        """Yield the operations of this rank in chunks, and copy between its own slots meanwhile.

        Both ranks of a pair divide the same list at the same places.
        """
        pending: list[Operation] = []
        for transfer in batch:
            source, target = self._rank_of(transfer.src_slot), self._rank_of(transfer.dst_slot)
            here: Sequence[Tensor] = ()
            if source == self._rank:
                here = self._tensors_of(transfer.layer, self._local(transfer.src_slot))
            there: Sequence[Tensor] = ()
            if target == self._rank:
                slot = self._local(transfer.dst_slot)
                like = self._tensors_of(transfer.layer, slot)
                there = self._memory.allocate(transfer.layer, slot, like)
            if source == target:
                for tensor, value in zip(there, here, strict=True):
                    tensor.copy_(value)
                continue
            pending += [Operation(flat_bytes(tensor), target, sends=True) for tensor in here]
            pending += [Operation(flat_bytes(tensor), source, sends=False) for tensor in there]
            while len(pending) >= _MAX_OPS:
                yield pending[:_MAX_OPS]
                pending = pending[_MAX_OPS:]
        if pending:
            yield pending

    def _verify(self, transfer: Transfer, expected: int) -> StageOutcome:
        found = checksum(self._memory.staged[transfer.layer, self._local(transfer.dst_slot)])
        if found == expected:
            return StageOutcome()
        return StageOutcome(
            Reason.CHECKSUM_MISMATCH,
            f"layer {transfer.layer} expert {transfer.logical_expert} from slot"
            f" {transfer.src_slot} to slot {transfer.dst_slot}: got {found:016x}, registered"
            f" {expected:016x}",
        )

    # --- small parts ----------------------------------------------------------------------------

    def _pace_s(self, batch: Sequence[Transfer], max_bytes_per_s: float) -> float:
        """Return the seconds a batch should take; its busiest rank sets the pace of all."""
        if max_bytes_per_s <= 0:
            return 0.0
        share: dict[int, int] = {}
        for transfer in batch:
            for rank in {self._rank_of(transfer.src_slot), self._rank_of(transfer.dst_slot)}:
                share[rank] = share.get(rank, 0) + transfer.nbytes
        return min(_MAX_BATCH_S, max(share.values(), default=0) / max_bytes_per_s)

    def _rank_of(self, slot: int) -> int:
        return slot // self._slots_per_rank

    def _local(self, slot: int) -> int:
        return slot % self._slots_per_rank


def _first_tag(prepare: Prepare) -> int:
    """Return a number that ranks share if they were sent the same wave with the same transfers.

    Gloo ends the process of a rank that gets more bytes than it made room for. So operations of
    ranks that were sent different transfers under one key must not match: they run into their
    deadline.
    """
    return hash_of(f"{prepare.wave.fingerprint} {prepare.body.batches}")
