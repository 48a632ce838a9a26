"""Statements of what a plan will do, for the question before weights move. Pure functions of JSON.

What the controller does not tell is said to be not known.
"""

from collections.abc import Mapping
from typing import Any

from evenkeel_moe.model.quantities import bytes_text, counted, duration_text


def start(plan: Mapping[str, Any]) -> str:
    """Return what follows if a plan starts."""
    base, waves = plan["base_epoch"], plan["waves"]
    return (
        f"Ranks of {plan['deployment']} copy {_effort(plan)}. Plan {plan['plan_id']}, whose target"
        f" has digest {plan['target']['digest']:.12}, takes the placement from epoch {base} to"
        f" epoch {base + waves}; {_stall(plan['numbers'].get('expected_stall_s'))}."
    )


def rollback(preview: Mapping[str, Any], name: str) -> str:
    """Return what follows if a deployment returns to the placement of an earlier epoch.

    Args:
        preview: of the rollback.
        name: of the deployment.
    """
    to_epoch, last = preview["to_epoch"], preview["undoes"]
    undone = "" if last is None else f" This undoes plan {last['plan_id']} ({_effort(last)})."
    return _return(preview, name, f"the placement of epoch {to_epoch}", undone)


def rollback_to_placement(preview: Mapping[str, Any], name: str, digest: str) -> str:
    """Return what follows if a deployment returns to a recorded placement."""
    return _return(preview, name, f"placement {digest:.12} of epoch {preview['to_epoch']}", "")


def _return(preview: Mapping[str, Any], name: str, to: str, undone: str) -> str:
    return (
        f"Ranks of {name} copy {_effort(preview)}, to return from epoch {preview['base_epoch']} to"
        f" {to}; {_stall(preview['expected_stall_s'])}.{undone}"
        f" Automatic plans wait for `evenkeel resume {name}`."
    )


def _effort(plan: Mapping[str, Any]) -> str:
    experts, waves = counted(plan["moves"], "expert"), counted(plan["waves"], "wave")
    return f"{experts}, {bytes_text(plan['nbytes'])}, in {waves}"


def _stall(seconds: float | None) -> str:
    if seconds is None:
        return "the expected stall is not known"
    return f"expected stall {duration_text(seconds)} of one step for each wave"
