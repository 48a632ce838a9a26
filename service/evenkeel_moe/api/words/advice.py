"""A recommendation in words. It says what a cycle would do: nothing has happened."""

from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.errors import Reason
from evenkeel_moe.planning.decision.verdict import Call

CALLS = {
    Call.RECOMMEND: "A plan is recommended",
    Call.NOT_NOW: "No plan now",
    Call.INSUFFICIENT_EVIDENCE: "Too little evidence",
}
_WOULD = {
    "auto": "would start a plan",
    "propose": "would propose a plan",
    "observe": "would find a plan, and in observe mode the controller starts nothing",
}


def outcome_text(reason: str, mode: str) -> str:
    """Return how a cycle would end with an algorithm.

    Args:
        reason: with which a cycle would end after planning.
        mode: of the deployment.
    """
    if reason != Reason.PLAN_STARTED:
        return sentence(reason)
    return f"{_WOULD[mode].capitalize()}."


def advice_text(reason: str, mode: str) -> str:
    """Return how the next cycle of the deployment would end; the arguments are as above."""
    if reason != Reason.PLAN_STARTED:
        return sentence(reason)
    return f"A cycle {_WOULD[mode]}, if the gates before planning are open."
