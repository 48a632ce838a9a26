"""Renders plans and their stories as tables. Pure functions from JSON to renderables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli.fitted_table import FittedColumn, FittedTable
from evenkeel_moe.cli.reasons import explained
from evenkeel_moe.cli.tables import legend
from evenkeel_moe.cli.units import age, figure, figure_name, moment, moments, share
from evenkeel_moe.model.quantities import bytes_text

_WORDS = (
    "copies: experts copied between ranks; wave: whole layers that change on the same step",
    "promised, delivered: saved share of MoE time, predicted and then measured",
)


_TRANSFER = "transfer: one expert copied into a slot, from another rank or within the rank"
_ROLLBACK = "rollback: it returns to an earlier placement as intended, so it may save less"


def plans_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each plan."""
    columns = (
        FittedColumn("PLAN"),
        FittedColumn("PHASE"),
        FittedColumn("PHASE BECAUSE", keep=4),
        FittedColumn("MADE BECAUSE", keep=5),
        FittedColumn("POLICY", keep=6),
        FittedColumn("BASE EPOCH", right=True, keep=7),
        FittedColumn("WAVES", right=True, keep=2),
        FittedColumn("COPIES", right=True, keep=1),
        FittedColumn("BYTES", right=True, keep=1),
        FittedColumn("PROMISED", right=True, keep=1),
        FittedColumn("DELIVERED", right=True, keep=1),
        FittedColumn("CREATED (UTC)", keep=3),
    )
    cells = []
    for row in rows:
        delivered = row["delivered"]
        cells.append(
            (
                *(
                    str(row[name])
                    for name in ("plan_id", "phase", "reason", "planned_because", "policy")
                ),
                str(row["base_epoch"]),
                f"{row['waves_committed']}/{row['waves']}",
                f"{row['moves']:,}",
                bytes_text(row["nbytes"]),
                share(row["numbers"].get("gain")),
                "-" if delivered is None else share(delivered["gain"]),
                moment(row["created_at"]),
            )
        )
    returned = any(row["kind"] == "rollback" and row["delivered"] is not None for row in rows)
    return Group(FittedTable(columns, cells), legend(*_WORDS, *([_ROLLBACK] if returned else [])))


def plan_view(row: Mapping[str, Any], now: float) -> RenderableType:
    """Return a view of one plan and its figures; `now` is in Unix seconds."""
    parts: list[RenderableType] = [_facts(row, now)]
    if row["error"]:
        parts.append(Text(row["error"], style="red"))
    if row["delivered"] is not None:
        parts.append(Text(_delivered_line(row["delivered"], row["kind"])))
    if row["numbers"]:
        cells = [(figure_name(name), figure(name, value)) for name, value in row["numbers"].items()]
        columns = (FittedColumn("FIGURE"), FittedColumn("VALUE", right=True))
        parts += [Text(), FittedTable(columns, cells)]
    reasons = explained([str(row["reason"]), str(row["planned_because"])])
    return Group(*parts, legend(*_WORDS, *reasons))


def _facts(row: Mapping[str, Any], now: float) -> RenderableType:
    approved = "" if row["approved_by"] is None else f", approved by {row['approved_by']}"
    created = f"{moment(row['created_at'])} UTC, {age(row['created_at'], now)}{approved}"
    facts = {
        "plan": f"{row['plan_id']} of {row['deployment']} ({row['kind']}, policy {row['policy']})",
        "phase": f"{row['phase']} ({row['reason']})",
        "made because": row["planned_because"],
        "created": created,
        "base epoch": row["base_epoch"],
        "waves": f"{row['waves_committed']} of {row['waves']} committed",
        "copies": f"{row['moves']:,} between ranks, {bytes_text(row['nbytes'])}",
    }
    if row["expires_at"] is not None and row["phase"] == "proposed":
        facts["expires"] = f"{moment(row['expires_at'])} UTC, {age(row['expires_at'], now)}"
    cells = [(Text(name, style="dim"), Text(str(value))) for name, value in facts.items()]
    return FittedTable((FittedColumn(""), FittedColumn("", fold=True)), cells)


def _delivered_line(row: Mapping[str, Any], kind: str) -> str:
    """Return promise and delivery of a plan in words."""
    if row["gain"] is None:
        return f"what it delivered is unknown: {row['unknown_because']}"
    returned = kind == "rollback" and row["gain"] < 0
    promised = f"promised {share(row['promised'])} of MoE time, " if row["promised"] else ""
    return (
        f"{promised}delivered {share(row['gain'])} ({share(row['lower'])} to"
        f" {share(row['upper'])}) on {row['steps']} steps{'; ' + _ROLLBACK if returned else ''}"
    )


def story_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of the events of a plan, in order. Rows of one day show only the time."""
    columns = (FittedColumn("AT (UTC)"), FittedColumn("EVENT"), FittedColumn("DETAIL", fold=True))
    times, day = moments([row.get("at") for row in rows])
    cells = []
    for at, row in zip(times, rows, strict=True):
        rest = {key: value for key, value in row.items() if key not in ("at", "event")}
        cells.append((at, str(row.get("event", "")), _detail(rest)))
    return Group(FittedTable(columns, cells), legend(*day, _TRANSFER))


def _detail(values: Mapping[str, Any]) -> str:
    shown = [
        f"{figure_name(key)} {figure(key, value)}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f"{key.replace('_', ' ')} {value}"
        for key, value in values.items()
        if value is not None
    ]
    return ", ".join(shown)
