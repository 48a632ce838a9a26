"""Renders deployments, policies and decisions as tables: pure functions of JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenkeel_moe.cli.fitted_table import FittedCell, FittedColumn, FittedTable, with_values
from evenkeel_moe.cli.units import moment, moments
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.documents import leaves, setting
from evenkeel_moe.model.finding import Severity
from evenkeel_moe.model.quantities import (
    age,
    bytes_text,
    counted,
    duration_text,
    figure,
    figure_name,
    share,
)

_BALANCE = ("time_balance", "balancedness_mean")
"""Figures of a decision that say how balanced the fleet was; the first one that is known counts."""
_IN_COLUMNS = {*_BALANCE, "gain", "gain_lower", "gain_upper", "copies", "bytes"}
_COMPARED: Mapping[str, tuple[str, ...]] = {
    "gain_too_small": ("min_gain",),
    "gain_uncertain": (),
    "payback_too_long": ("payback_steps", "max_payback_steps"),
    "limit_exceeded": ("layers", "max_copies", "max_bytes", "max_layers"),
}
"""Figures that a gate after planning compared. Of the many figures of a plan these tell why."""
BALANCEDNESS_WORDS = "balancedness: mean / largest load of a rank; 1.000 is a perfect split"


_DISCONNECTED = "disconnected"
_DISCONNECTED_WORDS = (
    f"{_DISCONNECTED}: the rank has lost its connection to the controller and tries to come back;"
    " it counts as lost when its lease ends"
)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text, or `-` if it is unknown."""
    return "-" if value is None else f"{value:.{digits}f}"


def known(value: object) -> str:
    """Return a value as text, or `-` if it is unknown."""
    return "-" if value is None else str(value)


def with_reason(phase: str, reason: str) -> str:
    """Return a phase or state with its reason in brackets, unless the reason repeats it."""
    return phase if phase in reason.split("_") else f"{phase} ({reason})"


def explained(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line for each reason of some rows, in order and without repeats."""
    return list(dict.fromkeys(f"{row['reason']}: {row['reason_text']}" for row in rows))


def legend(*lines: str) -> RenderableType:
    """Return lines that explain the words of the table above them."""
    return Text("\n".join(("", *lines)), style="dim")


def deployments_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each deployment."""
    columns = (
        FittedColumn("DEPLOYMENT"),
        FittedColumn("STATE"),
        FittedColumn("STATE REASON", keep=4, under="DEPLOYMENT", label="state reason: "),
        FittedColumn("MODE"),
        FittedColumn("POLICY", keep=7),
        FittedColumn("EPOCH", right=True, keep=3, under="DEPLOYMENT", label="epoch "),
        FittedColumn("BALANCEDNESS", right=True, keep=2, under="DEPLOYMENT", label="balancedness "),
        FittedColumn("WORST", right=True, keep=6),
        FittedColumn("RANKS", right=True, keep=1, under="DEPLOYMENT", label="ranks "),
        FittedColumn("PLAN", keep=5, under="DEPLOYMENT", label="plan: "),
    )
    cells = [
        (
            *(row[name] for name in ("deployment", "state")),
            "-" if _at_rest(row) else row["reason"],
            _mode(row),
            *(known(row[name]) for name in ("policy", "epoch")),
            number(row["balancedness_mean"]),
            number(row["balancedness_worst"]),
            _ranks(row),
            _plans(row),
        )
        for row in rows
    ]
    lines = explained(row for row in rows if not _at_rest(row))
    notes = (
        [legend(BALANCEDNESS_WORDS, *lines)] if rows else [Text("no deployment yet", style="dim")]
    )
    return Group(FittedTable(columns, cells), *notes)


def _mode(row: Mapping[str, Any]) -> str:
    """Return the mode, with what keeps plans from starting in it."""
    frozen = ["frozen"] if row["frozen_until_unix"] is not None else []
    held = ["held"] if row["held"] else []
    return ", ".join([known(row["mode"]), *frozen, *held])


def _plans(row: Mapping[str, Any]) -> str:
    """Return the plan that runs, else the plans that wait for approval."""
    if row["active_plan"] is not None:
        return f"{row['active_plan']['plan_id']} {row['active_plan']['phase']}"
    waiting = row["proposals"] or []
    if len(waiting) > 1:
        return f"{len(waiting)} proposed"
    return f"{waiting[0]['plan_id']} proposed" if waiting else "-"


def _ranks(row: Mapping[str, Any]) -> str:
    if row["ranks"] is None:
        return "-"
    fresh = sum(rank["fresh"] for rank in row["ranks"])
    return f"{fresh}/{row['shape']['num_ranks']}"


def deployment_view(row: Mapping[str, Any], now: float) -> RenderableType:
    """Return a view of one deployment and its ranks; `now` is in Unix seconds."""
    decision, plan = row["last_decision"], row["active_plan"]
    mean, worst = number(row["balancedness_mean"]), number(row["balancedness_worst"])
    health = row["health"]
    facts = {
        "deployment": row["deployment"],
        "health": f"{health['level']}: {health['text']}",
        "state": _state(row),
        "mode, policy": f"{row['mode']}, {row['policy']}",
        "held": _held(row),
        "dispatch": row["dispatch"],
        "frozen until": _frozen(row["frozen_until_unix"], now),
        "leader": f"{row['leader']}, term {row['term']}",
        "epoch": f"{known(row['epoch'])} of generation {row['generation']}",
        "shape": _shape_line(row["shape"]),
        "window": f"{row['window_steps']} steps, newest {known(row['step'])}",
        "balancedness": f"{mean} mean, {worst} worst layer (1.000 is a perfect split)",
        "cost model": _cost_line(row),
        "last decision": "-",
        "plan": "none" if plan is None else _plan_line(row, plan),
        "waiting": "\n".join(_proposal_line(one, now) for one in row["proposals"] or []) or "none",
    }
    if decision is not None:
        at = decision.get("at")
        when = f"{moment(at)} UTC, {age(at, now)}"
        facts["last decision"] = f"{decision['reason']} at {when}: {decision['reason_text']}"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(str(value)))
    troubles = [
        Text(f"rank {rank['rank']} does not take part in waves: {rank['trouble']}", style="red")
        for rank in row["ranks"]
        if rank.get("trouble")
    ]
    if row["dispatch_warning"]:
        troubles.append(Text(row["dispatch_warning"], style="yellow"))
    for finding in row.get("findings") or []:
        grave = finding["severity"] == Severity.DOUBT
        line = f"{'Doubt' if grave else 'Note'}: {finding['words']}"
        troubles.append(Text(line, style="red" if grave else ""))
    words = legend(
        "epoch: version of the placement; each wave of a plan raises it by 1",
        "generation: one life of the EP group; it changes when the engine restarts",
        *([_DISCONNECTED_WORDS] if any(map(_is_disconnected, row["ranks"])) else []),
    )
    return Group(table, Text(), _ranks_table(row["ranks"], now), *troubles, words)


