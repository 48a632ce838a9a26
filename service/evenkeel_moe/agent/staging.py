"""The agent's transfer thread: stages waves, drains them, rebuilds the communicator. One job at a time."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
from torch import Tensor

from evenkeel_moe.adapters.torch.transport import StageOutcome
from evenkeel_moe.agent.ports import ExpertWeights, MapInstaller, WeightTransport
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import (
    Prepare,
    StagingFailed,
    StagingFinished,
    TransportDrained,
)

__all__ = ["ReadyWave", "StagingEvents", "StagingWorker"]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class ReadyWave:
    """A staged and verified wave: everything a swap needs, nothing left that can fail."""

    wave: WaveKey
    staged: dict[tuple[int, int], tuple[Tensor, ...]]
    """(layer, local slot) -> tensors that go there."""
    tables: Any
    """What `MapInstaller.build` made."""
    filled: tuple[tuple[int, int], ...]
    """Slots of this rank that were empty before; their memory is reserved."""
    emptied: tuple[tuple[int, int], ...]
    """Slots of this rank that hold nothing afterwards."""
    digest: str
    """Of the placement after the swap."""
    received_bytes: int


class StagingEvents(Protocol):
    """Where results go; called on the transfer thread."""

    def feed(self, event: StagingFinished | StagingFailed | TransportDrained) -> None:
        """An event for the participant."""
        ...

    def request_rebuild(self, serial: int) -> None:
        """The communicator `serial` is broken."""
        ...

    def progress(self, wave: WaveKey, done: int, total: int) -> None:
        """Bytes staged so far."""
        ...


class StagingWorker:
    """Owns the transport; the engine's and the network's threads only queue jobs here."""

    def __init__(
        self,
        rank: int,
        transport: WeightTransport,
        weights: ExpertWeights,
        maps: MapInstaller,
        events: StagingEvents,
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._weights = weights
        self._maps = maps
        self._events = events
        # Short whatever a peer does: a wave has two jobs, and the next begins only after the second.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._agreed = 0
        """Newest communicator the group agreed to build."""
        self._cancels: dict[WaveKey, threading.Event] = {}
        self._reserved: tuple[tuple[int, int], ...] = ()
        self._ready: ReadyWave | None = None
        self._undrained: WaveKey | None = None
        self._thread = threading.Thread(target=self._run, name="evenkeel-transfer", daemon=True)

    def start(self) -> None:
        """Begin working; the transport must be connected."""
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Break what is in flight and end the thread; one that still waits for a deadline goes with the process."""
        for cancel in list(self._cancels.values()):
            cancel.set()
        self._jobs.put(None)
        self._thread.join(0.2)
        self._transport.abort()
        self._thread.join(timeout_s)

    # --- jobs, queued from any thread -------------------------------------------------------------

    def stage(self, prepare: Prepare, old: Placement, new: Placement) -> None:
        """Stage a wave; ends in StagingFinished or StagingFailed."""
        cancel = threading.Event()
        self._cancels[prepare.wave] = cancel
        self._jobs.put(lambda: self._stage(prepare, old, new, cancel))

    def cancel(self, wave: WaveKey) -> None:
        """Give a wave up; ends in TransportDrained once no operation of it is in flight and transfers work."""
        cancel = self._cancels.get(wave)
        if cancel is not None:
            cancel.set()
        self._jobs.put(lambda: self._drain(wave))

    def rebuild(self, serial: int) -> None:
        """Connect anew: the whole group agreed, so operations still in flight can never end well."""
        self._agreed = serial
        self._transport.abort()
        self._jobs.put(lambda: self._rebuild(serial))

    def later(self, job: Callable[[], None]) -> None:
        """Run something slow off the engine's thread, after what is queued."""
        self._jobs.put(job)

    # --- at the boundary, on the engine's thread ---------------------------------------------------

    def swap(self, wave: WaveKey) -> ReadyWave:
        """Staging to slots, tables installed, emptied memory given back; the wave must be ready."""
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

    # --- on the transfer thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the thread must live: without it no wave ends
                _log.exception("transfer_job_failed")

    def _stage(
        self, prepare: Prepare, old: Placement, new: Placement, cancel: threading.Event
    ) -> None:
        wave = prepare.wave
        try:
            outcome = self._try_stage(prepare, old, new, cancel)
        except Exception as error:  # whatever the engine's hooks raise, the rank votes no
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
        self, prepare: Prepare, old: Placement, new: Placement, cancel: threading.Event
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
            received = sum(
                t.numel() * t.element_size() for tensors in staged.values() for t in tensors
            )
            self._ready = ReadyWave(prepare.wave, staged, tables, filled, emptied, digest, received)
        return outcome

    def _changes(
        self, layers: Sequence[int], old: Placement, new: Placement
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        mine = slice(self._rank * old.slots_per_rank, (self._rank + 1) * old.slots_per_rank)
        filled, emptied = [], []
        for layer in layers:
            before, after = old.phy2log[layer, mine], new.phy2log[layer, mine]
            filled += [
                (layer, int(s)) for s in np.flatnonzero((before == EMPTY) & (after != EMPTY))
            ]
            emptied += [
                (layer, int(s)) for s in np.flatnonzero((before != EMPTY) & (after == EMPTY))
            ]
        return tuple(filled), tuple(emptied)

    def _forget(self) -> None:
        self._ready = None
        reserved, self._reserved = self._reserved, ()
        self._weights.release(reserved)
        self._transport.clear()

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
            return  # The others gave it up while this thread was busy: to wait for them would make it late for the newest too.
        if self._transport.serial >= serial and not self._transport.broken:
            return
        try:
            self._transport.rebuild(serial)
        except Exception as error:  # without another wish no rank would ever be asked to come again
            _log.warning(
                "transport_rebuild_failed",
                serial=serial,
                detail=str(error),
                exc_info=not isinstance(error, Unavailable),
            )
            self._events.request_rebuild(serial)
            return
        wave, self._undrained = self._undrained, None
        if wave is not None:
            self._events.feed(TransportDrained(wave))
