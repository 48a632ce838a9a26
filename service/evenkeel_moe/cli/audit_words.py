"""Says in words what a recorded request asked for. Pure functions from JSON to texts."""

import json
from collections.abc import Mapping
from typing import Any

from evenkeel_moe.cli.tables import leaves, setting
from evenkeel_moe.model.quantities import duration_text

_PLAIN = {
    "POST /resume": "resume automatic plans",
    "DELETE /quarantine": "reset the counts of rejected reports",
    "DELETE ": "remove the deployment",
}


def request_words(row: Mapping[str, Any]) -> str:
    """Return what a request about a deployment asked for; one without words here as it was sent.

    Args:
        row: of the audit record.
    """
    path = str(row["path"]).removeprefix(f"/v1/deployments/{row['deployment']}")
    sent, change = f"{row['method']} {path}", row.get("change")
    asked = _fields(change)
    if asked is None:
        return f"{sent} {change}"
    match sent.split("/"):
        case ["POST ", "freeze"]:
            return _freeze(asked)
        case ["PATCH ", "policy"]:
            changed = (f"{name}={setting(value)}" for name, value in leaves(asked).items())
            return f"policy {', '.join(changed)}"
        case ["POST ", "plans"]:
            return _plan(asked)
        case ["POST ", "plans", plan, "approve" | "cancel" as verb]:
            return f"{verb} plan {plan}"
        case ["POST ", "rollback"]:
            return _rollback(asked)
    return _PLAIN.get(sent, sent + (f" {change}" if change else ""))


def _fields(change: str | None) -> dict[str, Any] | None:
    """Return the fields that a request named; None if the record cut its text off."""
    try:
        found = json.loads(change or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _freeze(asked: Mapping[str, Any]) -> str:
    seconds = asked.get("seconds")
    if seconds is None:
        return "freeze"
    return f"freeze for {duration_text(seconds)}" if seconds else "end the freeze"


def _plan(asked: Mapping[str, Any]) -> str:
    """Return which plan was asked for, with everything that the request named."""
    name = f" {asked['plan_id']}" if "plan_id" in asked else ""
    rest = {key: value for key, value in asked.items() if key not in ("plan_id", "dry_run")}
    start = "a dry run" if asked.get("dry_run") else ""
    start = "start at once" if rest.pop("approve", False) else start
    named = (f"{key}={setting(value)}" for key, value in leaves(rest).items())
    return ", ".join(part for part in (f"create plan{name}", start, *named) if part)


def _rollback(asked: Mapping[str, Any]) -> str:
    name = f" as plan {asked['plan_id']}" if "plan_id" in asked else ""
    epoch, placement = asked.get("to_epoch"), asked.get("to_placement")
    target = "the last plan" if epoch is None else f"to epoch {epoch}"
    return f"roll back {target if placement is None else f'to placement {placement:.12}'}{name}"
