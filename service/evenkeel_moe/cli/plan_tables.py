"""Renders plans and their stories as tables. Pure functions from JSON to renderables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli.console import Listing, TableColumn, explained, facts, legend
from evenkeel_moe.cli.tables import with_reason
from evenkeel_moe.cli.units import dated, moment
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.quantities import (
    age,
    bytes_text,
    counted,
    duration_text,
    is_loss,
    saving,
    share,
)

_COPIES = "copies: experts copied between ranks; wave: whole layers that change on the same step"
_GAIN = "promised, delivered: saved share of MoE time, predicted and then measured"
_SUPERSEDED = "superseded: it never began, and nothing is wrong with it"
_UNCERTAIN = (
    "uncertain: the 95 % interval of the measured share contains 0; `evenkeel plan show` tells it"
)


def plans_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each plan. Columns without a value are left out."""
    if not rows:
        return Text("no plan yet", style="dim")
    shown, day = dated(rows, "created_at")
    if not day:
        shown = [{**row, "created_at": row["created_at"][5:16]} for row in shown]
    seen = f"UTC, {day[0]}" if day else "month, day, hour and minute in UTC"
    columns = (
        TableColumn("PLAN", "plan_id"),
        TableColumn("PHASE", "phase_text"),
        TableColumn("WHY THIS PHASE", _reason, wide=True),
        TableColumn("RETURNS TO", _returns_to, wide=True),
        TableColumn("WHY MADE", "planned_because", wide=True),
        TableColumn("POLICY", "policy", wide=True),
        TableColumn("BASE EPOCH", "base_epoch", right=True, wide=True),
        TableColumn("WAVES", _waves, right=True, wide=True),
        TableColumn("COPIES", "moves", "{:,}".format, right=True, wide=True),
        TableColumn("BYTES", "nbytes", bytes_text, right=True, wide=True),
        TableColumn(
            "PROMISED", lambda row: row["numbers"].get("gain"), share, right=True, optional=True
        ),
        TableColumn("DELIVERED", _delivered, right=True, optional=True),
        TableColumn("CREATED", "created_at"),
    )
    measured = [row["delivered"] for row in rows if row["delivered"] is not None]
    losses = any(is_loss(one["gain"]) and not _is_uncertain(one) for one in measured)
    words = [f"created: {seen}", _COPIES, _GAIN + ("; slower: MoE time rose" if losses else "")]
    if any(_is_uncertain(one) for one in measured):
        words.append(_UNCERTAIN)
    words += explained(row for row in rows if not _is_plain(row))
    if any(row["phase_text"] == "superseded" for row in rows):
        words.append(_SUPERSEDED)
    may_cost = [row["may_cost_text"] for row in rows if row["delivered"] is not None]
    words += dict.fromkeys(text for text in may_cost if text is not None)
    return Group(Listing(columns, shown), legend(*words))


def _reason(row: Mapping[str, Any]) -> str | None:
    return None if _is_plain(row) else row["reason"]


def _waves(row: Mapping[str, Any]) -> str:
    return f"{row['waves_committed']}/{row['waves']}"


def _delivered(row: Mapping[str, Any]) -> str | None:
    measured = row["delivered"]
    if measured is None:
        return None
    return "uncertain" if _is_uncertain(measured) else saving(measured["gain"])


def _is_uncertain(measured: Mapping[str, Any]) -> bool:
    """Return True if the interval holds both savings and losses, or ends at 0."""
    lower, upper = measured["lower"], measured["upper"]
    return lower is not None and upper is not None and bool(lower <= 0 <= upper)


def _is_plain(row: Mapping[str, Any]) -> bool:
    """Return True if the reason of a phase repeats it, or says why the plan was made."""
    known = (row["planned_because"], Reason.PLAN_STARTED)
    phase = row["phase_text"]
    return with_reason(phase, row["reason"]) == phase or row["reason"] in known


def _returns_to(row: Mapping[str, Any]) -> str | None:
    """Return the epoch to whose placement a rollback returns."""
    epoch = row["numbers"].get("to_epoch")
    return None if epoch is None else f"epoch {epoch:.0f}"


def plan_view(row: Mapping[str, Any], now: float) -> RenderableType:
    """Return a view of one plan: where it stands, gain, effort, and the figures behind it.

    Args:
        row: the plan, with its story and target.
        now: Unix seconds.
    """
    plan = f"{row['plan_id']} of {row['deployment']} ({row['kind']}, policy {row['policy']})"
    shown = [
        ("plan", plan),
        ("phase", f"{row['phase_text']}: {row['text']}"),
        *_figures(row["figures"]),
        ("ranks", f"{row['target']['num_ranks']:,}"),
        *_duration(row, now),
        *_origin(row, now),
    ]
    parts: list[RenderableType] = [facts(shown)]
    if row["error"] and row["error"] != row["reason"]:
        parts.append(Text(row["error"], style="red"))
    if row["details"]:
        title = Text("\nFigures behind it", style="bold")
        parts += [title, facts(_figures(row["details"]))]
    return Group(*parts, legend(_COPIES))


def _figures(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return names and values, with the notes in brackets."""
    return [
        (row["name"], f"{row['value']} ({row['note']})" if row["note"] else row["value"])
        for row in rows
    ]


def story_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of the events of a plan, in order. Rows of one day show only the time."""
    shown, day = dated(rows)
    columns = (
        TableColumn("AT (UTC)", "at"),
        TableColumn("PHASE", lambda row: row["phase_text"] or None),
        TableColumn("EVENT", "text", fold=True),
    )
    words = [_GAIN] if any(row["event"] == "measured" for row in rows) else []
    return Group(Listing(columns, shown), legend(*day, *words))


def _duration(row: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """Return how long the waves took, by the story; nothing before the first."""
    begun = [event["at"] for event in row["story"] if event["event"] == "wave_started"]
    if not begun:
        return []
    if row["phase"] in ("approved", "migrating", "paused", "stalled"):
        return [("duration", f"{duration_text(now - begun[0])} so far")]
    ended = [event["at"] for event in row["story"] if event["event"] in ("wave_committed", "ended")]
    done = row["waves_committed"]
    until = f"for {counted(done, 'wave')}" if done else "until it ended"
    return [("duration", f"{duration_text(ended[-1] - begun[0])} {until}")] if ended else []


def _origin(row: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """Return who made a plan, when, and on which placement."""
    approved = "" if row["approved_by"] is None else f", approved by {row['approved_by']}"
    created = f"{moment(row['created_at'])} UTC, {age(row['created_at'], now)}{approved}"
    rows = [
        ("made because", row["planned_because_text"]),
        ("created", created),
        ("made on", f"epoch {row['base_epoch']}"),
    ]
    if row["expires_at"] is not None and row["phase"] == "proposed":
        expires = f"{moment(row['expires_at'])} UTC, {age(row['expires_at'], now)}"
        rows.append(("expires", expires))
    return rows
