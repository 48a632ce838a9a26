"""Renders deployments, policies and decisions as tables: pure functions of JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli.console import Cell, Listing, TableColumn, explained, facts, legend
from evenkeel_moe.cli.units import dated, moment
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
BALANCEDNESS_WORDS = (
    "balance: balancedness, the mean / largest load of a rank; 1.000 is a perfect split"
)


_DISCONNECTED = "disconnected"
_DISCONNECTED_WORDS = (
    f"{_DISCONNECTED}: the rank has lost its connection to the controller and tries to come back;"
    " it counts as lost when its lease ends"
)


def number(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, or `-` if it is unknown."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def known(value: object) -> str:
    """Return a value as text, or `-` if it is unknown."""
    return "-" if value is None else str(value)


def yes_or_no(value: bool) -> str:
    """Return a truth in a word."""
    return "yes" if value else "no"


def with_reason(phase: str, reason: str) -> str:
    """Return a phase or state with its reason in brackets, unless the reason repeats it."""
    return phase if phase in reason.split("_") else f"{phase} ({reason})"


def deployments_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each deployment."""
    columns = (
        TableColumn("DEPLOYMENT", "deployment"),
        TableColumn("HEALTH", lambda row: row["health"]["level"], wide=True),
        TableColumn("STATE", "state"),
        TableColumn("REASON", lambda row: "-" if _at_rest(row) else row["reason"], wide=True),
        TableColumn("MODE", _mode, fold=True),
        TableColumn("POLICY", "policy", wide=True),
        TableColumn("EPOCH", "epoch", right=True),
        TableColumn("BALANCE", "balancedness_mean", number, right=True),
        TableColumn("WORST", "balancedness_worst", number, right=True, wide=True),
        TableColumn("RANKS", _ranks, right=True),
        TableColumn("PLAN", lambda row: _plans(row)[0]),
        TableColumn("PLAN ID", lambda row: _plans(row)[1], wide=True),
    )
    if not rows:
        return Text("no deployment yet", style="dim")
    lines = [
        f"{row['deployment']} is {row['health']['level']}: {row['health']['text']}"
        for row in rows
        if row["health"]["level"] != "good"
    ]
    lines += explained(row for row in rows if not _at_rest(row))
    return Group(Listing(columns, rows), legend(BALANCEDNESS_WORDS, *lines))


def _mode(row: Mapping[str, Any]) -> str:
    """Return the mode, with what keeps plans from starting in it."""
    paused = ["paused"] if row["frozen_until_unix"] is not None else []
    held = ["held"] if row["held"] else []
    resized = ["resizing"] if row["resize"] else []
    return ", ".join([known(row["mode"]), *paused, *held, *resized])


