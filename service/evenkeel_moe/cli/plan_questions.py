"""Statements of what a plan will do, for the question before weights move. Pure functions of JSON.

What the controller does not tell is said to be not known.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evenkeel_moe.cli.plan_figures import counted
from evenkeel_moe.cli.plan_tables import plan_between
from evenkeel_moe.model.quantities import bytes_text, duration_text


def start(plan: Mapping[str, Any]) -> str:
    """Return what follows if a plan starts."""
    base, waves = plan["base_epoch"], plan["waves"]
    return (
        f"Ranks of {plan['deployment']} copy {_effort(plan)}. Plan {plan['plan_id']}, whose target"
        f" has digest {plan['target']['digest']:.12}, takes the placement from epoch {base} to"
        f" epoch {base + waves}; {_stall(plan['numbers'].get('expected_stall_s'))}."
    )


def rollback(status: Mapping[str, Any], plans: Sequence[Mapping[str, Any]], to_epoch: int) -> str:
    """Return what follows if a deployment returns to the placement of an earlier epoch.

    Args:
        status: of the deployment.
        plans: newest first.
        to_epoch: the epoch to return to.
    """
    last = plan_between(plans, to_epoch, status["epoch"])
    undone = "" if last is None else f" This undoes plan {last['plan_id']} ({_effort(last)})."
    return _return(status, f"the placement of epoch {to_epoch}", undone)


def rollback_to_placement(status: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Return what follows if a deployment returns to a recorded placement.

    Args:
        status: of the deployment.
        target: a row of its recorded placements.
    """
    history = "a replaced history" if target["replaced"] else "its history"
    to = f"placement {target['digest']:.12} of epoch {target['epoch']} in {history}"
    return _return(status, to, "")


def _return(status: Mapping[str, Any], to: str, undone: str) -> str:
    name, epoch = status["deployment"], status["epoch"]
    return (
        f"Ranks of {name} copy experts to return from epoch {epoch} to {to}.{undone} The bytes to"
        " copy and the stall are not known before it is planned."
        f" Automatic plans wait for `evenkeel resume {name}`."
    )


def _effort(plan: Mapping[str, Any]) -> str:
    experts, waves = counted(plan["moves"], "expert"), counted(plan["waves"], "wave")
    return f"{experts}, {bytes_text(plan['nbytes'])}, in {waves}"


def _stall(seconds: float | None) -> str:
    if seconds is None:
        return "the expected stall is not known"
    return f"expected stall {duration_text(seconds)} of one step for each wave"
