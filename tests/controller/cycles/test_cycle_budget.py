"""The planner's deadline becomes a number of evaluations."""

from dataclasses import replace
from typing import Any

import pytest

from evenkeel_moe.adapters.processes.planner_pool import DeadlineMissed
from evenkeel_moe.controller.cycles.cycle_budget import CycleBudget
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.planning.decision.cycle import CycleResult
from evenkeel_moe.planning.decision.gates import GateMemory
from tests.planning.decision.test_cycle import inputs, skewed

taken: list[float] = []
"""Seconds that the planner was said to take."""


class Planner:
    """A planner that reports given evaluations and seconds, or fails."""

    def __init__(self):
        self.evaluated, self.seconds = 0.0, 0.0
        self.failing = None
        self.background: Planner = self
        self.calls = 0

    async def run(self, function, argument):
        self.calls += 1
        if self.failing is not None:
            raise self.failing
        numbers = {"evaluations": self.evaluated} if self.evaluated else {}
        return CycleResult(False, Reason.NO_CHANGE, GateMemory(), numbers), self.seconds


def planner_and_budget() -> tuple[Any, CycleBudget]:
    return Planner(), CycleBudget(60.0, taken.append)


async def test_a_slow_policy_may_evaluate_what_fits_a_quarter_of_the_deadline():
    planner, budget = planner_and_budget()
    assert budget.limit("gem") is None
    planner.evaluated, planner.seconds = 2e6, 40.0
    await budget.run(planner, inputs(skewed(20), policy="gem"))
    assert budget.limit("gem") == 2e6 / 40 * 15
    assert budget.limit("keel") is None, "another policy's candidates take another time"


async def test_the_planners_seconds_are_told_and_those_of_a_missed_deadline_are_not():
    taken.clear()
    planner, budget = planner_and_budget()
    planner.seconds = 2.5
    await budget.run(planner, inputs(skewed(20), policy="gem"))
    planner.failing = DeadlineMissed("planner: no plan within 60 s")
    with pytest.raises(DeadlineMissed):
        await budget.run(planner, inputs(skewed(20), policy="gem"))
    assert taken == [2.5]


async def test_quick_cycles_and_those_that_planned_nothing_tell_no_rate():
    planner, budget = planner_and_budget()
    for planner.evaluated, planner.seconds in ((500.0, 0.01), (0.0, 30.0)):
        await budget.run(planner, inputs(skewed(20), policy="keel"))
        assert budget.limit("keel") is None


async def test_after_a_missed_deadline_there_is_less_to_evaluate_each_time():
    planner, budget = planner_and_budget()
    planner.failing = DeadlineMissed("planner: no plan within 60 s")
    seen = []
    for _ in range(3):
        with pytest.raises(DeadlineMissed):
            await budget.run(planner, inputs(skewed(20), policy="gem"))
        seen.append(budget.limit("gem"))
    assert seen == [1_000_000, 250_000, 62_500]


async def test_after_a_missed_deadline_cycles_leave_the_process_of_others_until_one_is_in_time():
    planner, budget = planner_and_budget()
    own = planner.background = Planner()
    planner.failing = own.failing = DeadlineMissed("planner: no plan within 60 s")
    for calls in ((1, 0), (1, 1), (1, 2)):
        with pytest.raises(DeadlineMissed):
            await budget.run(planner, inputs(skewed(20), policy="gem"))
        assert (planner.calls, own.calls) == calls
    planner.failing = own.failing = None
    for calls in ((1, 3), (2, 3), (3, 3)):
        await budget.run(planner, inputs(skewed(20), policy="gem"))
        assert (planner.calls, own.calls) == calls


async def test_a_planner_that_died_teaches_nothing():
    planner, budget = planner_and_budget()
    planner.failing = Unavailable("planner: a planner process died", Reason.PLANNER_FAILED)
    with pytest.raises(Unavailable):
        await budget.run(planner, inputs(skewed(20), policy="gem"))
    assert budget.limit("gem") is None


class InThisProcess:
    """A planner that runs its calls in this process."""

    async def run(self, function, argument):
        return function(argument)


async def test_a_cycle_keeps_to_what_it_may_evaluate_and_the_same_number_replays_it():
    planner: Any = InThisProcess()
    asked = inputs(skewed(60), policy="gem")
    first = await CycleBudget(60.0, taken.append).run(planner, asked)
    used = int(first.numbers["evaluations"])
    less, again = (replace(asked, max_evaluations=most) for most in (used // 3, used))
    assert (await CycleBudget(60.0, taken.append).run(planner, less)).numbers["evaluations"] < used
    assert (await CycleBudget(60.0, taken.append).run(planner, again)).target == first.target