def _plans(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the phase and the id of the plan that runs, else of those that wait for approval."""
    if row["active_plan"] is not None:
        return row["active_plan"]["phase"], row["active_plan"]["plan_id"]
    waiting = [plan["plan_id"] for plan in row["proposals"] or []]
    return (f"{len(waiting)} proposed", ", ".join(waiting)) if waiting else ("-", "-")


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
    shown = {
        "deployment": row["deployment"],
        "health": f"{health['level']}: {health['text']}",
        "state": _state(row),
        "mode, policy": f"{row['mode']}, {row['policy']}",
        "held": _held(row),
        "resize": "no" if row["resize"] is None else row["resize"]["words"],
        "dispatch": row["dispatch"],
        "paused until": _paused(row["frozen_until_unix"], now),
        "leader": f"{row['leader']}, term {row['term']}",
        "epoch": f"{known(row['epoch'])} of generation {row['generation']}",
        "shape": _shape_line(row["shape"]),
        "window": f"{row['window_steps']} steps, newest {known(row['step'])}",
        "balancedness": f"{mean} mean, {worst} worst layer (1.000 is a perfect split)",
        "failures": "; ".join(one["words"] for one in row.get("coverage") or []) or "-",
        "cost model": _cost_line(row),
        "last decision": "-",
        "plan": "none" if plan is None else _plan_line(row, plan),
        "waiting": "\n".join(_proposal_line(one, now) for one in row["proposals"] or []) or "none",
    }
    if decision is not None:
        at = decision.get("at")
        when = f"{moment(at)} UTC, {age(at, now)}"
        shown["last decision"] = f"{decision['reason']} at {when}: {decision['reason_text']}"
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
    return Group(facts(shown.items()), Text(), _ranks_table(row["ranks"], now), *troubles, words)


def _held(row: Mapping[str, Any]) -> str:
    if not row["held"]:
        return "no"
    return f"{row['held_text']} End it: evenkeel resume -d {row['deployment']}"


def _state(row: Mapping[str, Any]) -> str:
    if _at_rest(row):
        return str(row["state"])
    return f"{with_reason(row['state'], row['reason'])}: {row['reason_text']}"


def _at_rest(row: Mapping[str, Any]) -> bool:
    """Return True if the reason of the state says only that all ranks were heard."""
    return bool(row["state"] == "ready" and row["reason"] == Reason.RECOVERED)


def _paused(until: float | None, now: float) -> str:
    return "-" if until is None else f"{moment(until)} UTC, {age(until, now)}"


def _cost_line(row: Mapping[str, Any]) -> str:
    """Return the cost model in words, with the time balance where it is known."""
    model, balance = row.get("cost_model"), row.get("time_balance")
    if model is None:
        return "-"
    worst = number(row["time_balance_worst"])
    shown = "" if balance is None else f"; time balance {number(balance)}, {worst} worst layer"
    return f"{model['words']}{shown}"


def _ranks_table(ranks: Sequence[Mapping[str, Any]], now: float) -> Listing:
    columns = (
        TableColumn("RANK", "rank", right=True),
        TableColumn("NODE", "node"),
        TableColumn("ALIVE", _alive),
        TableColumn("SEEN", lambda rank: age(rank["last_seen_unix"], now), right=True, wide=True),
        TableColumn("EPOCH", "epoch", right=True),
        TableColumn("WAVE", "state", wide=True),
        TableColumn("LOAD SHARE", "load_share", share, right=True),
        TableColumn("TIME/TOKEN", "seconds_per_token", duration_text, right=True),
        TableColumn("FREE MEMORY", "free_bytes", bytes_text, right=True),
        TableColumn("STAGING", "staging_bytes", bytes_text, right=True, wide=True),
    )
    return Listing(columns, ranks)


def _alive(rank: Mapping[str, Any]) -> Cell:
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
    """Return a table with one row for each decision; rows of one day show only the time."""
    rows, words = dated(rows)
    shown = [{**row, "figures": dict(row.get("numbers") or {})} for row in rows]
    columns = (
        TableColumn("AT (UTC)", "at"),
        TableColumn("DECISION", "reason"),
        TableColumn("BALANCE", lambda row: _balance(row["figures"]), right=True, optional=True),
        TableColumn("GAIN", lambda row: share(row["figures"].get("gain")), optional=True),
        TableColumn("GAIN INTERVAL", lambda row: interval(row["figures"]), wide=True),
        TableColumn("COPIES", lambda row: _copies(row["figures"]), optional=True),
        TableColumn("PLAN", lambda row: row.get("plan_id"), optional=True),
        TableColumn("COMPARED", _compared, optional=True, fold=True),
    )
    if any(_balance(row["figures"]) != "-" for row in shown):
        words += [BALANCEDNESS_WORDS, "or of time; now -> with the plan"]
    if any("gain" in row["figures"] for row in shown):
        words.append("gain: saved share of MoE time on later steps")
    words += ["-o wide shows all columns, -o json every figure", *explained(rows)]
    return Group(Listing(columns, shown), legend(*words))


def no_decision(row: Mapping[str, Any], policy: Mapping[str, Any]) -> RenderableType:
    """Return a sentence for a deployment without decisions: when the first one comes."""
    if row["state"] == "ready":
        comes = f"is due within {duration_text(policy['cycle_s'])}"
    else:
        comes = f"comes when its state is ready; now it is {_state(row)}"
    return Text(f"{row['deployment']}: no cycle has run yet; the first {comes}")


def _compared(row: Mapping[str, Any]) -> str:
    """Return the detail, else the figures that the gate compared without those of other columns."""
    figures, chosen = row["figures"], _COMPARED.get(row["reason"])
    if chosen is None and "planned_on_steps" in figures:
        chosen = ()
    told = [
        f"{figure_name(name)} {figure(name, value)}"
        for name, value in figures.items()
        if (name not in _IN_COLUMNS if chosen is None else name in chosen)
    ]
    return row.get("detail") or ", ".join(told)


def _balance(figures: Mapping[str, float]) -> str:
    now = next((number(figures[name]) for name in _BALANCE if name in figures), "-")
    expected = figures.get("balancedness_expected")
    return now if expected is None else f"{now} -> {number(expected)}"


def interval(figures: Mapping[str, Any]) -> str:
    """Return the 94 % interval of a predicted gain, or `-` if it is unknown."""
    if figures.get("gain_lower") is None:
        return "-"
    return f"{share(figures['gain_lower'])} to {share(figures['gain_upper'])}"


def _copies(figures: Mapping[str, float]) -> str:
    if "copies" not in figures:
        return "-"
    return f"{figures['copies']:,.0f}, {bytes_text(figures.get('bytes'))}"


def document_table(document: Mapping[str, Any]) -> RenderableType:
    """Return a table with one row for each field of a document, and of the objects in it."""
    rows = [(name, json.dumps(value)) for name, value in leaves(document).items()]
    return Listing((TableColumn("FIELD", 0), TableColumn("VALUE", 1, fold=True)), rows)


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
