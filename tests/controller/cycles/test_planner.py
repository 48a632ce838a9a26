"""Automatic cycles of one deployment."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from evenkeel_moe.adapters.processes.planner_pool import DeadlineMissed
from evenkeel_moe.controller.cycles.cycle_budget import CycleBudget
from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase
from evenkeel_moe.controller.cycles.input_builder import InputBuilder
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.policy import CostChoice
from evenkeel_moe.planning.decision.cycle import CycleResult, WindowSplit, run_cycle
from evenkeel_moe.planning.decision.gates import GateMemory
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT, SplitModel
from evenkeel_moe.planning.signals.change_detection import Change
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.wire.link import ReplicaCost
from tests.controller.cycles.manual_rig import InlinePlanner
from tests.controller.replicas import ONE, feed, replicas
from tests.planning.decision.test_cycle import inputs, skewed
from tests.protocol.machines import BASE, SHAPE
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
    assert not planner.shared.planner.begin(), "it answered before the kernels were compiled"


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
        ready: Any = SimpleNamespace(begin=lambda: True)
        monkeypatch.setattr(planner, "shared", replace(planner.shared, planner=ready))
        monkeypatch.setattr(planner.builder.budget, "run", at_once)
        monkeypatch.setattr(InputBuilder, "cost_in_force", lambda *_, **__: cost)
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


@pytest.mark.parametrize(("generation", "kept"), [("g1", True), ("g0", False)])
async def test_a_cycle_of_a_group_that_has_restarted_leaves_nothing_to_the_next(
    generation, kept, monkeypatch
):
    """The windows, the gates and the shadow policies begin again with the new group."""
    memory, scored = GateMemory(windows_below=3, planning=True), []
    split = WindowSplit(0, 4, Change(0, np.nan), 1)

    async def decide(_pool, _inputs):
        return CycleResult(False, Reason.NO_CHANGE, memory, split=split)

    def spawn(coroutine, name):
        coroutine.close()
        scored.append(name)

    async with replicas("a") as (one, _):
        await one.lead()
        feed(one, 0, 8)
        control, planner = one.member.control, one.member.planner
        ready: Any = SimpleNamespace(begin=lambda: True)
        monkeypatch.setattr(planner, "shared", replace(planner.shared, planner=ready))
        monkeypatch.setattr(planner.builder.budget, "run", decide)
        monkeypatch.setattr(planner._shadows, "shared", replace(planner.shared, spawn=spawn))
        shadowed = replace(control.policy, shadow_policies=("eplb",))
        control.handle(ctl.PolicySet(shadowed, {}), one.registry.shared.clock.monotonic())
        before = planner.builder.gate_memory
        # Nothing in it waits, so no cycle of the machine itself comes between.
        await planner._decide(ctl.RunCycle(9, Epoch(0), BASE, Generation(generation), 1, None))
        assert planner.builder.gate_memory == (memory if kept else before)
        assert len(scored) == (1 if kept else 0)


# --- A cycle scores by what its ranks told or measured, and an operator can ask for tokens --------


PROFILE = ReplicaCost(1e-5, 1e-7, 2e-6, 0.0, 0.01, 1.8e9)


def costs_of(rig, windows=None, split=EVEN_SPLIT) -> InputBuilder:
    member, nothing = rig.member, cast(Any, None)
    loads: Any = SimpleNamespace(
        ingest=SimpleNamespace(parts=lambda: windows or {}),
        split=lambda: split,
        times=RankTimes(512),
    )
    return InputBuilder(member.control, loads, member.ranks, rig.clock, nothing, nothing)


def chosen(costs, rig, mode=CostChoice.AUTO):
    base = PlanBase.current(rig.member.control)
    return costs.cost_in_force(base, SHAPE, np.ones((4, 2, 4), np.uint32), mode)


async def test_profiles_are_used_once_every_rank_told_one(rig):
    costs = costs_of(rig)
    with capture_logs() as said:
        assert chosen(costs, rig).source is CostSource.TOKENS
        rig.ranks.sessions[0].received(PROFILE)
        assert "missing: 1" in chosen(costs, rig).detail
        rig.ranks.sessions[1].received(replace(PROFILE, s_per_token=2e-7))
        model = chosen(costs, rig)
        assert chosen(costs, rig, CostChoice.TOKENS).by_tokens
    assert model.source is CostSource.PROFILED
    assert model.curves is not None
    assert model.curves.slope_s_per_token.tolist() == [1e-7, 2e-7]
    assert model.replica.start_tokens == pytest.approx(15.0)
    named = [row["source"] for row in said if row["event"] == "cost_model"]
    assert named == ["tokens", "profiled", "tokens"], "each change is logged once"


async def test_the_dispatcher_in_force_says_if_shared_experts_are_poured(rig):
    base = PlanBase.current(rig.member.control)
    load, shape = np.ones((4, 2, 4), np.uint32), replace(SHAPE, shared_experts=2.0)
    for dispatch, work in ((DispatchModel.EVEN, 0.0), (DispatchModel.WATERFILL, 2 / SHAPE.top_k)):
        costs = costs_of(rig, split=SplitModel(dispatch))
        assert costs.cost_in_force(base, shape, load, CostChoice.AUTO).shared_tokens == work


async def test_seconds_that_ranks_report_come_before_their_profiles(rig):
    for session in rig.ranks.sessions:
        session.received(PROFILE)
    rng = np.random.default_rng(1)
    counts = rng.poisson(rng.lognormal(2, 1.5, (64, 2, 4))).astype(np.uint32)
    copies = np.array([(BASE.phy2log[0] == expert).sum() for expert in range(4)])
    shares = np.take_along_axis(counts / copies, BASE.phy2log[None], axis=2)
    by_rank = shares.reshape(64, 2, 2, 3)
    seconds = 1e-6 * by_rank.sum(axis=(1, 3)) + 3e-5 * np.minimum(by_rank, 1).sum(axis=(1, 3))
    seconds[:, 1] *= 1.2
    window = LoadWindow(
        counts,
        np.arange(64),
        np.zeros(64, np.int64),
        np.ones((64, 2), np.int64),
        seconds * rng.lognormal(0, 0.01, seconds.shape),
    )
    costs = costs_of(rig, {Phase.MIXED: [window]})
    model = chosen(costs, rig)
    assert model.source is CostSource.MEASURED
    assert model.curves is not None
    slopes = model.curves.slope_s_per_token
    assert slopes[1] / slopes[0] == pytest.approx(1.2, rel=0.02)
    assert model.replica.start_tokens == pytest.approx(30.0, rel=0.1)
    costs.loads.times.clear()
    costs.loads.ingest = costs_of(rig).loads.ingest
    assert chosen(costs, rig).source is CostSource.PROFILED, "another generation measures anew"


async def test_the_model_in_force_is_the_one_that_a_cycle_scored_by(rig):
    for session in rig.ranks.sessions:
        session.received(PROFILE)
    await rig.load()
    planner = rig.member.planner
    await until(lambda: planner.builder.cost is not None)
    assert planner.builder.cost.source is CostSource.PROFILED


# --- The planner's deadline becomes a number of evaluations ---------------------------------------


taken: list[float] = []
"""Seconds that the planner was said to take."""


class Planner:
    """A planner that reports given evaluations and seconds, or fails."""

    def __init__(self):
        self.evaluated: float | None = None
        self.seconds = 0.0
        self.failing = None
        self.background: Planner = self
        self.calls = 0

    async def run(self, function, argument):
        self.calls += 1
        if self.failing is not None:
            raise self.failing
        numbers = {} if self.evaluated is None else {"evaluations": self.evaluated}
        return CycleResult(False, Reason.NO_CHANGE, GateMemory(), numbers), self.seconds


def planner_and_budget() -> tuple[Any, CycleBudget]:
    return Planner(), CycleBudget(60.0, taken.append)


async def run_gem(planner, budget):
    return await budget.run(planner, inputs(skewed(20), policy="gem"))


async def miss(planner, budget):
    """Let a cycle miss its deadline."""
    planner.failing = planner.background.failing = DeadlineMissed("planner: no plan within 60 s")
    with pytest.raises(DeadlineMissed):
        await run_gem(planner, budget)
    planner.failing = planner.background.failing = None


async def test_a_slow_policy_may_evaluate_what_fits_a_quarter_of_the_deadline():
    planner, budget = planner_and_budget()
    assert budget.limit("gem") is None
    planner.evaluated, planner.seconds = 2e6, 40.0
    await run_gem(planner, budget)
    assert budget.limit("gem") == 2e6 / 40 * 15
    assert budget.limit("keel") is None, "another policy's candidates take another time"


async def test_the_planners_seconds_are_told_and_those_of_a_missed_deadline_are_not():
    taken.clear()
    planner, budget = planner_and_budget()
    planner.seconds = 2.5
    await run_gem(planner, budget)
    await miss(planner, budget)
    assert taken == [2.5]


async def test_quick_cycles_and_those_that_planned_nothing_tell_no_rate():
    planner, budget = planner_and_budget()
    for planner.evaluated, planner.seconds in ((500.0, 0.01), (0.0, 30.0), (None, 30.0)):
        await budget.run(planner, inputs(skewed(20), policy="keel"))
        assert budget.limit("keel") is None


@pytest.mark.parametrize(("used", "seconds"), [(0.0, 5.0), (16.0, 0.01)])
async def test_a_limit_under_which_cycles_tell_no_rate_is_dropped(used, seconds):
    planner, budget = planner_and_budget()
    for _ in range(9):
        await miss(planner, budget)
    assert budget.limit("gem") == 15
    await run_gem(planner, budget)
    assert budget.limit("gem") == 15, "that cycle did not plan"
    planner.evaluated, planner.seconds = used, seconds
    await run_gem(planner, budget)
    assert budget.limit("gem") is None


async def test_a_short_search_within_its_share_of_the_deadline_lowers_no_limit():
    """Most of such a cycle is no search, so its rate is too low."""
    planner, budget = planner_and_budget()
    seen = []
    for planner.evaluated, planner.seconds in ((1e6, 10.0), (100.0, 1.0), (2e6, 30.0)):
        await budget.run(planner, inputs(skewed(20), policy="keel"))
        seen.append(budget.limit("keel"))
    assert seen == [1_500_000, 1_500_000, 1_000_000]


async def test_after_a_missed_deadline_there_is_less_to_evaluate_each_time():
    planner, budget = planner_and_budget()
    seen = []
    for _ in range(3):
        await miss(planner, budget)
        seen.append(budget.limit("gem"))
    assert seen == [1_000_000, 250_000, 62_500]


async def test_after_a_missed_deadline_cycles_leave_the_process_of_others_until_one_is_in_time():
    planner, budget = planner_and_budget()
    own = planner.background = Planner()
    for calls in ((1, 0), (1, 1), (1, 2)):
        await miss(planner, budget)
        assert (planner.calls, own.calls) == calls
    for calls in ((1, 3), (2, 3), (3, 3)):
        await run_gem(planner, budget)
        assert (planner.calls, own.calls) == calls


async def test_a_planner_that_died_teaches_nothing():
    planner, budget = planner_and_budget()
    planner.failing = Unavailable("planner: a planner process died", Reason.PLANNER_FAILED)
    with pytest.raises(Unavailable):
        await run_gem(planner, budget)
    assert budget.limit("gem") is None


async def test_a_cycle_keeps_to_what_it_may_evaluate_and_the_same_number_replays_it():
    planner: Any = InlinePlanner()
    asked = inputs(skewed(60), policy="gem")
    first = await CycleBudget(60.0, taken.append).run(planner, asked)
    used = int(first.numbers["evaluations"])
    less, again = (replace(asked, max_evaluations=most) for most in (used // 3, used))
    assert (await CycleBudget(60.0, taken.append).run(planner, less)).numbers["evaluations"] < used
    assert (await CycleBudget(60.0, taken.append).run(planner, again)).target == first.target
