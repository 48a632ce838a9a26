"""Sentences about a plan after a change: what happened, and what to do next."""

from collections.abc import Mapping
from typing import Any

from evenkeel_moe.model.quantities import counted


def approved(plan: Mapping[str, Any]) -> str:
    """Return what follows from an approval."""
    if plan["ended"]:
        return _ended(plan)
    return f"plan {plan['plan_id']} approved; it moves {_moved(plan)}. {_follow(plan)}"


def cancelled(plan: Mapping[str, Any]) -> str:
    """Return what follows from a cancellation."""
    name, done = plan["plan_id"], plan["waves_committed"]
    if not plan["ended"]:
        return (
            f"plan {name} is being cancelled: a wave that has all its votes still commits, and no"
            f" later one starts. {_follow(plan)}"
        )
    if plan["phase"] != "cancelled":
        return _ended(plan)
    if done == 0:
        return f"plan {name} cancelled; it has moved nothing."
    return (
        f"plan {name} cancelled after {done} of {counted(plan['waves'], 'wave')}, which stay."
        f" Return to the placement before it: evenkeel plan rollback {plan['deployment']}"
    )


def rolled_back(plan: Mapping[str, Any]) -> str:
    """Return what follows from a request for a rollback."""
    if plan["ended"]:
        return _ended(plan)
    epoch = plan["numbers"].get("to_epoch")
    to = "an earlier placement" if epoch is None else f"the placement of epoch {epoch:.0f}"
    return (
        f"plan {plan['plan_id']} returns to {to}; it moves {_moved(plan)}. {_follow(plan)}\n"
        f"Automatic plans are held until: evenkeel resume {plan['deployment']}"
    )


def created(plan: Mapping[str, Any]) -> str:
    """Return what to do after a plan was made."""
    if plan["phase"] == "proposed":
        start = f"evenkeel plan approve {plan['deployment']} {plan['plan_id']}"
        return f"Nothing has moved. Start it: {start}"
    return _ended(plan) if plan["ended"] else _follow(plan)


def _moved(plan: Mapping[str, Any]) -> str:
    waves = counted(plan["waves"], "wave")
    return f"{counted(plan['moves'], 'expert')} in {waves}"


def _follow(plan: Mapping[str, Any]) -> str:
    return f"Follow it: evenkeel plan show {plan['deployment']} {plan['plan_id']} --watch"


def _ended(plan: Mapping[str, Any]) -> str:
    error = plan["error"]
    because = "" if error in (None, plan["reason"]) else f" {error}"
    return f"plan {plan['plan_id']} is {plan['phase_text']}: {plan['text']}{because}"
