"""Renders answers of the controller as tables. Pure functions from JSON to renderables."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_HELD = {
    "held_after_rollback": "held after a rollback",
    "gains_not_delivered": "held because plans did not deliver their gain",
}
"""Reason of a hold -> words."""


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text, or `-` if it is unknown."""
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """Return a share in percent, or `-` if it is unknown."""
    return "-" if value is None else f"{value:.1%}"


def moment(unix: float | None) -> str:
    """Return Unix seconds as UTC text, or `-` if they are unknown."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def known(value: object) -> str:
    """Return a value as text, or `-` if it is unknown."""
    return "-" if value is None else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def deployments_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each deployment."""
    columns = "DEPLOYMENT STATE REASON MODE POLICY EPOCH BALANCEDNESS WORST RANKS PLAN"
    table = _table(*columns.split())
    for row in rows:
        plan = row["active_plan"]
        table.add_row(
            *(row[name] for name in ("deployment", "state", "reason")),
            *(known(row[name]) for name in ("mode", "policy", "epoch")),
            number(row["balancedness_mean"]),
            number(row["balancedness_worst"]),
            _ranks(row),
            "-" if plan is None else f"{plan['plan_id']} {plan['phase']}",
        )
    return table


def _ranks(row: Mapping[str, Any]) -> str:
    if row["ranks"] is None:
        return "-"
    fresh = sum(rank["fresh"] for rank in row["ranks"])
    return f"{fresh}/{row['shape']['num_ranks']}"


def deployment_view(row: Mapping[str, Any]) -> RenderableType:
    """Return a view of one deployment and its ranks."""
    decision, plan = row["last_decision"], row["active_plan"]
    mean, worst = number(row["balancedness_mean"]), number(row["balancedness_worst"])
    held = f", {_HELD.get(row['held_because'], 'held')}" if row["held"] else ""
    facts = {
        "deployment": row["deployment"],
        "state": f"{row['state']} ({row['reason']})",
        "mode, policy": f"{row['mode']}, {row['policy']}{held}",
        "dispatch": row["dispatch"],
        "frozen until": moment(row["frozen_until_unix"]),
        "leader": f"{row['leader']}, term {row['term']}",
        "epoch": f"{known(row['epoch'])} of generation {row['generation']}",
        "shape": _shape_line(row["shape"]),
        "window": f"{row['window_steps']} steps, newest {known(row['step'])}",
        "balancedness": f"{mean} mean, {worst} worst layer",
        "cost model": _cost_line(row),
        "last decision": "-",
        "plan": "none" if plan is None else _plan_line(row, plan),
    }
    if decision is not None:
        facts["last decision"] = f"{decision['reason']} at {moment(decision.get('at'))}"
    table = _table("", "")
    table.show_header = False
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(value))
    troubles = [
        Text(f"rank {rank['rank']} does not take part in waves: {rank['trouble']}", style="red")
        for rank in row["ranks"]
        if rank.get("trouble")
    ]
    if row["dispatch_warning"]:
        troubles.append(Text(row["dispatch_warning"], style="yellow"))
    return Group(table, Text(), _ranks_table(row["ranks"]), *troubles)


def _cost_line(row: Mapping[str, Any]) -> str:
    """Return the cost model in words, with the time balance where it is known."""
    model, balance = row.get("cost_model"), row.get("time_balance")
    if model is None:
        return "-"
    worst = number(row["time_balance_worst"])
    shown = "" if balance is None else f"; time balance {number(balance)}, {worst} worst layer"
    return f"{model['words']}{shown}"


def _ranks_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    columns = "RANK,NODE,FRESH,EPOCH,WAVE,LOAD SHARE,S/TOKEN,FREE BYTES,STAGING BYTES"
    table = _table(*columns.split(","))
    for rank in ranks:
        pace = rank["seconds_per_token"]
        table.add_row(
            str(rank["rank"]),
            rank["node"],
            "yes" if rank["fresh"] else "stopped" if rank["stopped"] else "NO",
            str(rank["epoch"]),
            rank["state"],
            number(rank["load_share"], 4),
            "-" if pace is None else f"{pace:.3g}",
            str(rank["free_bytes"]),
            str(rank["staging_bytes"]),
        )
    return table


def _shape_line(shape: Mapping[str, Any]) -> str:
    return (
        f"{shape['num_layers']} layers x {shape['num_logical_experts']} experts,"
        f" top {shape['top_k']}, {shape['num_ranks']} ranks x {shape['slots_per_rank']} slots"
    )


def _plan_line(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    return (
        f"{plan['plan_id']} {plan['phase']} ({plan['reason']}),"
        f" wave {plan['waves_committed']}/{plan['waves']},"
        f" {row['staging_bytes_done']}/{row['staging_bytes_total']} bytes staged"
    )


def plans_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each plan."""
    columns = "PLAN,PHASE,REASON,BECAUSE,POLICY,BASE,WAVES,MOVES,BYTES,PROMISED,DELIVERED"
    table = _table(*columns.split(","), "CREATED (UTC)")
    for row in rows:
        delivered = row["delivered"]
        table.add_row(
            *(row[name] for name in ("plan_id", "phase", "reason", "planned_because", "policy")),
            str(row["base_epoch"]),
            f"{row['waves_committed']}/{row['waves']}",
            str(row["moves"]),
            str(row["nbytes"]),
            share(row["numbers"].get("gain")),
            "-" if delivered is None else share(delivered["gain"]),
            moment(row["created_at"]),
        )
    return table


def plan_view(row: Mapping[str, Any]) -> RenderableType:
    """Return a view of one plan and its numbers."""
    numbers = _table("NUMBER", "VALUE")
    for name, value in row["numbers"].items():
        numbers.add_row(name, "-" if value is None else f"{value:.6g}")
    parts: list[RenderableType] = [plans_table([row])]
    if row["error"]:
        parts.append(Text(row["error"], style="red"))
    if row["delivered"] is not None:
        parts.append(Text(_delivered_line(row["delivered"])))
    return Group(*parts, Text(), numbers) if row["numbers"] else Group(*parts)


def _delivered_line(row: Mapping[str, Any]) -> str:
    """Return promise and delivery of a plan in words."""
    if row["gain"] is None:
        return f"what it delivered is unknown: {row['unknown_because']}"
    promised = f"promised {share(row['promised'])} of MoE time, " if row["promised"] else ""
    return (
        f"{promised}delivered {share(row['gain'])} ({share(row['lower'])} to"
        f" {share(row['upper'])}) on {row['steps']} steps"
    )


def story_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of the events of a plan, in order."""
    table = _table("AT (UTC)", "EVENT", "DETAIL")
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("at", "event")}
        table.add_row(moment(row.get("at")), str(row.get("event", "")), _pairs(rest))
    return table


def decisions_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each decision of a cycle."""
    table = _table("AT (UTC)", "REASON", "PLAN", "NUMBERS")
    for row in rows:
        numbers = _pairs(row.get("numbers") or {})
        table.add_row(moment(row["at"]), row["reason"], row.get("plan_id") or "-", numbers)
    return table


def document_table(document: Mapping[str, Any]) -> RenderableType:
    """Return a table with one row for each field of a document."""
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
