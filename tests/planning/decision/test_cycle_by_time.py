"""Cycles under cost models other than tokens alone: time balance decides."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.cycle import CycleResult, run_cycle
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.derived_cost import tokens_cost
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from tests.planning.decision.test_cycle import inputs

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
    closed_by: Reason | None = None,
    shape: ModelShape = SHAPE,
) -> CycleResult:
    """Run a cycle under the default thresholds; one window is enough to start."""
    ranks = shape.num_ranks
    return run_cycle(
        inputs(
            load,
            shape=shape,
            topology=Topology.single_node(ranks),
            current=current,
            policy=policy,
            settings=GateSettings(consecutive_windows=1),
            staging_bytes=(64 * shape.bytes_per_expert,) * ranks,
            ranks_fresh=ranks,
            closed_by=closed_by,
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


def test_a_cycle_in_which_no_plan_may_begin_measures_the_balance_all_the_same():
    closed = cycle("gem", balanced(), slow(1.3), traffic(96), closed_by=Reason.PLAN_IN_PROGRESS)
    assert (closed.passed, closed.reason, closed.target) == (False, Reason.PLAN_IN_PROGRESS, None)
    assert closed.numbers["time_balance_worst"] <= closed.numbers["time_balance"] < 0.93
    assert closed.numbers["balancedness_mean"] > 0.97


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


READ = 134.0
"""Tokens that take as long as reading an expert: 44 MB at 0.72 of 1.6 TB/s, 88 million operations a
token at 0.55 of 560 a microsecond, which is about a die that serves DeepSeek-V3 in int8."""


def die_cycle(tokens: int, dies: int, slots: int, spread: float) -> CycleResult:
    """Run a cycle for 256 experts, top 8, as engines place them.

    Args:
        tokens: of each die in a step.
        dies: ranks.
        slots: experts of a die.
        spread: squared coefficient of variation of the experts' loads.
    """
    share = np.random.default_rng(0).gamma(1 / spread, spread, (2, 256))
    mean = tokens * dies * 8 * share / share.sum(axis=1, keepdims=True)
    shape = ModelShape(2, 256, dies, slots, 8, 44_000_000)
    reading = CostModel(replica=ReplicaWork(read_tokens=READ), source=CostSource.PROFILED)
    load = np.random.default_rng(1).poisson(mean, (96, 2, 256)).astype(np.uint32)
    return cycle("keel", Placement.initial(shape), reading, load, shape=shape)


@pytest.mark.parametrize("spread", [0.15, 0.5])
@pytest.mark.parametrize(
    ("tokens", "dies", "slots"),
    [
        *((16, 32, 8), (64, 32, 8)),  # Decode, at most 8 experts and under 128 tokens a die.
        *((64, 16, 16), (64, 8, 32), (120, 8, 32)),  # Under 128 tokens a die.
        *((1024 // 16, 16, 16), (1024 // 8, 8, 32)),  # A prefill of 1,024 tokens.
    ],
)
def test_where_vllm_ascend_advises_against_balancing_no_plan_is_made(tokens, dies, slots, spread):
    result = die_cycle(tokens, dies, slots, spread)
    assert result.reason is Reason.BALANCE_ABOVE_THRESHOLD, result.numbers
    assert result.numbers["balancedness_mean"] < result.numbers["time_balance"]


@pytest.mark.parametrize(
    ("tokens", "dies", "slots", "spread", "least"),
    [
        pytest.param(1024, 16, 16, 0.15, 0.09, id="a large prefill, as vllm-ascend advises too"),
        pytest.param(
            256, 32, 8, 0.15, 0.18, id="8 experts a die, each computes more than it reads"
        ),
        pytest.param(64, 32, 8, 1.0, 0.09, id="a few experts get most of few tokens"),
        pytest.param(64, 32, 9, 0.15, 0.1, id="an extra replica is read for nothing"),
    ],
)
def test_a_plan_is_made_where_more_is_computed_or_read_than_need_be(
    tokens, dies, slots, spread, least
):
    result = die_cycle(tokens, dies, slots, spread)
    assert result.passed, result.reason
    assert result.numbers["gain_lower"] > least
