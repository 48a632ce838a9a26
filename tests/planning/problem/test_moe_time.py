import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.kernels import batch_split_kernel, map_layers
from evenkeel_moe.planning.problem.moe_time import waterfilled_work
from evenkeel_moe.planning.problem.token_split import SplitModel, slot_load
from tests.planning import twins
from tests.strategies import (
    cost_curves,
    cost_models,
    loads,
    placements,
    seeds,
    shapes,
    source_loads,
    topologies,
)
from tests.waiting import deadline


@st.composite
def scored(draw):
    """A window, a placement, a cost model and a dispatcher of one deployment."""
    shape = draw(shapes())
    load = draw(loads(shape.num_layers, shape.num_logical_experts))
    dispatch = draw(st.sampled_from(DispatchModel))
    cost = draw(cost_models(shape.num_ranks))
    source = draw(st.none() | source_loads(shape))
    split = SplitModel(dispatch, draw(topologies(shape.num_ranks)), source)
    return load, draw(placements(shape)), cost, split


@given(scored())
def test_the_time_of_a_layer_is_that_of_its_slowest_rank(case):
    load, placement, cost, split = case
    per_slot = slot_load(load, placement, split)
    steps, layers, _ = load.shape
    slowest = np.zeros((steps, layers))
    for t in range(steps):
        for layer in range(layers):
            slowest[t, layer] = twins.slowest_rank(
                load[t, layer], per_slot[t, layer], placement.num_ranks, cost, split, layer
            )
    times = moe_time.step_times(load, placement, cost, split)
    assert times == pytest.approx(slowest)
    assert moe_time.predicted_time(load, placement, cost, split) == pytest.approx(times.sum())
    work = moe_time.rank_work(load, placement, cost, split)
    assert moe_time.rank_times(work, cost).max(axis=2) == pytest.approx(slowest)


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_with_one_slot_a_rank_the_copy_with_most_tokens_is_the_time(experts, spare, seed):
    rng = np.random.default_rng(seed)
    rows = np.concatenate([np.arange(experts), rng.integers(-1, experts, spare)])
    rows = rng.permuted(np.tile(rows, (2, 1)), axis=1).astype(np.int32)
    placement = Placement(rows, experts + spare, experts)
    load = rng.integers(0, 9, (3, 2, experts)).astype(float)
    most = slot_load(load, placement).max(axis=2)
    assert (moe_time.step_times(load, placement) == most).all()


@given(scored())
def test_no_placement_beats_the_fluid_time(case):
    load, placement, cost, split = case
    times = moe_time.step_times(load, placement, cost, split)
    fluid = moe_time.fluid_times(load, placement.num_ranks, cost)
    assert (fluid <= times * (1 + 1e-9)).all()
    if times.sum() > 0:
        assert moe_time.time_over_fluid(load, placement, cost, split) >= 1 - 1e-9
    if fluid.sum() > 0 and times.sum() > 0:
        assert 0 < moe_time.balance_of(times, fluid) <= 1 + 1e-9


@given(scored())
def test_the_fluid_time_of_equal_ranks_is_their_share_of_the_work(case):
    load, placement, cost, _ = case
    level = replace(cost, curves=None)
    work = moe_time.replica_work(load.astype(np.float64), cost.replica).sum(axis=2)
    work += cost.shared_tokens * load.sum(axis=2)
    ranks = placement.num_ranks
    share = np.where(work > 0, work / ranks + cost.fixed, 0.0)
    for counts in (load, load.astype(np.uint32)):
        np.testing.assert_allclose(moe_time.fluid_times(counts, ranks, level), share)


def test_without_load_there_is_no_time_balance():
    placement = Placement(np.array([[0, 1]]), num_ranks=2, num_logical_experts=2)
    assert np.isnan(moe_time.balance_of(np.zeros((3, 1)), np.zeros((3, 1))))
    assert np.isnan(moe_time.time_over_fluid(np.zeros((3, 1, 2)), placement))


