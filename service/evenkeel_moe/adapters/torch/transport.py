"""Copies experts between ranks into staging memory, on a communicator of its own.

Every rank runs the same global list of batches in the same order; in a batch it has at most one peer
(R10). What arrives stays in staging, which no router reaches (R11), and is hashed here, by the
receiver, against the checksum registered when the model was loaded (R4).
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import structlog
import torch
import xxhash
from torch import Tensor

from evenkeel_moe.adapters.torch.checksum import device_checksum
from evenkeel_moe.adapters.torch.groups import Communicator, Operation, Work
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.plan import Transfer
from evenkeel_moe.protocol.messages import Prepare

__all__ = ["DeviceEvent", "Progress", "StageOutcome", "TorchWeightTransport", "checksum", "is_over"]

_log = structlog.get_logger(__name__)
_MAX_OPS = 32
"""Point-to-point operations of one chunk."""
_AHEAD_OPS = 128
"""On the host a further batch is posted while fewer are in flight, so that no rank waits for Python between two batches;
on a GPU one batch at a time, for there a stream runs them in turn."""
_ALIGN = 256
"""Staged tensors begin at multiples of this many bytes, as allocators give them."""
_CHUNKS_PER_BATCH = 4096
"""Room in the tag for the chunks of one batch."""
_ABORT_WAIT = timedelta(seconds=5)
_LOOK_S = 0.0002
"""Between two looks at a device's mark."""

Progress = Callable[[int, int], None]
"""(bytes staged so far, bytes to stage on this rank)."""


def checksum(tensors: Sequence[Tensor]) -> int:
    """64 bits over the bytes of all tensors of an expert, in order: xxh3 on the host, our own on a GPU.

    The ranks of a group compare their numbers, so their weights must all lie on GPUs or all on hosts.
    """
    if tensors and tensors[0].device.type == "cuda":
        return device_checksum(tensors)
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(_bytes_of(tensor).cpu().numpy().data)
    return int(digest.intdigest())


@dataclass(slots=True)
class _Flight:
    """A batch whose first chunk was posted."""

    index: int
    batch: Sequence[Transfer]
    chunks: Iterator[list[Operation]]
    """Those not posted yet."""
    tag: int
    """Of the next chunk."""
    works: list[Work] = field(default_factory=list)
    """Of the chunk posted last; empty when this rank has no part in the batch, or it is done."""


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """How staging a wave ended on this rank."""

    reason: Reason | None = None
    """Why it failed; None when everything arrived and matches."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether every transfer to this rank is staged and verified."""
        return self.reason is None


class DeviceEvent(Protocol):
    """A mark in a device's stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether everything before it is done; RuntimeError when some of it failed."""
        ...


