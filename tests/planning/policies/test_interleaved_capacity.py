import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.interleaved_capacity import interleaved_capacity
from tests.strategies import topologies


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
