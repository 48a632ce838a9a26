"""What a recorded request for a change asked for, in words."""

import json
from collections.abc import Mapping
from typing import Any

from evenkeel_moe.api.words.stored import words_or_row
from evenkeel_moe.model.documents import leaves, setting
from evenkeel_moe.model.quantities import duration_text

_PLAIN = {
    "POST /resume": "Resume",
    "DELETE /quarantine": "Reset the counts of reports that were not used",
    "DELETE ": "Forget the deployment",
}


def request_text(row: Mapping[str, Any]) -> str:
    """Return what a request about a deployment asked for; one without words here as it was sent.

    Args:
        row: of the audit record.
    """
    path = str(row["path"]).removeprefix(f"/v1/deployments/{row['deployment']}")
    sent, change = f"{row['method']} {path}", row.get("change")
    as_sent = sent + (f" {change}" if change else "")
    return words_or_row(as_sent, _words, sent, change or "{}", as_sent)


def _words(sent: str, change: str, as_sent: str) -> str:
    asked = json.loads(change)
    match sent.split("/"):
        case ["POST ", "freeze"]:
            return _pause(asked)
        case ["PATCH ", "policy"]:
            return _with("Change the policy", asked)
        case ["POST ", "resize"]:
            return _with("Take ranks out of the group", asked)
        case ["POST ", "plans"]:
            return _plan(asked)
        case ["POST ", "plans", plan, "approve"]:
            return f"Approve plan {plan}"
        case ["POST ", "plans", plan, "cancel"]:
            return f"Reject or cancel plan {plan}"
        case ["POST ", "rollback"]:
            return _rollback(asked)
    return _PLAIN.get(sent, as_sent)


def _with(what: str, asked: Mapping[str, Any]) -> str:
    """Return what was done, with the fields that the request named."""
    named = ", ".join(f"{name}={setting(value)}" for name, value in leaves(asked).items())
    return what + (f": {named}" if named else "")


def _pause(asked: Mapping[str, Any]) -> str:
    seconds = asked.get("seconds")
    if seconds is None:
        return "Pause"
    return f"Pause for {duration_text(seconds)}" if seconds else "End of the pause"


def _plan(asked: Mapping[str, Any]) -> str:
    """Return which plan was asked for, with everything that the request named."""
    known = ("plan_id", "dry_run", "approve")
    rest = {key: value for key, value in asked.items() if key not in known}
    what = "A plan"
    if asked.get("approve"):
        what = "A plan that starts at once"
    elif asked.get("dry_run"):
        what = "Dry run of a plan"
    name = f" with the id {asked['plan_id']}" if "plan_id" in asked else ""
    return _with(f"{what}{name}", rest)


def _rollback(asked: Mapping[str, Any]) -> str:
    epoch, placement = asked.get("to_epoch"), asked.get("to_placement")
    name = f" as plan {asked['plan_id']}" if "plan_id" in asked else ""
    if placement is not None:
        return f"Roll back to placement {placement:.12}{name}"
    return f"Roll back {'the last plan' if epoch is None else f'to epoch {epoch}'}{name}"
