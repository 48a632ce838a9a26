"""Numbers as people read them: bytes, durations, shares, ages and named figures.

The controller and the command line write them in the same way.
"""

import math
from collections.abc import Sequence

from evenkeel_moe.model.finding import LIVE_CODES, runs

_BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_TIME_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
_SHARES = frozenset(
    {
        *("gain", "gain_lower", "gain_upper", "gain_modelled", "min_gain", "net_gain"),
        *("copy_cost_share", "promised_gain", "promised_lower", "survive_price"),
        *("delivered_gain", "delivered_lower", "delivered_upper"),
        *(*LIVE_CODES, "max_layer_deviation", "max_idle_experts"),
    }
)
"""Figures that are shares, of MoE time or of counts."""
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


def size_text(nbytes: int | None) -> str:
    """Return the bytes of copies: `6 MB`, or `of unknown size`."""
    return "of unknown size" if nbytes is None else bytes_text(nbytes)


def copies_text(copies: str, nbytes: int | None) -> str:
    """Return counted copies with their bytes: `3 copies, 6 MB` or `3 copies of unknown size`."""
    return f"{copies}{' ' if nbytes is None else ', '}{size_text(nbytes)}"


def duration_text(seconds: float | None, digits: int = 3) -> str:
    """Return a duration such as `45 s`, `12 min` or `3.5 h`; `-` if it is unknown.

    Args:
        seconds: may be negative.
        digits: significant digits from two minutes on.
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    size = abs(seconds)
    for unit, length in _TIME_UNITS:
        if size >= 2 * length:
            return f"{float(f'{seconds / length:.{digits}g}'):g} {unit}"
    if size >= 1 or size == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def counted(number: float, one: str, many: str = "") -> str:
    """Return a number with its noun, such as `1 copy` or `2 copies`."""
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"


def age(unix: float | None, now: float) -> str:
    """Return how long ago a moment was, such as `12 s ago`, or how far ahead it is.

    From two minutes on without seconds.
    """
    if unix is None:
        return "-"
    since = round(now - unix)
    whole = abs(since)
    if whole >= 120:
        whole = 60 * round(whole / 60)
    text = duration_text(whole, 3 if whole < 7200 else 2)
    return f"{text} ago" if since >= 0 else f"in {text}"


def share(value: float | None) -> str:
    """Return a share in percent, or `-` if it is unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{0.0 + round(value, 3):.1%}"


def is_loss(gain: float | None) -> bool:
    """Return True if a saved share of MoE time is a loss, as far as its text shows."""
    return gain is not None and math.isfinite(gain) and round(gain, 3) < 0


def saving(gain: float | None) -> str:
    """Return a saved share of MoE time in words, or `-` if it is unknown.

    A loss says that the step got slower: `20.4% slower`, and from twice the time on `3.5x as long`.
    """
    if gain is None or not is_loss(gain):
        return share(gain) if share(gain) == "-" else f"{share(gain)} saved"
    return f"{share(-gain)} slower" if gain > -1.0 else f"{1.0 - gain:.1f}x as long"


def saving_range(lower: float | None, upper: float | None) -> str:
    """Return an interval of saved shares in percent; where it holds losses, in words.

    Of two losses the smaller one comes first.
    """
    if not is_loss(lower):
        return f"{share(lower)} to {share(upper)}"
    if is_loss(upper):
        return f"{saving(upper)} to {saving(lower)}"
    return f"{saving(lower)} to {saving(upper)}"


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


def numbered(numbers: Sequence[int]) -> str:
    """Return rising numbers as text, runs of them as `4-7`."""
    return ", ".join(runs(numbers, "-"))
