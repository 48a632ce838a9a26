"""Connects a transfer communicator on a thread of its own, so that the wait can be aborted."""

from collections.abc import Callable
from datetime import timedelta

import torch

from evenkeel_moe.adapters.torch.groups import Communicator, Operation
from evenkeel_moe.adapters.torch.streams import OwnStream, wait_for_device
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.ports.threads import Event, Threads

_WARM_UP_S = 60.0
"""Limit on the first exchanges over a new communicator."""


class _Attempt:
    """One attempt to connect. The connector's lock guards all but the event."""

    def __init__(self, over: Event) -> None:
        self.over = over
        """Set when the attempt has ended or was aborted."""
        self.warming: Communicator | None = None
        """The communicator once it is connected."""
        self.fresh: Communicator | None = None
        """The communicator once it is connected and warmed up."""
        self.error: Exception | None = None
        self.aborted = False


class Connector:
    """Makes communicators over all ranks, one at a time.

    One thread calls `connect`; any thread may call `abort`.

    Args:
        connect: serial -> a new communicator over all ranks; collective.
        device: device of the tensors.
        stream: for the first exchanges. The wait for the peers must not be queued on a stream of
            the engine.
        threads: starts the thread of an attempt.
    """

    def __init__(
        self,
        connect: Callable[[int], Communicator],
        device: torch.device,
        stream: OwnStream,
        threads: Threads,
    ) -> None:
        self._connect = connect
        self._device = device
        self._stream = stream
        self._threads = threads
        self._lock = threads.lock()
        self._attempt: _Attempt | None = None

    def connect(self, serial: int) -> Communicator:
        """Connect all ranks and warm up every connection; collective.

        Raises:
            Unavailable: not all ranks connected in time, one left, or `abort` was called. A
                communicator that is connected after that is aborted.
        """
        attempt = _Attempt(self._threads.event())
        with self._lock:
            self._attempt = attempt
        self._threads.start(lambda: self._run(attempt, serial), "evenkeel-connect")
        attempt.over.wait()
        if attempt.aborted:
            raise Unavailable(
                f"transfer communicator {serial}: connecting was aborted", Reason.TRANSFER_FAILED
            )
        if attempt.fresh is not None:
            return attempt.fresh
        assert attempt.error is not None
        if not isinstance(attempt.error, RuntimeError):
            raise attempt.error
        raise Unavailable(
            f"transfer communicator {serial}: {attempt.error}", Reason.TRANSFER_FAILED
        ) from attempt.error

    def abort(self) -> None:
        """End the wait of `connect`."""
        with self._lock:
            attempt, self._attempt = self._attempt, None
            if attempt is None or attempt.over.is_set():
                return
            attempt.aborted = True
        attempt.over.set()
        if attempt.warming is not None and self._device.type == "cuda":
            attempt.warming.abort()  # Gloo would wait for its collective; its thread aborts it.

    def _run(self, attempt: _Attempt, serial: int) -> None:
        """Give a connected and warmed up communicator to the attempt, if that still waits."""
        fresh: Communicator | None = None
        error: Exception | None = None
        try:
            fresh = self._connect(serial)
            with self._lock:
                attempt.warming = fresh
            self._warm_up(fresh)
        except Exception as failure:  # The thread that waits raises it, unless it was aborted.
            error = failure
        with self._lock:
            if error is None and not attempt.aborted:
                attempt.fresh = fresh
            attempt.error = error
            attempt.over.set()
        if fresh is not None and attempt.fresh is None:
            fresh.abort()

    def _warm_up(self, communicator: Communicator) -> None:
        """Exchange a byte between all pairs of ranks, so that no batch has to connect first."""
        deadline = self._threads.monotonic() + _WARM_UP_S
        with self._stream.after(None):
            communicator.all_gather(torch.zeros(1, device=self._device))
            for distance in range(1, communicator.size):
                target = (communicator.rank + distance) % communicator.size
                source = (communicator.rank - distance) % communicator.size
                out = torch.zeros(1, dtype=torch.uint8, device=self._device)
                pair = [
                    Operation(torch.empty_like(out), source, sends=False),
                    Operation(out, target, sends=True),
                ]
                for work in communicator.start_exchange(pair, distance):
                    left = deadline - self._threads.monotonic()
                    work.wait(timedelta(seconds=max(0.001, left)))
            if not wait_for_device(self._device, deadline):
                raise RuntimeError(f"the first exchanges took longer than {_WARM_UP_S:g} s")
