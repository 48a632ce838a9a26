"""Cycles under cost models other than tokens alone: time balance decides."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.cycle import CycleInputs, CycleResult, run_cycle
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.derived_cost import tokens_cost
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel

SHAPE = ModelShape(2, 64, 8, 8, 8, 1000)
SLOW_RANK = 3


def traffic(steps: int, seed: int = 1) -> np.ndarray:
    """Traffic with skew and little noise."""
    mean = np.random.default_rng(0).gamma(4.0, 100.0, (2, 64))
    return np.random.default_rng(seed).poisson(mean, (steps, 2, 64)).astype(np.uint32)


def cycle(
    policy: str,
    current: Placement,
    cost: CostModel,
    load: np.ndarray,
    dispatch: DispatchModel = DispatchModel.EVEN,
) -> CycleResult:
    """Run a cycle under the default thresholds; one window is enough to start."""
    return run_cycle(
        CycleInputs(
            load=load,
            shape=SHAPE,
            topology=Topology.single_node(8),
            current=current,
            policy=policy,
            settings=GateSettings(consecutive_windows=1),
            staging_bytes=(64_000,) * 8,
            now_unix=1000.0,
            mode=Mode.AUTO,
            ranks_fresh=8,
            newest_step_age_s=0.5,
            objective=Objective(cost=cost, dispatch=dispatch),
        )
    )


@cache
def balanced() -> Placement:
    """A placement in which all ranks carry about the same tokens."""
    target = cycle("gem", Placement.initial(SHAPE), CostModel(), traffic(96)).target
    assert target is not None
    return target


def slow(factor: float) -> CostModel:
    seconds = np.full(8, 1e-6)
    seconds[SLOW_RANK] *= factor
    return CostModel(CostCurves.linear(seconds), source=CostSource.PROFILED)


def test_by_tokens_a_balanced_placement_stays():
    result = cycle("gem", balanced(), CostModel(), traffic(96))
    assert result.reason is Reason.BALANCE_ABOVE_THRESHOLD
    assert result.numbers["balancedness_mean"] > 0.97
    assert "time_balance" not in result.numbers


@pytest.mark.parametrize("policy", ["gem", "keel"])
@pytest.mark.parametrize(
    ("factor", "saves"), [(1.12, 0.05), (1 / 0.88, 0.06), (1.3, 0.15), (1 / 0.7, 0.2)]
)
def test_a_slow_rank_alone_is_planned_for(policy, factor, saves):
    cost, load = slow(factor), traffic(96)
    result = cycle(policy, balanced(), cost, load)
    assert (result.passed, result.reason) == (True, Reason.BALANCE_BELOW_THRESHOLD)
    assert result.numbers["balancedness_mean"] > 0.97
    assert result.numbers["time_balance_worst"] <= result.numbers["time_balance"] < 0.93
    assert result.numbers["gain_lower"] > saves
    assert result.target is not None
    later = traffic(48, seed=9)
    before = moe_time.predicted_time(later, balanced(), cost)
    assert moe_time.predicted_time(later, result.target, cost) < (1 - saves) * before


def test_planning_for_a_slow_rank_ends_with_the_plan():
    cost, load = slow(1.3), traffic(96)
    target = cycle("gem", balanced(), cost, load).target
    assert target is not None
    again = cycle("gem", target, cost, traffic(96, seed=9))
    assert (again.passed, again.reason) == (False, Reason.BALANCE_ABOVE_THRESHOLD)
    assert again.numbers["balancedness_mean"] < again.numbers["time_balance"]


def test_where_reading_dominates_tokens_say_nothing():
    # Every expert is read in every step, so that eight experts a rank cost the same everywhere.
    reading = CostModel(replica=ReplicaWork(read_tokens=1e5), source=CostSource.DERIVED)
    result = cycle("gem", Placement.initial(SHAPE), reading, traffic(96))
    assert result.reason is Reason.BALANCE_ABOVE_THRESHOLD
    assert result.numbers["balancedness_mean"] < 0.9
    assert result.numbers["time_balance"] == pytest.approx(1.0)


def test_ranks_that_waterfill_levels_are_in_balance_by_tokens():
    """The shared experts are a third of the work: as much as the fullest rank is above the mean."""
    uneven, load = Placement.initial(SHAPE), traffic(96)
    even = cycle("keel", uneven, CostModel(), load)
    assert (even.passed, even.reason) == (True, Reason.BALANCE_BELOW_THRESHOLD)
    cost = tokens_cost(replace(SHAPE, shared_experts=4.0), DispatchModel.WATERFILL)
    level = cycle("keel", uneven, cost, load, DispatchModel.WATERFILL)
    assert (level.passed, level.reason) == (False, Reason.BALANCE_ABOVE_THRESHOLD)
    assert level.numbers["balancedness_mean"] < 0.9
    assert level.numbers["time_balance"] > 0.99


def test_by_tokens_a_plan_under_waterfill_promises_what_the_poured_work_leaves():
    load = traffic(96) * np.where(np.arange(64) < 8, 6, 1).astype(np.uint32)
    current, split = Placement.initial(SHAPE), SplitModel(DispatchModel.WATERFILL)
    cost = tokens_cost(replace(SHAPE, shared_experts=1.0), DispatchModel.WATERFILL)
    result = cycle("keel", current, cost, load, DispatchModel.WATERFILL)
    assert result.passed and result.target is not None and result.verdict is not None
    before, after = (
        moe_time.predicted_time(load[-16:], one, cost, split) for one in (current, result.target)
    )
    assert result.verdict.gain == pytest.approx(1 - after / before)
    assert result.verdict.cost_model.source is CostSource.TOKENS
    assert result.verdict.cost_model.moe_time == "MoE time (by tokens)"
    routed = cycle("keel", current, CostModel(), load)
    assert routed.verdict is not None and result.verdict.gain < routed.verdict.gain - 0.01


def test_curves_for_other_ranks_end_the_cycle_in_words():
    other = CostModel(CostCurves.linear(np.ones(4)), source=CostSource.PROFILED)
    result = cycle("gem", balanced(), other, traffic(96))
    assert (result.passed, result.reason) == (False, Reason.WRONG_SHAPE)
    assert "cost curves are for 4 ranks" in result.detail
