"""Automatic cycles of one deployment."""

import asyncio
from types import SimpleNamespace

import numpy as np

from evenkeel_moe.controller.cycles.rank_costs import RankCosts
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.planning.decision.cycle import run_cycle
from evenkeel_moe.protocol import control_messages as ctl
from tests.controller.replicas import ONE, feed, replicas
from tests.protocol.machines import BASE
from tests.waiting import until


async def test_a_cycle_does_not_wait_while_the_planner_compiles_its_kernels(
    leading_two, monkeypatch
):
    """The machine's deadline for a cycle counted it, and ended the cycle as planner_failed."""
    registry, _, _ = leading_two
    planner, decided = registry.deployments[ONE].planner, []
    monkeypatch.setattr(planner.inbox, "post", decided.append)
    for closed_by in (None, Reason.PLAN_IN_PROGRESS):
        planner.begin_cycle(ctl.RunCycle(7, Epoch(0), BASE, Generation("g1"), 1, closed_by))
    await until(lambda: len(decided) == 2)
    reasons = Reason.PLANNER_STARTING, Reason.PLAN_IN_PROGRESS
    assert decided == [ctl.CycleDecided(7, reason) for reason in reasons]
    assert not planner.pool.warm, "it answered before the kernels were compiled"


async def test_a_cycle_tells_the_time_balance_also_while_a_plan_runs_or_waits(monkeypatch):
    cost = CostModel(CostCurves.linear(np.array([1.0, 2.0])), source=CostSource.PROFILED)
    told: dict[int, ctl.CycleDecided] = {}
    reasons = Reason.PLAN_IN_PROGRESS, Reason.PLAN_PROPOSED, Reason.STORE_UNAVAILABLE

    async def at_once(_pool, inputs):
        return await asyncio.to_thread(run_cycle, inputs)  # The lease must be renewed meanwhile.

    def take(event, *_):
        if isinstance(event, ctl.CycleDecided):
            told[event.cycle] = event

    async with replicas("a") as (one, _):
        await one.lead()
        feed(one, 0, 8)
        planner, group = one.member.planner, one.member.control.group
        monkeypatch.setattr(planner, "pool", SimpleNamespace(begin=lambda: True))
        monkeypatch.setattr(planner._budget, "run", at_once)
        monkeypatch.setattr(RankCosts, "choose", lambda *_, **__: cost)
        monkeypatch.setattr(planner.inbox, "post", take)
        for number, reason in enumerate(reasons, 1000):
            planner.begin_cycle(
                ctl.RunCycle(number, group.epoch, group.placement, Generation("g1"), 1, reason)
            )
        await until(lambda: len([number for number in told if number >= 1000]) == len(reasons))
        for number, reason in enumerate(reasons, 1000):
            assert (told[number].reason, told[number].plan) == (reason, None)
            numbers = told[number].numbers
            assert 0 < numbers["time_balance"] < numbers["balancedness_mean"]
