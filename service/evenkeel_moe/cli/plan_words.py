"""Sentences about a plan: what it will do, before the question; what happened, and what to do next.

Pure functions of JSON. What the controller does not tell is said to be not known.
"""

from collections.abc import Mapping
from typing import Any

from evenkeel_moe.model.quantities import copies_text, counted, duration_text


def start_question(plan: Mapping[str, Any]) -> str:
    """Return what follows if a plan starts."""
    base, waves = plan["base_epoch"], plan["waves"]
    return (
        f"Ranks of {plan['deployment']} copy {_effort(plan)}. Plan {plan['plan_id']}, whose target"
        f" has digest {plan['target']['digest']:.12}, takes the placement from epoch {base} to"
        f" epoch {base + waves}; {_stall(plan['numbers'].get('expected_stall_s'))}."
    )


def rollback_question(preview: Mapping[str, Any], name: str, digest: str | None) -> str:
    """Return what follows if a deployment returns to an earlier placement.

    Args:
        preview: of the rollback.
        name: of the deployment.
        digest: of the placement, if it was named so; None for that of an epoch.
    """
    to_epoch, last = preview["to_epoch"], None if digest else preview["undoes"]
    to = f"placement {digest:.12} of epoch" if digest else "the placement of epoch"
    undone = "" if last is None else f" This undoes plan {last['plan_id']} ({_effort(last)})."
    return (
        f"Ranks of {name} copy {_effort(preview)}, to return from epoch {preview['base_epoch']} to"
        f" {to} {to_epoch}; {_stall(preview['expected_stall_s'])}.{undone}"
        f" Automatic plans wait for `evenkeel resume -d {name}`."
    )


def approved(plan: Mapping[str, Any]) -> str:
    """Return what follows from an approval."""
    if plan["ended"]:
        return _ended(plan)
    return (
        f"plan {plan['plan_id']} approved; it moves {_moved(plan)}. {_waits(plan)}{_follow(plan)}"
    )


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
        f" Return to the placement before it: evenkeel plan rollback -d {plan['deployment']}"
    )


def rolled_back(plan: Mapping[str, Any]) -> str:
    """Return what follows from a request for a rollback."""
    if plan["ended"]:
        return _ended(plan)
    epoch = plan["numbers"].get("to_epoch")
    to = "an earlier placement" if epoch is None else f"the placement of epoch {epoch:.0f}"
    return (
        f"plan {plan['plan_id']} returns to {to}; it moves {_moved(plan)}."
        f" {_waits(plan)}{_follow(plan)}\n"
        f"Automatic plans are held until: evenkeel resume -d {plan['deployment']}"
    )


def created(plan: Mapping[str, Any], dry_run: bool, refused: str | None) -> str:
    """Return what to do after a plan was made.

    Args:
        plan: that was made.
        dry_run: nothing was kept.
        refused: why its approval would be refused now; None if it would not be, or is not known.
    """
    if dry_run:
        return "Without --dry-run the plan would be kept, and wait for approval."
    if plan["phase"] == "proposed":
        start = f"evenkeel plan approve {plan['plan_id']} -d {plan['deployment']}"
        if refused:
            return (
                f"Nothing has moved. An approval would be refused now: {refused}.\n"
                f"After that, start it: {start}"
            )
        return f"Nothing has moved. Start it: {start}"
    return _ended(plan) if plan["ended"] else f"{_waits(plan)}{_follow(plan)}"


def _effort(plan: Mapping[str, Any]) -> str:
    copies = copies_text(counted(plan["moves"], "expert"), plan["nbytes"])
    return f"{copies}, in {_waves(plan)}"


def _moved(plan: Mapping[str, Any]) -> str:
    return f"{counted(plan['moves'], 'expert')} in {_waves(plan)}"


def _waves(plan: Mapping[str, Any]) -> str:
    return counted(plan["waves"], "wave")


def _stall(seconds: float | None) -> str:
    if seconds is None:
        return "the expected stall is not known"
    return f"expected stall {duration_text(seconds)} of one step for each wave"


def _waits(plan: Mapping[str, Any]) -> str:
    """Return why a plan that was accepted has not begun, with a space behind it; else nothing."""
    return f"{plan['text']} " if plan["phase"] == "approved" else ""


def _follow(plan: Mapping[str, Any]) -> str:
    return f"Follow it: evenkeel plan show {plan['plan_id']} -d {plan['deployment']} --watch"


def _ended(plan: Mapping[str, Any]) -> str:
    error = plan["error"]
    because = "" if error in (None, plan["reason"]) else f" {error}"
    return f"plan {plan['plan_id']} is {plan['phase_text']}: {plan['text']}{because}"
