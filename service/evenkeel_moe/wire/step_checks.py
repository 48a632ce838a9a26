"""Checks the steps of a load report. Only for the controller, because it loads the compiler."""

import math

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.load import MAX_COMPUTE_S, MAX_STEP, MAX_TOKENS, PHASE_CODE, StepTable

_NUM_PHASES = len(PHASE_CODE)
_ORDER, _EPOCH, _TOKENS, _COMPUTE_S, _PHASE, _DUMMY = range(1, 7)


@kernel
def first_fault(steps: StepTable) -> tuple[int, int]:
    """Return the index of the first invalid row and its fault; fault 0 if all rows are valid."""
    before = -1
    for i in range(len(steps)):
        one = steps[i]
        if not before < one.step <= MAX_STEP:
            return i, _ORDER
        if not 0 <= one.epoch <= MAX_STEP:
            return i, _EPOCH
        if not 0 <= one.tokens <= MAX_TOKENS:
            return i, _TOKENS
        if not (0 <= one.compute_s <= MAX_COMPUTE_S or math.isnan(one.compute_s)):
            return i, _COMPUTE_S
        if not 1 <= one.phase <= _NUM_PHASES:
            return i, _PHASE
        if one.dummy > 1:
            return i, _DUMMY
        before = one.step
    return 0, 0


def check_steps(steps: StepTable) -> None:
    """Check every row of a step table.

    Raises:
        PeerViolation: NOT_FINITE or MALFORMED, with the numbers of the first invalid row.
    """
    row, fault = first_fault(steps)
    if not fault:
        return
    step, epoch, tokens, compute_s, phase, dummy = steps[row].item()
    before = steps["step"][row - 1] if row else -1
    words = {
        _ORDER: f"follows step {before}; steps must rise and stay below 2**62",
        _EPOCH: f"has epoch {epoch}, must be 0..{MAX_STEP}",
        _TOKENS: f"has {tokens} tokens, must be 0..{MAX_TOKENS}",
        _COMPUTE_S: f"has compute_s {compute_s}, must be 0..{MAX_COMPUTE_S:g} or not measured",
        _PHASE: f"has unknown phase {phase}",
        _DUMMY: f"has dummy {dummy}, must be 0 or 1",
    }
    reason = Reason.NOT_FINITE if fault == _COMPUTE_S else Reason.MALFORMED
    raise PeerViolation(f"step {step} {words[fault]}", reason)
