"""Reads the clock of an NVIDIA GPU from NVML, the library of its driver."""

from typing import Any

import structlog

from evenkeel_moe.wire.link import DeviceClock

_log = structlog.get_logger(__name__)
# Bits of `nvmlDeviceGetCurrentClocksEventReasons`, from nvml.h.
_IDLE = 0x01
_LIMITS = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x08}


class NvmlClock:
    """The clock of one GPU. Without the driver or the package `nvidia-ml-py` it is unknown.

    Args:
        gpu_uuid: as torch gives it; the prefix `GPU-` may be missing.
    """

    def __init__(self, gpu_uuid: str) -> None:
        self._uuid = gpu_uuid if gpu_uuid.startswith("GPU-") else f"GPU-{gpu_uuid}"
        self._handle: Any = None
        self._warned = False

    def read(self) -> DeviceClock | None:
        """Return the clock; None while the GPU is idle, because an idle GPU lowers its clock."""
        try:
            return self._read()
        except Exception as error:  # NVML makes its error classes when it loads.
            if not self._warned:
                _log.warning("clock_unknown", gpu_uuid=self._uuid, detail=repr(error)[:200])
            self._warned = True
            return None

    def _read(self) -> DeviceClock | None:
        import pynvml

        if self._handle is None:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        present = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
        highest = pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
        return clock_of(int(present), int(highest), reasons)


def clock_of(present_mhz: int, highest_mhz: int, reasons: int) -> DeviceClock | None:
    """Return what a reading means.

    Args:
        present_mhz: clock of the multiprocessors.
        highest_mhz: the highest one that the device supports.
        reasons: bit mask of what determines the clock, as NVML tells it.

    Returns:
        None if the device is idle, or if a clock is 0.
    """
    if reasons & _IDLE or present_mhz < 1 or highest_mhz < 1:
        return None
    limits = ", ".join(name for name, bits in _LIMITS.items() if reasons & bits)
    return DeviceClock(min(present_mhz / highest_mhz, 2.0), limits)
