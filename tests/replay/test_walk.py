from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.loads import regrouped
from bench.planning_walk import WIDE_FLEETS, setup_of
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import Proposal
from evenkeel_moe.replay.walk import Setup, replan_steps, walk_forward
from evenkeel_moe.replay.walk_metrics import measure_walk


def _eplb(replan):
    return plan_eplb(replan.problem)


def test_only_whole_horizons_count():
    assert replan_steps(30, 6, 4).tolist() == [6, 10, 14, 18, 22, 26]
    assert replan_steps(29, 6, 4).tolist() == [6, 10, 14, 18, 22]


@pytest.mark.parametrize(("steps", "count"), [(21, 3), (5, 0), (1, 0)])
def test_fewer_than_four_replans_is_an_error_with_the_arithmetic(steps, count):
    with pytest.raises(
        InvalidInput, match=rf"\({steps} - window 6\) // horizon 4 = {count}, at least 4"
    ):
        replan_steps(steps, 6, 4)


def test_no_planner_sees_a_step_it_is_scored_on(setup):
    """Load after a replan does not affect the plans up to it."""
    before = walk_forward("eplb", _eplb, setup)
    changed = setup.load.copy()
    changed[18:] = changed[18:, :, ::-1] * 7
    after = walk_forward("eplb", _eplb, replace(setup, load=changed))
    same = [a == b for a, b in zip(before.placements, after.placements, strict=True)]
    assert same[:4] == [True] * 4
    assert not all(same)

    def check(replan):
        assert len(replan.history) == replan.step
        np.testing.assert_array_equal(
            replan.problem.load, setup.load[replan.step - 6 : replan.step]
        )
        return None

    walk_forward("check", check, setup)


