"""The agent's transfer thread: it stages waves, drains them and rebuilds the communicator.

It runs one job at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
from torch import Tensor

from evenkeel_moe.adapters.threads import SYSTEM_THREADS
from evenkeel_moe.adapters.torch.transport import StageOutcome
from evenkeel_moe.agent.ports import ExpertWeights, MapInstaller, WeightTransport
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.ports.threads import Event, Queue, Threads
from evenkeel_moe.protocol.messages import (
    Prepare,
    StagingFailed,
    StagingFinished,
    TransportDrained,
)

_log = structlog.get_logger(__name__)

_Slots = tuple[tuple[int, int], ...]
"""(layer, local slot) pairs."""


@dataclass(frozen=True, eq=False, slots=True)
class ReadyWave:
    """A staged and verified wave: everything a swap needs; nothing that is left can fail."""

    wave: WaveKey
    staged: dict[tuple[int, int], tuple[Tensor, ...]]
    """(layer, local slot) -> tensors to copy there."""
    tables: Any
    """The result of `MapInstaller.build`."""
    emptied: _Slots
    """Slots of this rank that hold nothing afterwards."""
    digest: str
    """Digest of the placement after the swap."""
    received_bytes: int


class StagingEvents(Protocol):
    """Receives the results of the transfer thread, and is called on it."""

    def feed(self, event: StagingFinished | StagingFailed | TransportDrained) -> None:
        """Pass an event to the participant."""
        ...

    def request_rebuild(self, serial: int) -> None:
        """Ask the group to replace the communicator `serial`, which is broken."""
        ...

    def progress(self, wave: WaveKey, done: int, total: int) -> None:
        """Report the bytes staged so far."""
        ...


class StagingWorker:
    """Owns the transport. The engine's and the network's threads only queue jobs here.

    The constructor starts the thread; the transport must be connected.
    """

    def __init__(
        self,
        rank: int,
        transport: WeightTransport,
        weights: ExpertWeights,
        maps: MapInstaller,
        events: StagingEvents,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._weights = weights
        self._maps = maps
        self._events = events
        self._threads = threads
        # The queue stays short whatever a peer does: a wave has two jobs, and the next wave begins
        # only after the second.
        self._jobs: Queue[Callable[[], None] | None] = threads.queue()
        self._agreed = 0
        """Newest communicator that the group agreed to build."""
        self._cancels: dict[WaveKey, Event] = {}
        self._reserved: _Slots = ()
        self._ready: ReadyWave | None = None
        self._undrained: WaveKey | None = None
        self._ended = threads.event()
        self._thread = threads.start(self._run, "evenkeel-transfer")

    def close(self, timeout_s: float = 1.0) -> bool:
        """Abort what is in flight, end the thread, and release what a wave has reserved.

        Returns:
            False if the thread still waits for a deadline. It ends with the process, and until then
            may release slots.
        """
        for cancel in list(self._cancels.values()):
            cancel.set()
        self._jobs.put(None)
        self._thread.join(0.2)
        self._transport.abort()
        self._thread.join(timeout_s)
        if not self._ended.is_set():
            return False
        self._release_reserved()
        return True

    # --- jobs, queued from any thread -------------------------------------------------------------

    def stage(self, prepare: Prepare, old: Placement, new: Placement) -> None:
        """Stage a wave; the result is StagingFinished or StagingFailed."""
        cancel = self._threads.event()
        self._cancels[prepare.wave] = cancel
        self._jobs.put(lambda: self._stage(prepare, old, new, cancel))

    def cancel(self, wave: WaveKey) -> None:
        """Cancel a wave.

        The result is TransportDrained, once no operation of the wave is in flight and the transport
        works.
        """
        cancel = self._cancels.get(wave)
        if cancel is not None:
            cancel.set()
        self._jobs.put(lambda: self._drain(wave))

    def rebuild(self, serial: int) -> None:
        """Connect again. The whole group agreed, so no operation in flight can still succeed."""
        self._agreed = serial
        self._transport.abort()
        self._jobs.put(lambda: self._rebuild(serial))

    def later(self, job: Callable[[], None]) -> None:
        """Run something slow on this thread, after the jobs in the queue."""
        self._jobs.put(job)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the jobs queued so far have run; False if they take longer."""
        done = self._threads.event()
        self._jobs.put(done.set)
        return done.wait(timeout_s)

    # --- at the boundary, on the engine's thread --------------------------------------------------

    def swap(self, wave: WaveKey) -> ReadyWave:
        """Copy staging to the slots, install the tables and release emptied memory.

        Raises:
            RuntimeError: the wave is not staged here.
        """
        ready = self._ready
        if ready is None or ready.wave != wave:
            raise RuntimeError(f"{wave} is not staged here")
        for (layer, local_slot), tensors in ready.staged.items():
            for target, value in zip(
                self._weights.tensors(layer, local_slot), tensors, strict=True
            ):
                target.copy_(value, non_blocking=True)
        self._transport.fence()
        self._maps.install(ready.tables)
        self._weights.release(ready.emptied)
        self._ready, self._reserved = None, ()
        self._cancels.pop(wave, None)
        return ready

    # --- on the transfer thread -------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # without this thread no wave would ever end
                _log.exception("transfer_job_failed")
        self._ended.set()

    def _stage(self, prepare: Prepare, old: Placement, new: Placement, cancel: Event) -> None:
        wave = prepare.wave
        try:
            outcome = self._try_stage(prepare, old, new, cancel)
        except Exception as error:  # an error in the engine's callbacks makes this rank vote no
            _log.exception("staging_failed", wave=str(wave))
            outcome = StageOutcome(Reason.TRANSFER_FAILED, repr(error)[:200])
        if self._transport.broken:
            self._events.request_rebuild(self._transport.serial)
        if outcome.reason is None:
            self._events.feed(StagingFinished(wave))
        else:
            self._forget()
            self._events.feed(StagingFailed(wave, outcome.reason, outcome.detail))

    def _try_stage(
        self, prepare: Prepare, old: Placement, new: Placement, cancel: Event
    ) -> StageOutcome:
        filled, emptied = self._changes(prepare.body.layers, old, new)
        if not self._weights.reserve(filled):
            return StageOutcome(
                Reason.POOL_EXCEEDED, f"no memory for {len(filled)} slots the wave fills"
            )
        self._reserved = filled
        digest = new.digest
        tables = self._maps.build(prepare.body.layers, prepare.body.rows, prepare.base_epoch + 1)
        outcome = self._transport.stage(
            prepare, cancel, lambda done, total: self._events.progress(prepare.wave, done, total)
        )
        if outcome.ok:
            staged = dict(self._transport.staged)
            received = sum(tensor.nbytes for tensors in staged.values() for tensor in tensors)
            self._ready = ReadyWave(prepare.wave, staged, tables, emptied, digest, received)
        return outcome

    def _changes(
        self, layers: Sequence[int], old: Placement, new: Placement
    ) -> tuple[_Slots, _Slots]:
        """Return the slots of this rank that the wave fills, and those it empties."""
        chosen = list(layers)
        mine = slice(self._rank * old.slots_per_rank, (self._rank + 1) * old.slots_per_rank)
        before, after = (
            placement.phy2log[chosen, mine] == EMPTY  # (changed layers, slots_per_rank)
            for placement in (old, new)
        )
        filled, emptied = (
            tuple((chosen[row], int(slot)) for row, slot in np.argwhere(changed))
            for changed in (before & ~after, ~before & after)
        )
        return filled, emptied

    def _forget(self) -> None:
        self._release_reserved()
        self._transport.clear()

    def _release_reserved(self) -> None:
        self._ready = None
        reserved, self._reserved = self._reserved, ()
        self._weights.release(reserved)

    def _drain(self, wave: WaveKey) -> None:
        self._cancels.pop(wave, None)
        self._forget()
        if self._transport.broken:
            self._undrained = wave
            self._events.request_rebuild(self._transport.serial)
        else:
            self._events.feed(TransportDrained(wave))

    def _rebuild(self, serial: int) -> None:
        if serial < self._agreed:
            # The others gave this communicator up while this thread was busy. Waiting for them
            # would make this rank late for the newest one too.
            return
        if self._transport.serial >= serial and not self._transport.broken:
            return
        try:
            self._transport.rebuild(serial)
        except Exception as error:
            _log.warning(
                "transport_rebuild_failed",
                serial=serial,
                detail=str(error),
                exc_info=not isinstance(error, Unavailable),
            )
            # Without another request, no rank would ever be asked to connect again.
            self._events.request_rebuild(serial)
            return
        wave, self._undrained = self._undrained, None
        if wave is not None:
            self._events.feed(TransportDrained(wave))
