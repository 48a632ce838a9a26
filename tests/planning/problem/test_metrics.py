import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import SplitModel, slot_load, slot_shares
from tests.planning import twins
from tests.strategies import loads, placements, seeds, shapes, topologies


@st.composite
def scored(draw):
    """A window, a placement and a dispatcher of fixed shares, of one deployment."""
    shape = draw(shapes())
    load = draw(loads(shape.num_layers, shape.num_logical_experts))
    dispatch = draw(st.sampled_from([model for model in DispatchModel if not model.per_batch]))
    split = SplitModel(dispatch, draw(topologies(shape.num_ranks)))
    return load, draw(placements(shape)), split


def test_one_rank_with_twice_the_load_is_not_balanced():
    # The wrong axis: taken over experts instead of ranks this reads 1.0 (vllm#36304).
    placement = Placement(np.array([[0, 1, 2, 3]]), num_ranks=2, num_logical_experts=4)
    load = np.array([[[10.0, 10.0, 20.0, 20.0]]])
    rank_load = metrics.rank_load(load, placement)
    assert rank_load.tolist() == [[[20.0, 40.0]]]
    assert metrics.balancedness(rank_load).tolist() == [[0.75]]


def test_layers_and_steps_that_mirror_each_other_do_not_cancel():
    # Summed over layers or steps first, both ranks would look equal.
    placement = Placement(np.array([[0, 1], [0, 1]]), num_ranks=2, num_logical_experts=2)
    load = np.array([[[30.0, 10.0], [10.0, 30.0]], [[10.0, 30.0], [30.0, 10.0]]])
    rank_load = metrics.rank_load(load, placement)
    assert metrics.balancedness_mean(rank_load) == pytest.approx(2 / 3)
    assert metrics.balancedness_worst(rank_load) == pytest.approx(2 / 3)
    assert metrics.balancedness(rank_load.sum(axis=0)).tolist() == [1.0, 1.0]


def test_zero_load_has_no_balance():
    quiet = np.zeros((2, 3, 4))
    assert np.isnan(metrics.balancedness(quiet)).all()
    assert np.isnan(metrics.balancedness_mean(quiet))
    assert np.isnan(metrics.balancedness_worst(quiet))