def _held(row: Mapping[str, Any]) -> str:
    if not row["held"]:
        return "no"
    return f"{row['held_text']} End it: evenkeel resume {row['deployment']}"


def _state(row: Mapping[str, Any]) -> str:
    if _at_rest(row):
        return str(row["state"])
    return f"{with_reason(row['state'], row['reason'])}: {row['reason_text']}"


def _at_rest(row: Mapping[str, Any]) -> bool:
    """Return True if the reason of the state says only that all ranks were heard."""
    return bool(row["state"] == "ready" and row["reason"] == Reason.RECOVERED)


def _frozen(until: float | None, now: float) -> str:
    return "-" if until is None else f"{moment(until)} UTC, {age(until, now)}"


def _cost_line(row: Mapping[str, Any]) -> str:
    """Return the cost model in words, with the time balance where it is known."""
    model, balance = row.get("cost_model"), row.get("time_balance")
    if model is None:
        return "-"
    worst = number(row["time_balance_worst"])
    shown = "" if balance is None else f"; time balance {number(balance)}, {worst} worst layer"
    return f"{model['words']}{shown}"


def _ranks_table(ranks: Sequence[Mapping[str, Any]], now: float) -> FittedTable:
    columns = (
        FittedColumn("RANK", right=True),
        FittedColumn("NODE", keep=3),
        FittedColumn("ALIVE"),
        FittedColumn("SEEN", right=True, keep=4),
        FittedColumn("EPOCH", right=True, keep=1),
        FittedColumn("WAVE", keep=5),
        FittedColumn("LOAD SHARE", right=True),
        FittedColumn("TIME/TOKEN", right=True, keep=2),
        FittedColumn("FREE MEMORY", right=True, keep=1),
        FittedColumn("STAGING", right=True, keep=6),
    )
    cells = [
        (
            str(rank["rank"]),
            str(rank["node"]),
            _alive(rank),
            age(rank["last_seen_unix"], now),
            known(rank["epoch"]),
            str(rank["state"]),
            share(rank["load_share"]),
            duration_text(rank["seconds_per_token"]),
            bytes_text(rank["free_bytes"]),
            bytes_text(rank["staging_bytes"]),
        )
        for rank in ranks
    ]
    return FittedTable(columns, cells)


def _alive(rank: Mapping[str, Any]) -> FittedCell:
    if rank["fresh"]:
        # Without a stream it may be dead; its lease has only not ended yet.
        return "yes" if not _is_disconnected(rank) else Text(_DISCONNECTED, style="yellow")
    return "stopped" if rank["stopped"] else Text("NO", style="red")


