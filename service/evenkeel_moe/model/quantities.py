"""Bytes and durations as people read them."""

import math

_BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_TIME_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


def bytes_text(value: float | None) -> str:
    """Return a number of bytes with a decimal unit, such as `1.25 GB`; `-` if it is unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    for unit, size in _BYTE_UNITS:
        # Compared with what rounding would show: 999,999 bytes are 1 MB, not 1000 kB.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def duration_text(seconds: float | None) -> str:
    """Return a duration such as `45 s`, `12 min` or `3.5 h`; `-` if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    size = abs(seconds)
    for unit, length in _TIME_UNITS:
        if size >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    if size >= 1 or size == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} µs"
