"""Answers of the controller as tables: pure functions from JSON to renderables."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = [
    "decisions_table",
    "document_table",
    "deployment_view",
    "deployments_table",
    "plan_view",
    "plans_table",
    "story_table",
]


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or `-` for unknown."""
    return "-" if value is None else f"{value:.{digits}f}"


def moment(unix: float | None) -> str:
    """Unix seconds as UTC, or `-`."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def deployments_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per deployment."""
    table = _table(
        "DEPLOYMENT",
        "STATE",
        "REASON",
        "MODE",
        "POLICY",
        "EPOCH",
        "BALANCEDNESS",
        "WORST",
        "RANKS",
        "PLAN",
    )
    for row in rows:
        plan = row["active_plan"]
        table.add_row(
            row["deployment"], row["state"], row["reason"], *(_word(row[name]) for name in ("mode", "policy", "epoch")),
            number(row["balancedness_mean"]), number(row["balancedness_worst"]), _ranks(row),
            "-" if plan is None else f"{plan['plan_id']} {plan['phase']}",
        )  # fmt: skip
    return table


def _word(value: object) -> str:
    return "-" if value is None else str(value)


def _ranks(row: Mapping[str, Any]) -> str:
    if row["ranks"] is None:
        return "-"
    fresh = sum(rank["fresh"] for rank in row["ranks"])
    return f"{fresh}/{row['shape']['num_ranks']}"


def deployment_view(row: Mapping[str, Any]) -> RenderableType:
    """One deployment with its ranks."""
    facts = _table("", "")
    facts.show_header = False
    decision = row["last_decision"]
    plan = row["active_plan"]
    for name, value in (
        ("deployment", row["deployment"]),
        ("state", f"{row['state']} ({row['reason']})"),
        (
            "mode, policy",
            f"{row['mode']}, {row['policy']}{', held after a rollback' if row['held'] else ''}",
        ),
        ("frozen until", moment(row["frozen_until_unix"])),
        ("leader", f"{row['leader']}, term {row['term']}"),
        ("epoch", f"{_word(row['epoch'])} of generation {row['generation']}"),
        ("shape", _shape_line(row["shape"])),
        ("window", f"{row['window_steps']} steps, newest {_word(row['step'])}"),
        (
            "balancedness",
            f"{number(row['balancedness_mean'])} mean, {number(row['balancedness_worst'])} worst layer",
        ),
        (
            "last decision",
            "-" if decision is None else f"{decision['reason']} at {moment(decision.get('at'))}",
        ),
        ("plan", "none" if plan is None else _plan_line(row, plan)),
    ):
        facts.add_row(Text(name, style="dim"), Text(value))
    ranks = _table(
        "RANK",
        "NODE",
        "FRESH",
        "EPOCH",
        "WAVE",
        "LOAD SHARE",
        "S/TOKEN",
        "FREE BYTES",
        "STAGING BYTES",
    )
    for rank in row["ranks"]:
        pace = rank["seconds_per_token"]
        ranks.add_row(
            str(rank["rank"]), rank["node"], "yes" if rank["fresh"] else "NO", str(rank["epoch"]), rank["state"],
            number(rank["load_share"], 4), "-" if pace is None else f"{pace:.3g}",
            str(rank["free_bytes"]), str(rank["staging_bytes"]),
        )  # fmt: skip
    troubles = [
        Text(f"rank {rank['rank']} takes no wave: {rank['trouble']}", style="red")
        for rank in row["ranks"]
        if rank.get("trouble")
    ]
    return Group(facts, Text(), ranks, *troubles)


def _shape_line(shape: Mapping[str, Any]) -> str:
    model = f"{shape['num_layers']} layers x {shape['num_logical_experts']} experts, top {shape['top_k']}"
    return f"{model}, {shape['num_ranks']} ranks x {shape['slots_per_rank']} slots"


def _plan_line(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    return (
        f"{plan['plan_id']} {plan['phase']} ({plan['reason']}), wave {plan['waves_committed']}/{plan['waves']},"
        f" {row['staging_bytes_done']}/{row['staging_bytes_total']} bytes staged"
    )


def plans_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per plan."""
    table = _table(
        "PLAN",
        "PHASE",
        "REASON",
        "BECAUSE",
        "POLICY",
        "BASE",
        "WAVES",
        "MOVES",
        "BYTES",
        "CREATED (UTC)",
    )
    for row in rows:
        table.add_row(
            row["plan_id"], row["phase"], row["reason"], row["planned_because"], row["policy"],
            str(row["base_epoch"]), f"{row['waves_committed']}/{row['waves']}", str(row["moves"]),
            str(row["nbytes"]), moment(row["created_at"]),
        )  # fmt: skip
    return table


def plan_view(row: Mapping[str, Any]) -> RenderableType:
    """One plan with its figures."""
    figures = _table("FIGURE", "VALUE")
    for name, value in row["numbers"].items():
        figures.add_row(name, "-" if value is None else f"{value:.6g}")
    parts: list[RenderableType] = [plans_table([row])]
    if row["error"]:
        parts.append(Text(row["error"], style="red"))
    return Group(*parts, Text(), figures) if row["numbers"] else Group(*parts)


def story_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What happened to a plan, in order."""
    table = _table("AT (UTC)", "EVENT", "DETAIL")
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("at", "event")}
        table.add_row(moment(row.get("at")), str(row.get("event", "")), _pairs(rest))
    return table


def decisions_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What each cycle decided."""
    table = _table("AT (UTC)", "REASON", "PLAN", "NUMBERS")
    for row in rows:
        table.add_row(
            moment(row["at"]),
            row["reason"],
            row.get("plan_id") or "-",
            _pairs(row.get("numbers") or {}),
        )
    return table


def document_table(document: Mapping[str, Any]) -> RenderableType:
    """A flat document, one field a line."""
    table = _table("FIELD", "VALUE")
    for key, value in sorted(document.items()):
        table.add_row(key, json.dumps(value))
    return table


def _pairs(values: Mapping[str, Any]) -> str:
    shown = [
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    ]
    return "  ".join(shown)
