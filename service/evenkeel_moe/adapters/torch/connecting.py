"""Connects a transfer communicator on a thread of its own, so that the wait can be aborted."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta

import torch

from evenkeel_moe.adapters.torch.groups import Communicator, Operation
from evenkeel_moe.adapters.torch.streams import OwnStream, wait_for_device
from evenkeel_moe.errors import Reason, Unavailable

_WARM_UP_S = 60.0
"""Limit on the first exchanges over a new communicator."""


class Connector:
    """Makes communicators over all ranks, one at a time.

    One thread calls `connect`; any thread may call `abort`.

    Args:
        connect: serial -> a new communicator over all ranks; collective.
        device: device of the tensors.
        stream: for the first exchanges. The wait for the peers must not be queued on a stream of
            the engine.
    """

    def __init__(
        self, connect: Callable[[int], Communicator], device: torch.device, stream: OwnStream
    ) -> None:
        self._connect = connect
        self._device = device
        self._stream = stream
        self._lock = threading.Lock()
        self._attempt: Future[Communicator] | None = None
        self._warming: Communicator | None = None

    def connect(self, serial: int) -> Communicator:
        """Connect all ranks and warm up every connection; collective.

        Raises:
            Unavailable: not all ranks connected in time, one left, or `abort` was called. A
                communicator that is connected after that is aborted.
        """
        attempt: Future[Communicator] = Future()
        with self._lock:
            self._attempt = attempt
        threading.Thread(
            target=self._run, args=(attempt, serial), name="evenkeel-connect", daemon=True
        ).start()
        try:
            fresh = attempt.result()
        except CancelledError:
            raise Unavailable(
                f"transfer communicator {serial}: connecting was aborted", Reason.TRANSFER_FAILED
            ) from None
        except RuntimeError as error:
            raise Unavailable(
                f"transfer communicator {serial}: {error}", Reason.TRANSFER_FAILED
            ) from error
        with self._lock:
            self._attempt = self._warming = None
        return fresh

    def abort(self) -> None:
        """End the wait of `connect`."""
        with self._lock:
            attempt, self._attempt = self._attempt, None
            warming, self._warming = self._warming, None
        if attempt is None or not attempt.cancel():
            return
        if warming is not None and self._device.type == "cuda":
            warming.abort()  # Gloo would wait for its collective; its thread aborts it.

    def _run(self, attempt: Future[Communicator], serial: int) -> None:
        """Give a connected and warmed up communicator to the attempt, if that still waits."""
        fresh: Communicator | None = None
        try:
            fresh = self._connect(serial)
            with self._lock:
                if self._attempt is attempt:
                    self._warming = fresh
            self._warm_up(fresh)
            attempt.set_result(fresh)
        except Exception as error:  # The thread that waits raises it, unless it was aborted.
            if fresh is not None:
                fresh.abort()
            with suppress(InvalidStateError):
                attempt.set_exception(error)

    def _warm_up(self, communicator: Communicator) -> None:
        """Exchange a byte between all pairs of ranks, so that no batch has to connect first."""
        deadline = time.monotonic() + _WARM_UP_S
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
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            if not wait_for_device(self._device, deadline):
                raise RuntimeError(f"the first exchanges took longer than {_WARM_UP_S:g} s")
