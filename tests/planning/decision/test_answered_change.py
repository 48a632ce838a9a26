"""Which changes of traffic still wait for an answer, and which need not wait for the cooldown."""

import math
from dataclasses import replace

import pytest

from evenkeel_moe.planning.decision.gates import (
    GateMemory,
    change_is_open,
    change_is_urgent,
)
from tests.planning.decision.test_gates import POOR, window_of


def changed(steps=8, moved=100, planned=0, balance=0.7, before=0.9):
    """A change of traffic, the steps since the last plan, and those that it knew of the change."""
    return replace(
        POOR,
        changed_steps=steps,
        steps_since_move=moved,
        memory=GateMemory(change_steps=planned),
        balancedness_changed=balance,
        balancedness_before=before,
    )


def answered(steps=60, planned=40):
    return changed(steps, 20, planned)


@pytest.mark.parametrize(
    ("case", "is_open", "is_urgent"),
    [
        pytest.param(changed(), True, True, id="under the present placement"),
        pytest.param(changed(steps=0), False, False, id="no change"),
        pytest.param(changed(balance=0.95), False, False, id="good balance"),
        pytest.param(changed(balance=math.nan), False, False, id="unknown balance"),
        pytest.param(changed(before=0.72), True, False, id="costs no balance"),
        pytest.param(changed(before=math.nan), True, False, id="unknown balance before"),
        pytest.param(answered(), False, False, id="a plan on enough steps answers it"),
        pytest.param(answered(planned=0), True, True, id="the plan knew of no change"),
        pytest.param(answered(planned=None), False, False, id="unknown plan, as after a takeover"),
        pytest.param(answered(39), True, True, id="a change after the answered one"),
        pytest.param(answered(45), False, False, id="its first step is never estimated exactly"),
        pytest.param(changed(15, 3, 8), False, False, id="under twice the steps of the plan"),
        pytest.param(changed(16, 3, 8), True, True, id="refined at twice the steps"),
        # It may have answered well, so that balance tells nothing about urgency.
        pytest.param(changed(16, 3, 8, before=0.5), True, True, id="refined at good balance"),
        pytest.param(changed(64, 3, 32), False, False, id="32 steps were enough"),
    ],
)
def test_a_change_waits_for_an_answer_and_may_end_the_cooldown(case, is_open, is_urgent):
    asked = case, window_of(case)
    assert (change_is_open(*asked), change_is_urgent(*asked)) == (is_open, is_urgent)