def test_where_reading_dominates_a_replica_costs_time():
    one_each = Placement(np.array([[0, 1, -1, 2, 3, -1]]), num_ranks=2, num_logical_experts=4)
    copied = Placement(np.array([[0, 1, 2, 2, 3, 0]]), num_ranks=2, num_logical_experts=4)
    load = np.array([[[10.0, 2.0, 4.0, 2.0]]])
    assert moe_time.predicted_time(load, one_each) == 12.0
    assert moe_time.predicted_time(load, copied) == 9.0
    memory_bound = CostModel(replica=ReplicaWork(read_tokens=20.0))
    assert moe_time.predicted_time(load, one_each, memory_bound) == 40.0
    assert moe_time.predicted_time(load, copied, memory_bound) == 60.0


def test_a_slow_rank_lowers_time_balance_where_tokens_are_balanced():
    placement = Placement(np.array([[0, 1]]), num_ranks=2, num_logical_experts=2)
    load = np.full((4, 1, 2), 50.0)
    times, fluid = moe_time.step_times(load, placement), moe_time.fluid_times(load, 2)
    assert moe_time.balance_of(times, fluid) == 1.0
    slow = CostModel(CostCurves.linear(np.array([1e-6, 1.5e-6])))
    # Together they take 100 tokens in 60 us, 60 of them on the fast rank.
    times, fluid = moe_time.step_times(load, placement, slow), moe_time.fluid_times(load, 2, slow)
    assert moe_time.balance_of(times, fluid) == pytest.approx(60 / 75)


def test_less_than_one_token_runs_a_replica_in_that_share_of_the_steps():
    work = moe_time.replica_work(
        np.array([0.0, 0.25, 1.0, 7.0, 9.0]), ReplicaWork(read_tokens=8.0, start_tokens=2.0)
    )
    assert work.tolist() == [0.0, 2.5, 10.0, 10.0, 11.0]
    tiles = moe_time.replica_work(np.array([1.0, 16.0, 17.0]), ReplicaWork(tile_tokens=16.0))
    assert tiles.tolist() == [16.0, 16.0, 32.0]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 2.0**60])
def test_work_that_cannot_be_is_refused(bad):
    with pytest.raises(InvalidInput, match="read_tokens"):
        ReplicaWork(read_tokens=bad)
    with pytest.raises(InvalidInput, match="start_tokens"):
        ReplicaWork(start_tokens=bad)


def test_a_cost_model_with_a_negative_part_is_refused():
    with pytest.raises(InvalidInput, match="fixed"):
        CostModel(fixed=-0.5)
    with pytest.raises(InvalidInput, match="shared_tokens"):
        CostModel(shared_tokens=float("nan"))
    with pytest.raises(InvalidInput, match="fit_error"):
        CostModel(fit_error=float("inf"))


def test_a_cost_model_of_another_fleet_is_refused():
    placement = Placement(np.array([[0, 1]]), num_ranks=2, num_logical_experts=2)
    with pytest.raises(ShapeMismatch, match="3 ranks"):
        moe_time.step_times(np.ones((1, 1, 2)), placement, CostModel(CostCurves.linear(np.ones(3))))


@given(st.integers(1, 4).flatmap(cost_curves), st.integers(0, 3000))
def test_fluid_time_is_the_best_divisible_split(costs, tokens):
    ranks = costs.tile_seconds.shape[0]
    got = moe_time.fluid_times(np.array([[[float(tokens)]]]), ranks, CostModel(costs))[0, 0]
    assert got == pytest.approx(twins.fluid_time(tokens, ranks, costs), rel=1e-6)


def test_even_split_that_fills_a_stair_exactly_does_not_pay_for_the_next():
    # A fifth of 1 plus a fifth of 499 is slightly more than 100 in floating point.
    assert 1 * (1 / 5) + 499 * (1 / 5) > 100
    costs = CostCurves(100, np.array([[1.0, 2.0]] * 5), np.zeros(5))
    placement = Placement(np.array([[0, 1] * 5]), num_ranks=5, num_logical_experts=2)
    assert moe_time.predicted_time(np.array([[[1.0, 499.0]]]), placement, CostModel(costs)) == 1.0
    assert moe_time.predicted_time(np.array([[[1.0, 500.0]]]), placement, CostModel(costs)) == 2.0


def test_faster_ranks_take_more_in_the_fluid_bound():
    costs = CostCurves.linear(np.array([1.0, 3.0]))
    assert moe_time.fluid_bound(np.array([[[400.0]]]), 2, CostModel(costs)) == pytest.approx(300.0)
    assert moe_time.fluid_bound(np.array([[[400.0]]]), 2) == 200.0


