"""Whether a report's steps can be what they say. For the controller only: it loads the compiler."""

import math

from evenkeel.compiled import kernel
from evenkeel.model.load import MAX_STEP, MAX_TOKENS, PHASE_CODE, StepTable

__all__ = ["first_wrong"]

_NUM_PHASES = len(PHASE_CODE)


@kernel
def first_wrong(steps: StepTable) -> int:
    """Where a table says what cannot be, -1 where it does nowhere."""
    before = -1
    for i in range(len(steps)):
        one = steps[i]
        if not (
            before < one.step <= MAX_STEP and 0 <= one.epoch <= MAX_STEP and 0 <= one.tokens <= MAX_TOKENS
        ):
            return i
        if not (1 <= one.phase <= _NUM_PHASES and one.dummy <= 1):
            return i
        if not (0 <= one.compute_s < math.inf or math.isnan(one.compute_s)):
            return i
        before = one.step
    return -1