def test_quiet_steps_and_layers_are_left_out_of_the_mean():
    rank_load = np.array(
        [[[1.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[2.0, 2.0], [0.0, 0.0]]]
    )
    by_layer = metrics.balancedness_by_layer(rank_load)
    assert by_layer[0] == pytest.approx((2 / 3 + 1) / 2)
    assert np.isnan(by_layer[1])
    assert metrics.balancedness_mean(rank_load) == by_layer[0]


def test_worst_is_a_layer_not_a_step():
    rank_load = np.array([[[4.0, 4.0], [1.0, 3.0]], [[1.0, 3.0], [1.0, 3.0]]])
    assert metrics.balancedness_worst(rank_load) == pytest.approx(2 / 3)
    assert metrics.balancedness_mean(rank_load) == pytest.approx((5 / 6 + 2 / 3) / 2)


def test_tokens_without_a_holder_are_refused_not_lost():
    placement = Placement(np.array([[0, -1]]), num_ranks=2, num_logical_experts=2)
    with pytest.raises(InfeasiblePlan, match="layer 0 expert 1") as error:
        metrics.rank_load(np.ones((1, 1, 2)), placement)
    assert error.value.reason is Reason.EXPERT_WITHOUT_REPLICA
    assert metrics.rank_load(np.array([[[5.0, 0.0]]]), placement).tolist() == [[[5.0, 0.0]]]


def test_other_shapes_are_refused():
    placement = Placement(np.array([[0, 1]]), num_ranks=2, num_logical_experts=2)
    with pytest.raises(ShapeMismatch, match=r"\(T, 1, 2\)"):
        metrics.rank_load(np.ones((1, 2, 2)), placement)
    with pytest.raises(ShapeMismatch, match=r"\(T, L, R\)"):
        metrics.balancedness_mean(np.ones((2, 2)))


@given(scored())
def test_rank_load_keeps_every_token_and_matches_the_twin(case):
    load, placement, split = case
    rank_load = metrics.rank_load(load, placement, split)
    assert rank_load.sum(axis=2) == pytest.approx(load.sum(axis=2))
    assert (rank_load >= 0).all()
    balance = metrics.balancedness(rank_load)
    routed = load.sum(axis=2) > 0
    assert ((balance[routed] > 0) & (balance[routed] <= 1)).all()
    assert np.isnan(balance[~routed]).all()
    for t in range(load.shape[0]):
        for layer, row in enumerate(placement.phy2log):
            got = rank_load[t, layer]
            even = np.ones((placement.num_ranks, placement.num_logical_experts))
            shares = (
                twins.shares_even(row)
                if split.dispatch is not DispatchModel.NEAREST
                else twins.shares_nearest(
                    row, placement.num_ranks, split.topology.node_of_rank, even
                )
            )
            assert got == pytest.approx(
                twins.rank_load(load[t, layer], row, shares, placement.num_ranks)
            )


@given(st.data(), shapes())
def test_rank_totals_are_the_sums_over_slots(data, shape):
    placement = data.draw(placements(shape))
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    split = SplitModel(
        data.draw(st.sampled_from(DispatchModel)), data.draw(topologies(shape.num_ranks))
    )
    by_slot = slot_load(load, placement, split)
    by_rank = by_slot.reshape(*by_slot.shape[:2], shape.num_ranks, -1)
    assert metrics.rank_load(load, placement, split) == pytest.approx(by_rank.sum(axis=3))
    tokens, active = metrics.rank_totals(load, placement, split)
    assert tokens == pytest.approx(by_rank.sum(axis=(1, 3)))
    assert active == pytest.approx(np.minimum(by_rank, 1.0).sum(axis=(1, 3)))


# --- token split ----------------------------------------------------------------------------------


@given(st.data(), shapes(), seeds)
def test_shares_of_an_expert_sum_to_one_and_match_the_twin(data, shape, seed):
    placement = data.draw(placements(shape))
    topology = data.draw(topologies(shape.num_ranks))
    size = (shape.num_ranks, shape.num_layers, shape.num_logical_experts)
    source = np.random.default_rng(seed).integers(0, 3, size).astype(float)
    nearest = DispatchModel.NEAREST
    for split in (
        SplitModel(),
        SplitModel(nearest, topology, source),
        SplitModel(nearest, topology),  # Tokens start evenly on all ranks.
    ):
        start = np.ones(size) if split.source_load is None else source
        shares = slot_shares(placement, split)
        for layer, row in enumerate(placement.phy2log):
            total = np.bincount(row[row >= 0], shares[layer][row >= 0], shape.num_logical_experts)
            assert total == pytest.approx(np.ones(shape.num_logical_experts))
            assert (shares[layer][row < 0] == 0).all()
            twin = (
                twins.shares_even(row)
                if split.dispatch is DispatchModel.EVEN
                else twins.shares_nearest(
                    row, shape.num_ranks, topology.node_of_rank, start[:, layer]
                )
            )
            assert shares[layer] == pytest.approx(np.array(twin))


def test_nearest_shares_of_even_sources_take_no_table_of_ranks_and_experts():
    placement = Placement.initial(ModelShape(64, 4096, 2048, 2, 1, 1))
    tracemalloc.start()
    shares = slot_shares(placement, SplitModel(DispatchModel.NEAREST))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (shares == 1.0).all()
    assert peak < 64 << 20, "a float for each rank, layer and expert would be 4 GiB"


def test_nearest_prefers_own_rank_then_own_node_then_all():
    placement = Placement(np.array([[0, 1, 0, 2]]), num_ranks=4, num_logical_experts=3)
    source = np.zeros((4, 1, 3))
    source[1, 0, 0] = 30.0  # rank 1 has no replica, its node has the one of rank 0
    source[2, 0, 0] = 10.0  # rank 2 has its own replica
    split = SplitModel(DispatchModel.NEAREST, Topology((0, 0, 1, 1)), source)
    assert slot_shares(placement, split).tolist() == [[0.75, 1.0, 0.25, 1.0]]
    apart = SplitModel(DispatchModel.NEAREST, Topology((0, 1, 2, 3)), source)
    assert slot_shares(placement, apart).tolist() == [[0.375, 1.0, 0.625, 1.0]]


@given(st.data(), shapes())
def test_optimal_split_has_the_least_peak_and_no_more_than_even(data, shape):
    placement = data.draw(placements(shape))
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    optimal = slot_load(load, placement, SplitModel(DispatchModel.OPTIMAL))
    even = slot_load(load, placement)
    assert (optimal >= 0).all()
    for t in range(load.shape[0]):
        for layer, row in enumerate(placement.phy2log):
            filled = row >= 0
            for split in (optimal, even):
                total = np.bincount(row[filled], split[t, layer][filled], shape.num_logical_experts)
                assert total == pytest.approx(load[t, layer])
            by_rank = optimal[t, layer].reshape(shape.num_ranks, -1).sum(axis=1)
            assert by_rank.max() == pytest.approx(
                twins.least_peak(load[t, layer], row, shape.num_ranks)
            )


def test_optimal_split_passes_load_along_a_chain_of_ranks():
    # Rank 0 is full of expert 0. It can be relieved only through experts 1 and 2, each of which is
    # on two ranks.
    row = np.array([[0, 1, 1, 2, 2, -1]])
    placement = Placement(row, num_ranks=3, num_logical_experts=3)
    split = slot_load(
        np.array([[[60.0, 50.0, 10.0]]]), placement, SplitModel(DispatchModel.OPTIMAL)
    )
    assert split[0, 0].reshape(3, 2).sum(axis=1).max() == pytest.approx(60.0)
    split = slot_load(
        np.array([[[30.0, 50.0, 10.0]]]), placement, SplitModel(DispatchModel.OPTIMAL)
    )
    assert split[0, 0].reshape(3, 2).sum(axis=1) == pytest.approx([40.0, 40.0, 10.0])
    split = slot_load(np.array([[[0.0, 50.0, 40.0]]]), placement, SplitModel(DispatchModel.OPTIMAL))
    assert split[0, 0].reshape(3, 2).sum(axis=1) == pytest.approx([30.0, 30.0, 30.0])


def test_optimal_has_no_fixed_shares():
    placement = Placement(np.array([[0]]), num_ranks=1, num_logical_experts=1)
    with pytest.raises(InvalidInput, match="slot_load"):
        slot_shares(placement, SplitModel(DispatchModel.OPTIMAL))


def test_sources_of_another_deployment_are_refused():
    placement = Placement(np.array([[0, 1]]), num_ranks=2, num_logical_experts=2)
    with pytest.raises(ShapeMismatch, match="3 ranks"):
        slot_shares(placement, SplitModel(DispatchModel.NEAREST, Topology.single_node(3)))
    with pytest.raises(ShapeMismatch, match=r"\(2, 1, 2\)"):
        slot_shares(placement, SplitModel(DispatchModel.NEAREST, None, np.ones((2, 2, 2))))
