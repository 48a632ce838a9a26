"""Which changes of traffic still wait for an answer, and which need not wait for the cooldown."""

import math
from dataclasses import dataclass, replace

import pytest

from evenkeel_moe.planning.decision.gates import (
    GateMemory,
    GateSettings,
    MeasuredWindow,
    change_is_open,
    change_is_urgent,
)
from evenkeel_moe.planning.decision.window_balance import WindowBalance
from tests.planning.decision.test_gates import POOR


@dataclass(frozen=True)
class Changed:
    """A change of traffic, and the plans made since."""

    steps: int = 8
    steps_since_move: int = 100
    planned_steps: int | None = 0
    balance: float = 0.7
    balance_before: float = 0.9

    def _asked(self):
        inputs = replace(
            POOR,
            memory=GateMemory(change_steps=self.planned_steps),
            steps_since_move=self.steps_since_move,
        )
        balance = WindowBalance(0.8, math.nan, self.balance, self.balance_before)
        return inputs, MeasuredWindow(200, balance, changed_steps=self.steps), GateSettings()

    def is_open(self):
        return change_is_open(*self._asked())

    def is_urgent(self):
        return change_is_urgent(*self._asked())


NEW = Changed()


def test_a_change_under_the_present_placement_is_open_and_urgent():
    assert NEW.is_open()
    assert NEW.is_urgent()


@pytest.mark.parametrize("other", [{"steps": 0}, {"balance": 0.95}, {"balance": math.nan}])
def test_without_a_change_or_with_good_balance_nothing_is_open(other):
    assert not replace(NEW, **other).is_open()
    assert not replace(NEW, **other).is_urgent()


def test_a_change_that_costs_no_balance_waits_for_the_cooldown():
    harmless = replace(NEW, balance_before=0.72)
    assert harmless.is_open()
    assert not harmless.is_urgent()
    assert not replace(NEW, balance_before=math.nan).is_urgent()


ANSWERED = replace(NEW, steps=60, steps_since_move=20, planned_steps=40)


def test_a_plan_on_enough_steps_answers_a_change():
    assert not ANSWERED.is_open()


def test_a_plan_that_knew_of_no_change_answers_none():
    assert replace(ANSWERED, planned_steps=0).is_open()
    # Nothing is known of the last plan: it counts as an answer, as after a takeover.
    assert not replace(ANSWERED, planned_steps=None).is_open()


def test_a_change_after_the_one_that_was_answered_is_open():
    assert replace(ANSWERED, steps=39).is_open()
    # The first step of one change is never estimated exactly.
    assert not replace(ANSWERED, steps=45).is_open()


def test_a_plan_on_few_steps_is_refined_at_twice_as_many():
    first = replace(NEW, steps_since_move=3, planned_steps=8)
    assert not replace(first, steps=15).is_open()
    assert replace(first, steps=16).is_open()
    # It may have answered well, so that balance tells nothing about urgency.
    assert replace(first, steps=16, balance_before=0.5).is_urgent()
    assert not replace(first, steps=64, planned_steps=32).is_open(), "32 steps were enough"