def test_metrics_equal_those_of_a_plain_recount(setup):
    walk = walk_forward("eplb", _eplb, setup)
    result = measure_walk(walk, 10)
    balance, slowest, fluid = [], [], []
    for step, placement in zip(walk.steps, walk.placements, strict=True):
        for t in range(step, step + 4):
            for layer in range(2):
                row = placement.phy2log[layer].tolist()
                ranks = [0.0, 0.0]
                for slot, expert in enumerate(row):
                    if expert >= 0:
                        ranks[slot // 5] += setup.load[t, layer, expert] / row.count(expert)
                balance.append((layer, np.mean(ranks) / max(ranks)))
                slowest.append(max(ranks))
                fluid.append(sum(ranks) / 2)
    by_layer = [
        np.mean([value for where, value in balance if where == layer]) for layer in range(2)
    ]
    assert result.balancedness_mean == pytest.approx(np.mean(by_layer))
    assert result.balancedness_worst == pytest.approx(min(by_layer))
    assert result.balancedness_p5 == pytest.approx(
        np.percentile([value for _, value in balance], 5)
    )
    assert result.time_over_fluid == pytest.approx(sum(slowest) / sum(fluid))
    per_step = np.array(slowest).reshape(-1, 2).sum(axis=1) / (sum(fluid) / 24)
    assert result.step_time_p90 == pytest.approx(np.percentile(per_step, 90))
    assert (result.step_time_p50, result.step_time_p99) == pytest.approx(
        tuple(np.percentile(per_step, [50, 99]))
    )
    assert result.replans == 6


def _received(old, new):
    """Return the number of experts that ranks gain, over layers, which must be copied."""
    total = 0
    for a, b in zip(old.phy2log, new.phy2log, strict=True):
        for rank in range(2):
            total += len(
                set(b[5 * rank : 5 * rank + 5].tolist())
                - set(a[5 * rank : 5 * rank + 5].tolist())
                - {-1}
            )
    return total


def test_copies_are_counted_from_the_current_placement_without_the_first_plan(setup):
    walk = walk_forward("eplb", _eplb, setup)
    in_force = [Placement.initial(setup.shape), *walk.placements]
    want = [_received(a, b) for a, b in zip(in_force[:-1], in_force[1:], strict=True)]
    assert walk.copies.tolist() == want
    assert want[0] > 0
    result = measure_walk(walk, 10)
    assert result.first_copies_per_layer == want[0] / 2
    assert result.first_bytes == want[0] * 10
    assert result.copies_per_layer == pytest.approx(np.mean(want[1:]) / 2)
    assert result.bytes == sum(want[1:]) * 10


def test_renamed_ranks_cost_nothing_after_relabelling(setup):
    def swap(replan):
        halves = replan.problem.current.phy2log.reshape(2, 2, 5)[:, ::-1]
        return Proposal(Placement(halves.reshape(2, 10), 2, 8), 0.0)

    walk = walk_forward("swap", swap, setup)
    assert (walk.copies == 0).all()
    assert (walk.copies_raw > 0).all()
    assert all(placement == Placement.initial(setup.shape) for placement in walk.placements)


def test_no_answer_keeps_the_current_placement(setup):
    walk = walk_forward(
        "first only", lambda replan: _eplb(replan) if replan.index == 0 else None, setup
    )
    assert len(set(walk.placements)) == 1
    assert walk.placements[0] != Placement.initial(setup.shape)
    assert walk.copies[1:].sum() == 0


def test_a_policy_that_breaks_an_invariant_is_named_with_its_step(setup):
    def broken(replan):
        rows = replan.problem.current.phy2log.copy()
        if replan.index == 2:
            rows[rows == 7] = 6
        return Proposal(Placement(rows, 2, 8), 0.0)

    with pytest.raises(InfeasiblePlan, match="policy broken at step 14: .* expert 7") as caught:
        walk_forward("broken", broken, setup)
    assert caught.value.reason is Reason.EXPERT_WITHOUT_REPLICA


def test_planning_time_is_measured_around_the_planner_alone(setup, monkeypatch):
    ticks = iter(range(1000))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("evenkeel_moe.replay.walk.time", clock)
    calls = []
    walk = walk_forward("eplb", _eplb, setup, on_replan=lambda: calls.append(1))
    assert walk.plan_s.tolist() == [1.0] * 6
    assert next(ticks) == 12
    assert len(calls) == 6


def test_slow_ranks_are_scored_by_their_curves(setup):
    cost = CostModel(CostCurves.linear(np.array([1.0, 3.0])))
    slow = replace(setup, objective=Objective(cost=cost))
    stay = walk_forward("stay", lambda replan: None, slow)
    loads = stay.rank_load * np.array([1.0, 3.0])
    np.testing.assert_allclose(stay.times, loads.max(axis=2))
    assert (stay.times >= stay.fluid - 1e-9).all()


def test_the_price_of_a_copy_is_a_share_of_the_layer_time(setup):
    assert setup.problem(0, 6, None).objective.cost_per_move == 0.0
    priced = replace(setup, copy_price=0.01).problem(0, 6, None).objective
    assert priced.cost_per_move == pytest.approx(0.01 * setup.load[:6].sum(axis=2).mean() / 2)
    with pytest.raises(InvalidInput, match="copy_cost is nan"):
        replace(setup, copy_price=float("nan")).problem(0, 6, None)


def test_a_trace_without_load_has_no_balancedness_and_no_ratio(setup):
    silent = Setup(np.zeros((30, 2, 8)), setup.shape, setup.topology, 6, 4)
    result = measure_walk(walk_forward("eplb", _eplb, silent), 10)
    assert np.isnan([result.balancedness_mean, result.time_over_fluid, result.step_time_p90]).all()


@pytest.mark.parametrize("fleet", WIDE_FLEETS)
def test_keel_takes_less_time_than_eplb_on_recorded_layers_of_256_experts(shipped_trace, fleet):
    """Each of both walks has six replans; the window of the first one is that of a first plan."""
    trace = regrouped(read_trace(shipped_trace))
    assert trace.counts.shape == (400, 1, 256)
    setup = setup_of(trace, *fleet)
    keel = walk_forward("keel", lambda replan: plan_keel(replan.problem), setup)
    eplb = walk_forward("eplb", _eplb, setup)
    first = slice(0, setup.horizon_steps)
    assert keel.times[first].sum() <= 1.005 * eplb.times[first].sum()
    assert keel.times.sum() <= 0.95 * eplb.times.sum()