def is_over(event: DeviceEvent, deadline: float) -> bool:
    """Wait for a mark without giving the thread to the driver for ever; False at the deadline [monotonic s]."""
    while not event.query():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class TorchWeightTransport:
    """The transfer communicator of one rank and its staging memory. One thread uses it, `cancel` apart.

    Args:
        rank: this rank.
        slots_per_rank: slot -> rank.
        staging_bytes: room for received experts, allocated once.
        tensors_of: (layer, local slot) -> every tensor of the expert there; destination slots included.
        tensors_per_expert: how many that are.
        min_expert_bytes: bytes of the smallest expert.
        connect: serial -> a communicator over all ranks, made anew; collective.
        device: where staging lies.
    """

    def __init__(
        self,
        *,
        rank: int,
        slots_per_rank: int,
        staging_bytes: int,
        tensors_of: Callable[[int, int], Sequence[Tensor]],
        tensors_per_expert: int,
        min_expert_bytes: int,
        connect: Callable[[int], Communicator],
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._slots_per_rank = slots_per_rank
        self._tensors_of = tensors_of
        self._connect = connect
        self._device = device
        experts = -(-staging_bytes // max(1, min_expert_bytes))
        padding = experts * tensors_per_expert * _ALIGN
        self._arena = torch.zeros(staging_bytes + padding, dtype=torch.uint8, device=device)
        self._used = 0
        self._staged: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._fence: Any = None
        self.fence()
        self.serial = -1
        """Number of the communicator in use, or of the one that broke."""

    @property
    def broken(self) -> bool:
        """The communicator was aborted; nothing can be staged until `rebuild`."""
        return self._communicator is None

    @property
    def staged(self) -> dict[tuple[int, int], tuple[Tensor, ...]]:
        """(layer, local slot) -> staged tensors of the wave, in this rank's slots."""
        return self._staged

    def rebuild(self, serial: int) -> None:
        """Connect all ranks anew and warm every connection; collective.

        Raises:
            Unavailable: not all ranks came in time, or one went away; `broken` stays true.
        """
        self.abort()
        self.serial = serial
        fresh = self._connect(serial)
        try:
            fresh.all_gather(torch.zeros(1, device=self._device))
            self._warm(fresh)
        except RuntimeError as error:
            fresh.abort()
            raise Unavailable(
                f"transfer communicator {serial}: {error}", Reason.TRANSFER_FAILED
            ) from error
        with self._lock:
            self._communicator = fresh

    def abort(self) -> None:
        """Break the communicator, from any thread: operations in flight end with an error, at their deadline at the latest."""
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def fence(self) -> None:
        """Engine's thread: the next wave's copies come after all this thread gave its device so far.

        They read the slots a swap wrote, and overwrite the memory it read. On the host nothing is pending.
        """
        if self._device.type == "cuda":
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._fence = event

    def clear(self) -> None:
        """Forget what is staged; the memory serves the next wave."""
        self._staged = {}
        self._used = 0

    def stage(self, prepare: Prepare, cancel: threading.Event, progress: Progress) -> StageOutcome:
        """Run every batch of the wave; on return no operation of it is in flight here.

        A wrong checksum or a cancellation does not stop the batches, for the peers wait for their
        halves; a cancelled wave only runs without throttle. A batch past its deadline, a peer that
        went away, or tensors that the engine does not give abort the communicator.
        """
        flights: deque[_Flight] = deque()
        with self._own_stream():
            try:
                return self._stage(prepare, cancel, progress, flights)
            except Exception as error:  # the engine's tensors, or its device: the batches in flight must end all the same
                _log.exception("staging_broke_off", wave=str(prepare.wave))
                return self._give_up(flights, Reason.TRANSFER_FAILED, f"{error!r:.200}")

    def _stage(
        self, prepare: Prepare, cancel: threading.Event, progress: Progress, flights: deque[_Flight]
    ) -> StageOutcome:
        self.clear()
        total = sum(
            t.nbytes for t in prepare.body.transfers if self._rank_of(t.dst_slot) == self._rank
        )
        wrong, done, pace_s = StageOutcome(), 0, 0.0
        batches = enumerate(prepare.body.batches)
        expected = iter(prepare.checksums)
        ahead = _AHEAD_OPS if self._device.type == "cpu" and prepare.max_bytes_per_s <= 0 else 0
        while True:
            began = time.monotonic()
            try:
                while not flights or sum(len(flight.works) for flight in flights) < ahead:
                    upcoming = next(batches, None)
                    if upcoming is None:
                        break
                    flights.append(self._begin(prepare, *upcoming))
            except RuntimeError as error:
                return self._give_up(
                    flights, Reason.TRANSFER_FAILED, f"a batch could not begin: {error}"
                )
            if not flights:
                return wrong
            failure = self._end(flights, time.monotonic() + prepare.batch_deadline_s + pace_s)
            if failure is not None:
                return failure
            batch = flights.popleft().batch
            for transfer, checksum_ in zip(
                batch, itertools.islice(expected, len(batch)), strict=True
            ):
                if self._rank_of(transfer.dst_slot) != self._rank:
                    continue
                done += transfer.nbytes
                if wrong.ok:
                    wrong = self._verify(transfer, checksum_)
            progress(done, total)
            pace_s = self._pace_s(batch, prepare.max_bytes_per_s)
            cancel.wait(max(0.0, pace_s - (time.monotonic() - began)))

    # --- one batch ------------------------------------------------------------------------------

    def _begin(self, prepare: Prepare, index: int, batch: Sequence[Transfer]) -> _Flight:
        """Post a batch's first chunk."""
        flight = _Flight(
            index, batch, self._chunks(batch), prepare.wave.fingerprint + index * _CHUNKS_PER_BATCH
        )
        self._post(flight)
        return flight

    def _post(self, flight: _Flight) -> bool:
        """Post a batch's next chunk; False when all were."""
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("the communicator is down")
        operations = next(flight.chunks, None)
        flight.works = []
        if operations is None:
            return False
        flight.works = communicator.start_exchange(operations, flight.tag % 2**31)
        flight.tag += 1
        return True

    def _end(self, flights: Sequence[_Flight], deadline: float) -> StageOutcome | None:
        """See the oldest of the batches in flight through; None when it is done."""
        flight = flights[0]
        try:
            posted = bool(flight.works)
            while posted:
                for work in flight.works:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        detail = f"batch {flight.index}: past its deadline"
                        return self._give_up(flights, Reason.TRANSFER_TIMEOUT, detail)
                    work.wait(timedelta(seconds=left))
                posted = self._post(flight)
            if not self._is_copied(deadline):
                detail = f"batch {flight.index}: past its deadline on the device"
                return self._give_up(flights, Reason.TRANSFER_TIMEOUT, detail)
        except RuntimeError as error:
            late = time.monotonic() >= deadline
            reason = Reason.TRANSFER_TIMEOUT if late else Reason.TRANSFER_FAILED
            return self._give_up(flights, reason, f"batch {flight.index}: {str(error)[:200]}")
        return None

    def _give_up(self, flights: Sequence[_Flight], reason: Reason, detail: str) -> StageOutcome:
        """Abort the communicator and see every operation end, so that no late byte lands in staging."""
        self.abort()
        for work in itertools.chain.from_iterable(flight.works for flight in flights):
            with suppress(RuntimeError):
                work.wait(_ABORT_WAIT)
        return StageOutcome(reason, detail)

    def _chunks(self, batch: Sequence[Transfer]) -> Iterator[list[Operation]]:
        """Both ranks of a pair cut the same list at the same places; copies inside the rank are done on the way."""
        pending: list[Operation] = []
        for transfer in batch:
            source, target = self._rank_of(transfer.src_slot), self._rank_of(transfer.dst_slot)
            if self._rank not in (source, target):
                continue
            here = (
                []
                if source != self._rank
                else self._slot_tensors(transfer.layer, transfer.src_slot)
            )
            there = [] if target != self._rank else self._make_room(transfer)
            if source == target:
                for tensor, value in zip(there, here, strict=True):
                    tensor.copy_(value)
                continue
            pending += [Operation(_bytes_of(tensor), target, sends=True) for tensor in here]
            pending += [Operation(_bytes_of(tensor), source, sends=False) for tensor in there]
            while len(pending) >= _MAX_OPS:
                yield pending[:_MAX_OPS]
                pending = pending[_MAX_OPS:]
        if pending:
            yield pending

    def _make_room(self, transfer: Transfer) -> tuple[Tensor, ...]:
        local_slot = transfer.dst_slot % self._slots_per_rank
        room = []
        for like in self._tensors_of(transfer.layer, local_slot):
            nbytes = like.numel() * like.element_size()
            piece = self._arena[self._used : self._used + nbytes]
            self._used += -(-nbytes // _ALIGN) * _ALIGN
            room.append(piece.view(like.dtype).view(like.shape))
        self._staged[transfer.layer, local_slot] = tuple(room)
        return tuple(room)

    def _slot_tensors(self, layer: int, slot: int) -> Sequence[Tensor]:
        return self._tensors_of(layer, slot % self._slots_per_rank)

    def _verify(self, transfer: Transfer, expected: int) -> StageOutcome:
        found = checksum(self._staged[transfer.layer, transfer.dst_slot % self._slots_per_rank])
        if found == expected:
            return StageOutcome()
        return StageOutcome(
            Reason.CHECKSUM_MISMATCH,
            f"layer {transfer.layer} expert {transfer.logical_expert} from slot {transfer.src_slot} to slot"
            f" {transfer.dst_slot}: got {found:016x}, registered {expected:016x}",
        )

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a GPU: copy beside the engine's stream, after what it was given before `fence`."""
        if self._device.type != "cuda":
            yield
            return
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._fence)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def _is_copied(self, deadline: float) -> bool:
        """On a GPU the batch is done only when its stream is; False past the deadline, for no wait of NCCL's ends by itself."""
        if self._device.type != "cuda":
            return True
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return is_over(event, deadline)

    # --- small parts ----------------------------------------------------------------------------

    def _pace_s(self, batch: Sequence[Transfer], max_bytes_per_s: float) -> float:
        """Seconds the batch should take: by its busiest rank, so that all ranks pause alike."""
        if max_bytes_per_s <= 0:
            return 0.0
        share: dict[int, int] = {}
        for transfer in batch:
            for rank in {self._rank_of(transfer.src_slot), self._rank_of(transfer.dst_slot)}:
                share[rank] = share.get(rank, 0) + transfer.nbytes
        return max(share.values(), default=0) / max_bytes_per_s

    def _warm(self, communicator: Communicator) -> None:
        """One small message between every two ranks, so that no connection is made under a deadline."""
        for distance in range(1, communicator.size):
            target = (self._rank + distance) % communicator.size
            source = (self._rank - distance) % communicator.size
            out = torch.zeros(1, dtype=torch.uint8, device=self._device)
            pair = [
                Operation(torch.empty_like(out), source, sends=False),
                Operation(out, target, sends=True),
            ]
            for work in communicator.start_exchange(pair, distance):
                work.wait()

    def _rank_of(self, slot: int) -> int:
        return slot // self._slots_per_rank


def _bytes_of(tensor: Tensor) -> Tensor:
    """A flat byte view: backends differ in the number types they carry, not in bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)