def _is_disconnected(rank: Mapping[str, Any]) -> bool:
    return bool(rank["fresh"]) and rank["epoch"] is None


def _shape_line(shape: Mapping[str, Any]) -> str:
    return (
        f"{shape['num_layers']} layers x {shape['num_logical_experts']} experts,"
        f" top {shape['top_k']}, {shape['num_ranks']} ranks x {shape['slots_per_rank']} slots"
    )


def _plan_line(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    done, total = row["staging_bytes_done"], row["staging_bytes_total"]
    return (
        f"{plan['plan_id']} {with_reason(plan['phase'], plan['reason'])},"
        f" wave {plan['waves_committed']}/{plan['waves']},"
        f" {bytes_text(done)} of {bytes_text(total)} staged"
    )


def _proposal_line(plan: Mapping[str, Any], now: float) -> str:
    ends = plan["expires_at"]
    expires = "" if ends is None else f", expires {age(ends, now)}"
    return f"{plan['plan_id']} proposed: {counted(plan['moves'], 'copy', 'copies')}{expires}"


def decisions_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each decision of a cycle.

    Rows of one day show only the time. Columns without a value are left out.
    """
    columns = (
        FittedColumn("AT (UTC)"),
        FittedColumn("DECISION"),
        FittedColumn("BALANCE", right=True, keep=1),
        FittedColumn("GAIN", keep=2),
        FittedColumn("COPIES", keep=4),
        FittedColumn("PLAN", keep=1),
        FittedColumn("COMPARED", keep=3, fold=True, least=24, under="DECISION"),
    )
    times, words = moments([row["at"] for row in rows])
    cells = []
    for at, row in zip(times, rows, strict=True):
        figures = dict(row.get("numbers") or {})
        compared = _compared(str(row["reason"]), figures)
        cells.append(
            (
                at,
                str(row["reason"]),
                _balance(figures),
                _gain(figures),
                _copies(figures),
                str(row.get("plan_id") or "-"),
                row.get("detail")
                or ", ".join(
                    f"{figure_name(name)} {figure(name, value)}" for name, value in compared.items()
                ),
            )
        )
    lines = explained(rows)
    shown, values = with_values(columns, cells)
    heads = {column.head for column in shown}
    if "BALANCE" in heads:
        words += [BALANCEDNESS_WORDS, "balance: balancedness or time balance; now -> with the plan"]
    if "GAIN" in heads:
        words.append("gain: saved share of MoE time on later steps, with its 94 % interval")
    return Group(FittedTable(shown, values), legend(*words, "--json shows every figure", *lines))


def no_decision(row: Mapping[str, Any], policy: Mapping[str, Any]) -> RenderableType:
    """Return a sentence for a deployment without decisions: when the first one comes."""
    if row["state"] == "ready":
        comes = f"is due within {duration_text(policy['cycle_s'])}"
    else:
        comes = f"comes when its state is ready; now it is {_state(row)}"
    return Text(f"{row['deployment']}: no cycle has run yet; the first {comes}")


def _compared(reason: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that the gate compared, without those in columns of their own."""
    chosen = _COMPARED.get(reason)
    if chosen is None and "planned_on_steps" in figures:
        chosen = ()
    return {
        name: value
        for name, value in figures.items()
        if (name not in _IN_COLUMNS if chosen is None else name in chosen)
    }


def _balance(figures: Mapping[str, float]) -> str:
    now = next((number(figures[name]) for name in _BALANCE if name in figures), "-")
    expected = figures.get("balancedness_expected")
    return now if expected is None else f"{now} -> {number(expected)}"


def _gain(figures: Mapping[str, float]) -> str:
    if "gain" not in figures:
        return "-"
    lower, upper = figures.get("gain_lower"), figures.get("gain_upper")
    return f"{share(figures['gain'])} ({share(lower)} to {share(upper)})"


def _copies(figures: Mapping[str, float]) -> str:
    if "copies" not in figures:
        return "-"
    return f"{figures['copies']:,.0f}, {bytes_text(figures.get('bytes'))}"


def document_table(document: Mapping[str, Any]) -> RenderableType:
    """Return a table with one row for each field of a document, and of the objects in it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("FIELD", no_wrap=True)
    table.add_column("VALUE", overflow="fold")
    for name, value in leaves(document).items():
        table.add_row(name, json.dumps(value))
    return table


def changes_view(before: Mapping[str, Any], after: Mapping[str, Any]) -> RenderableType:
    """Return one line for each field that differs between two documents, old -> new."""
    old, new = (
        {name: value for name, value in leaves(document).items() if value != {}}
        for document in (before, after)
    )
    lines = [
        f"{name}: {setting(old.get(name))} -> {setting(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    return Text("\n".join(lines) or "nothing changed")