@given(scored())
def test_scores_scale_with_the_load_and_add_over_steps(case):
    load, placement, _, split = case
    whole = moe_time.predicted_time(load, placement, TOKENS, split)
    assert moe_time.predicted_time(load * 3, placement, TOKENS, split) == pytest.approx(3 * whole)
    parts = sum(
        moe_time.predicted_time(load[t : t + 1], placement, TOKENS, split) for t in range(len(load))
    )
    assert parts == pytest.approx(whole)


# --- kernels --------------------------------------------------------------------------------------


@given(st.data(), shapes())
def test_each_expert_is_on_one_slot_and_the_worst_rank_has_the_fewest(data, shape):
    placement = data.draw(placements(shape))
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    split = batch_split_kernel(load, placement.phy2log.copy(), shape.num_ranks, True)
    assert split.shape == (*load.shape[:2], placement.num_slots)
    for t in range(load.shape[0]):
        for layer, row in enumerate(placement.phy2log):
            used = np.flatnonzero(split[t, layer])
            assert np.sort(row[used]).tolist() == np.flatnonzero(load[t, layer]).tolist()
            assert split[t, layer][used].tolist() == load[t, layer][row[used]].tolist()
            active = (split[t, layer].reshape(shape.num_ranks, -1) > 0).sum(axis=1)
            assert active.max() == twins.fewest_active(load[t, layer], row, shape.num_ranks)


@pytest.mark.parametrize("dtype", [np.uint32, np.float64])
def test_every_batch_chooses_anew_and_whole_counts_need_no_copy(dtype):
    row = np.array([[0, 1, 2, 0, 3, -1]], np.int32)
    load = np.array([[[6, 1, 1, 1]], [[6, 0, 1, 1]], [[0, 0, 0, 0]]], dtype)
    split = batch_split_kernel(load, row, 2, True)
    assert split.dtype == np.float64
    assert split[:, 0].tolist() == [[0, 1, 1, 6, 1, 0], [6, 0, 1, 0, 1, 0], [0] * 6]


# --- waterfilled work -----------------------------------------------------------------------------


@given(seeds, st.integers(1, 7), st.sampled_from([0.0, 0.1, 3.0, 50.0, 1e-13]))
def test_work_is_conserved_and_no_rank_is_above_peak_and_waterline(seed, ranks, scale):
    rng = np.random.default_rng(seed)
    routed = np.round(rng.lognormal(3, rng.uniform(0, 2), (3, 2, ranks)))
    routed[rng.random(routed.shape) < 0.2] = 0
    shared = scale * rng.integers(0, 40, (3, 2))
    work = waterfilled_work(routed, shared)
    assert (work >= routed).all()
    total = routed.sum(axis=2) + shared
    assert work.sum(axis=2) == pytest.approx(total)
    assert work.max(axis=2) == pytest.approx(np.maximum(routed.max(axis=2), total / ranks))
    for step, layer in np.ndindex(3, 2):
        want = twins.waterfilled(routed[step, layer], shared[step, layer])
        assert work[step, layer] == pytest.approx(want)


def test_shared_work_fills_the_lowest_ranks_first():
    routed = np.array([[[10, 4, 1]]])
    assert waterfilled_work(routed, np.array([[2]])).tolist() == [[[10, 4, 3]]]
    assert waterfilled_work(routed, np.array([[9]])).tolist() == [[[10, 7, 7]]]
    assert waterfilled_work(routed, np.array([[18]])).tolist() == [[[11, 11, 11]]]
    assert waterfilled_work(routed, np.array([[0]])).tolist() == [[[10, 4, 1]]]


# --- Layers in several threads --------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_results_come_in_the_order_of_the_layers(threads):
    layers = [4, 0, 9, 2, 7, 1]
    assert map_layers(lambda layer: 10 * layer, layers, threads) == [10 * one for one in layers]


def test_several_layers_are_worked_on_at_the_same_time():
    together = threading.Barrier(3, timeout=deadline(10))
    assert len(map_layers(lambda _layer: together.wait(), range(3), 3)) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_the_error_of_a_layer_is_raised(threads):
    with pytest.raises(ZeroDivisionError):
        map_layers(lambda layer: 1 // (layer - 3), range(6), threads)
