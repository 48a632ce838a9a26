"""A stream of our own on a GPU, and its order after work that an engine's thread has queued.

`torch.cuda.Stream` hands out 32 streams in turn, so a new one can be a stream that the engine
already uses: our copies would then hold up its steps. A stream from the driver is nobody else's.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import structlog
import torch

_log = structlog.get_logger(__name__)
_NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`, also HIP's: no implicit order with the legacy default stream."""
_POLL_INTERVAL_S = 0.0002
"""Time between two queries of a device event."""


class DeviceEvent(Protocol):
    """An event in a device's stream, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Return True if all work before the event is done; RuntimeError if some of it failed."""
        ...


def is_over(event: DeviceEvent, deadline: float) -> bool:
    """Wait for an event until the deadline [monotonic s]; return True if it is over.

    It polls, because a wait in the driver could block the thread for ever.
    """
    while not event.query():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def wait_for_device(device: torch.device, deadline: float) -> bool:
    """Wait for the work of the current stream; return False if the deadline passes first.

    The deadline [monotonic s] is needed because no wait of NCCL ends by itself. On the host no work
    is pending.
    """
    mark = mark_queued(device)
    return mark is None or is_over(mark, deadline)


class OwnStream:
    """One stream of a device, made once; on the host it does nothing.

    Args:
        device: CPU or a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = _make_stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Queue the work of the block on this stream, after what `mark` marks.

        Args:
            mark: result of `mark_queued`.
        """
        if self._stream is None:
            yield
            return
        if mark is not None:
            self._stream.wait_event(mark)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def mark_queued(device: torch.device) -> Any:
    """Mark the work that the calling thread has queued on a device so far.

    Returns:
        An event in the thread's current stream; None on the host, where no work is pending.
    """
    if device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _make_stream(device: torch.device) -> Any:
    """Return a stream from the driver; one of torch's, with a warning, if that fails."""
    library, create = (
        ("libamdhip64.so", "hipStreamCreateWithFlags")
        if torch.version.hip
        else ("libcuda.so.1", "cuStreamCreate")
    )
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.empty(1, device=device)  # The driver needs a context in this thread.
        try:
            code = getattr(ctypes.CDLL(library), create)(ctypes.byref(handle), _NON_BLOCKING)
        except (OSError, AttributeError) as error:
            code = repr(error)[:200]
    if code == 0:
        return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]
    _log.warning(
        "stream_from_torch",
        detail=f"{create} of {library} failed ({code}): copies may share a stream with the engine",
    )
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
