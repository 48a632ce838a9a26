"""Renders plans and their stories as tables. Pure functions from JSON to renderables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli import plan_figures
from evenkeel_moe.cli.fitted_table import FittedColumn, FittedTable
from evenkeel_moe.cli.reasons import explained, with_reason
from evenkeel_moe.cli.tables import BALANCEDNESS_WORDS, legend
from evenkeel_moe.cli.units import age, figure, figure_name, moment, moments, share
from evenkeel_moe.model.quantities import bytes_text

_COPIES = "copies: experts copied between ranks; wave: whole layers that change on the same step"
_WORDS = (_COPIES, "promised, delivered: saved share of MoE time, predicted and then measured")
_TRANSFER = "transfer: one expert copied into a slot, from another rank or within the rank"


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
    return Group(
        FittedTable(columns, cells), legend(*_WORDS, *([plan_figures.ROLLBACK] if returned else []))
    )


def plan_view(
    row: Mapping[str, Any], now: float, cost_model: Mapping[str, Any] | None
) -> RenderableType:
    """Return a view of one plan: gain, effort, facts, and then the other figures behind it.

    Args:
        row: the plan, with its story and target.
        now: Unix seconds.
        cost_model: of the deployment now; None if it is not known.
    """
    plan = f"{row['plan_id']} of {row['deployment']} ({row['kind']}, policy {row['policy']})"
    parts: list[RenderableType] = [
        _facts(
            [
                ("plan", plan),
                ("phase", with_reason(row["phase"], row["reason"])),
                *plan_figures.predicted(row, cost_model),
                *plan_figures.delivered(row),
                *plan_figures.effort(row, now),
                *_origin(row, now),
                *([] if cost_model is None else [("cost model now", str(cost_model["words"]))]),
            ]
        )
    ]
    if row["error"] and row["error"] != row["reason"]:
        parts.append(Text(row["error"], style="red"))
    rows = plan_figures.details(row["numbers"])
    if rows:
        parts += [Text("\nFigures behind it", style="bold"), _facts(rows)]
    reasons = explained([str(row["reason"]), str(row["planned_because"])])
    balanced = any(name.startswith("balancedness") for name in row["numbers"])
    words = [_COPIES, *([BALANCEDNESS_WORDS] if balanced else []), *reasons]
    return Group(*parts, legend(*words))


def _origin(row: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """Return who made a plan, when, and on which placement."""
    approved = "" if row["approved_by"] is None else f", approved by {row['approved_by']}"
    created = f"{moment(row['created_at'])} UTC, {age(row['created_at'], now)}{approved}"
    rows = [
        ("made because", str(row["planned_because"])),
        ("created", created),
        ("made on", f"epoch {row['base_epoch']}"),
    ]
    if row["expires_at"] is not None and row["phase"] == "proposed":
        expires = f"{moment(row['expires_at'])} UTC, {age(row['expires_at'], now)}"
        rows.append(("expires", expires))
    return rows


def _facts(rows: Sequence[tuple[str, str]]) -> RenderableType:
    cells = [(Text(name, style="dim"), Text(value)) for name, value in rows]
    return FittedTable((FittedColumn(""), FittedColumn("", fold=True)), cells)


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
