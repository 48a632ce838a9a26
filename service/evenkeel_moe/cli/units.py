"""Numbers as people read them: bytes, durations, moments, and the named figures of decisions.

`--json` prints the controller's numbers unchanged. These functions are only for tables.
"""

import math
from datetime import UTC, datetime

_BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_TIME_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
_SHARES = frozenset(
    {
        *("gain", "gain_lower", "gain_upper", "gain_modelled", "min_gain", "net_gain"),
        *("copy_cost_share", "gap", "gap_to_bound"),
    }
)
"""Figures that are shares of MoE time."""
_RATIOS = ("balance", "starts_below", "plan_below", "stop_above", "calibration")
"""Beginnings of the names of figures that lie between 0 and 1 and are shown with three digits."""


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
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} us"


def moment(unix: float | None) -> str:
    """Return Unix seconds as UTC text, or `-` if they are unknown."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(unix: float | None, now: float) -> str:
    """Return how long ago a moment was, such as `12 s ago`, or how far ahead it is."""
    if unix is None:
        return "-"
    since = round(now - unix)
    return f"{duration_text(since)} ago" if since >= 0 else f"in {duration_text(-since)}"


def share(value: float | None) -> str:
    """Return a share in percent, or `-` if it is unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{0.0 + round(value, 3):.1%}"


def figure(name: str, value: float | None) -> str:
    """Return a named figure of a decision or a plan, with the unit that its name implies."""
    if value is None or not math.isfinite(value):
        return "-"
    if name in _SHARES:
        return share(value)
    if name.endswith("bytes"):
        return bytes_text(value)
    if name.endswith("_s"):
        return duration_text(value)
    if any(name.startswith(prefix) for prefix in _RATIOS):
        return f"{value:.3f}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


def figure_name(name: str) -> str:
    """Return the name of a figure as words; the unit is in its value."""
    return name.removesuffix("_s").replace("_", " ")
