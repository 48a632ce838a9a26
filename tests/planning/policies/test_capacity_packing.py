import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.capacity_packing import interleaved_capacity, pack_copies
from tests.strategies import seeds, shapes, topologies


@given(shapes(pooled=False), seeds)
def test_packing_places_every_copy_once_and_never_twice_on_a_rank(shape, seed):
    rng = np.random.default_rng(seed)
    layers, experts, ranks = shape.num_layers, shape.num_logical_experts, shape.num_ranks
    load = rng.random((layers, experts))
    capacity = np.full((layers, ranks), shape.slots_per_rank)
    copies = np.ones((layers, experts), np.int32)
    for _ in range(shape.num_redundant):
        expert = int(rng.integers(experts))
        if copies[0, expert] < ranks:
            copies[:, expert] += 1
    rows = pack_copies(load, copies, capacity, shape.slots_per_rank)
    placement = Placement(rows, ranks, experts)
    placement.check(shape)
    assert (placement.logcnt >= 1).all() and (placement.logcnt <= copies).all()


def test_more_copies_than_places_are_refused():
    with pytest.raises(InfeasiblePlan, match="layer 0: 3 copies exceed 2 places"):
        pack_copies(np.ones((1, 2)), np.array([[2, 1]], np.int32), np.array([[1, 1]]), 1)


def test_figure_7_interleaves_layer_1_on_ranks_0_and_2_and_layer_2_on_1_and_3():
    """Two nodes of two ranks, four experts a layer; every rank ends with R = 2 replicas."""
    capacity = interleaved_capacity(4 + np.array([2, 2, 4, 0]), Topology((0, 0, 1, 1)))
    assert (capacity - 1).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert (capacity.sum(axis=0) == 4 + 2).all()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
def test_capacity_is_even_inside_layers_and_over_them(copies, data):
    ranks = data.draw(st.integers(1, 8))
    topology = data.draw(topologies(ranks))
    capacity = interleaved_capacity(np.array(copies), topology)
    assert capacity.sum(axis=1).tolist() == copies
    assert (np.ptp(capacity, axis=1) <= 1).all()
    assert np.ptp(capacity.sum(axis=0)) <= 1


@given(st.integers(1, 8), st.data())
def test_odd_copies_of_the_first_layer_spread_over_equal_nodes(odd, data):
    topology = data.draw(topologies(8, equal_nodes=True))
    capacity = interleaved_capacity(np.array([odd]), topology)[0]
    by_node = np.bincount(np.array(topology.node_of_rank), weights=capacity)
    assert np.ptp(by_node) <= 1


def test_negative_copies_are_refused():
    with pytest.raises(InvalidInput, match="a layer holds -1 copies"):
        interleaved_capacity(np.array([2, -1]), Topology.single_node(2))
