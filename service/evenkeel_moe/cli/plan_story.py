"""Renders the story of a plan as a table in words. Pure functions from JSON to renderables."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from evenkeel_moe.cli.fitted_table import FittedColumn, FittedTable
from evenkeel_moe.cli.plan_figures import counted
from evenkeel_moe.cli.reasons import WORDS, phase_name, with_reason
from evenkeel_moe.cli.tables import legend
from evenkeel_moe.cli.units import figure, figure_name, moments, saving, saving_range, share

_TRANSFER = "transfer: one expert copied into a slot, from another rank or within the rank"
_GAIN = "promised, delivered: saved share of MoE time, predicted and then measured"

_EVENTS = {
    "created": "created",
    "approved": "approved",
    "wave_started": "a wave began",
    "wave_committed": "a wave was committed",
    "paused": "paused",
    "stalled": "stalled",
    "resumed": "resumed",
    "recovered": "taken over by a new leader",
    "cancel_requested": "cancellation requested",
    "ended": "ended",
    "measured": "gain measured",
}
"""Event -> words, the same as in the console."""

_CAUSED = ("created", "paused", "stalled", "ended")
"""Events whose reason says more than the event."""

_SHOWN = {
    *("at", "event", "phase", "reason", "by", "detail", "waves_committed", "steps"),
    *("num_ranks", "ranks"),
    *("promised_gain", "promised_lower"),
    *("delivered_gain", "delivered_lower", "delivered_upper"),
}
"""Fields with words of their own."""


def story_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of the events of a plan, in order. Rows of one day show only the time."""
    columns = (
        FittedColumn("AT (UTC)"),
        FittedColumn("EVENT"),
        FittedColumn("PHASE", keep=1),
        FittedColumn("DETAIL", fold=True, least=32),
    )
    times, day = moments([row.get("at") for row in rows])
    cells = [
        (at, _event(row), _phase(row), "; ".join(_details(row)) or "-")
        for at, row in zip(times, rows, strict=True)
    ]
    events = {row.get("event") for row in rows}
    words = [_TRANSFER] if "wave_started" in events else []
    words += [_GAIN] if "measured" in events else []
    return Group(FittedTable(columns, cells), legend(*day, *words))


def _event(row: Mapping[str, Any]) -> str:
    event = str(row.get("event", "-"))
    by = row.get("by")
    by = " in mode auto" if by == "auto" else f" by {by}" if by else ""
    return _EVENTS.get(event, event.replace("_", " ")) + by


def _phase(row: Mapping[str, Any]) -> str:
    return phase_name(str(row.get("phase") or "-"), str(row.get("reason")))


def _details(row: Mapping[str, Any]) -> list[str]:
    """Return what a row tells besides its event and its phase."""
    if row.get("event") == "measured":
        return [_measured(row), *_others(row)]
    parts = [_reason(row)] if row.get("event") in _CAUSED else []
    if row.get("waves_committed") is not None:
        parts.append(f"{counted(row['waves_committed'], 'wave')} committed so far")
    detail = str(row.get("detail") or "")
    parts.append(f"the ranks are at {detail}" if re.fullmatch(r"epoch \d+", detail) else detail)
    return [part for part in parts if part] + _others(row)


def _reason(row: Mapping[str, Any]) -> str:
    """Return the reason as a sentence, with its name unless the phase says that already."""
    reason = row.get("reason")
    if reason is None:
        return ""
    words = WORDS.get(reason)
    if words is None:
        return str(reason)
    told = row["event"] == "created" or with_reason(str(row.get("phase")), reason) == row["phase"]
    return words if told else f"{words} ({reason})"


def _measured(row: Mapping[str, Any]) -> str:
    """Return what a plan delivered beside its promise, or why that is unknown."""
    promised, gain, steps = (row.get(name) for name in ("promised_gain", "delivered_gain", "steps"))
    on = f", on {counted(steps, 'step')}" if steps else ""
    if gain is None:
        because = row.get("detail")
        return "delivered gain unknown" + (f": {because}" if because else "") + on
    least = row.get("promised_lower")
    floor = "" if least is None else f" (at least {share(least)})"
    promise = "" if promised is None else f"promised {share(promised)}{floor}, "
    interval = saving_range(row.get("delivered_lower"), row.get("delivered_upper"))
    return f"{promise}delivered {saving(gain)} (95 % interval {interval}){on}"


def _others(row: Mapping[str, Any]) -> list[str]:
    """Return the fields of a later controller, which have no words here."""
    return [
        f"{figure_name(name)} {figure(name, value)}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in row.items()
        if name not in _SHOWN and value is not None
    ]
