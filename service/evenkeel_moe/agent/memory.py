"""Free memory of the device that holds the weights."""

import os

import structlog
import torch

_log = structlog.get_logger(__name__)


class FreeMemory:
    """Reads the free memory of a device, and falls back to the last reading when that fails.

    A rank that could not send a heartbeat because of a failed reading would be taken for lost.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: int | None = None

    def read(self) -> int:
        """Return the free bytes; raise only if the first reading fails."""
        try:
            self._last = free_bytes(self._device)
        except Exception as error:
            if self._last is None:
                raise
            _log.warning("free_bytes_unknown", detail=f"{error!r:.200}", last_known=self._last)
        return self._last


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of this host for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
