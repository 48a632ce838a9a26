"""Numbers as people read them: moments, and the named figures of decisions.

`--json` prints the controller's numbers unchanged. These functions are only for tables.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from evenkeel_moe.model.finding import LIVE_CODES
from evenkeel_moe.model.quantities import bytes_text, duration_text

_SHARES = frozenset(
    {
        *("gain", "gain_lower", "gain_upper", "gain_modelled", "min_gain", "net_gain"),
        *("copy_cost_share", "promised_gain", "promised_lower"),
        *("delivered_gain", "delivered_lower", "delivered_upper"),
        *(*LIVE_CODES, "max_layer_deviation", "max_idle_experts"),
    }
)
"""Figures that are shares, of MoE time or of counts."""
_RATIOS = ("balance", "starts_below", "plan_below", "stop_above", "calibration")
"""Beginnings of the names of figures that lie between 0 and 1 and are shown with three digits."""


def moment(unix: float | None) -> str:
    """Return Unix seconds as UTC text, or `-` if they are unknown."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moments(unix: Sequence[float | None]) -> tuple[list[str], list[str]]:
    """Return moments as UTC text, and a line that names their day.

    If all are of one day they show only the time; else there is no line.
    """
    texts = [moment(one) for one in unix]
    days = {text[:10] for text in texts}
    if len(days) != 1 or None in unix:
        return texts, []
    return [text[11:] for text in texts], [f"all on {days.pop()}"]


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


def is_loss(gain: float | None) -> bool:
    """Return True if a saved share of MoE time is a loss, as far as its text shows."""
    return gain is not None and math.isfinite(gain) and round(gain, 3) < 0


def is_uncertain(lower: float | None, upper: float | None) -> bool:
    """Return True if an interval of saved shares holds both savings and losses, or ends at 0."""
    return lower is not None and upper is not None and lower <= 0 <= upper


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
