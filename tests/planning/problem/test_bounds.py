import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.planning.problem import bounds
from tests.planning import twins
from tests.strategies import loads, shapes


@given(shapes(pooled=False), st.data())
def test_hottest_copy_matches_the_twin(shape, data):
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    redundant = shape.num_slots - shape.num_logical_experts
    got = bounds.hottest_copy(load, redundant, shape.num_ranks)
    for t in range(load.shape[0]):
        for layer in range(shape.num_layers):
            want = twins.hottest_copy(load[t, layer], redundant, shape.num_ranks)
            mean = load[t, layer].sum() / shape.num_ranks
            assert got[t, layer] == pytest.approx(max(want, mean))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(60, 300))
def test_the_hottest_copy_of_many_slots_is_that_of_copies_made_one_by_one(tokens, redundant):
    load = np.array(tokens, float) * 7.0
    got = bounds.hottest_copy(load.reshape(1, 1, -1), redundant, 1000)
    assert got[0, 0] == max(twins.hottest_copy(load, redundant, 1000), load.sum() / 1000)


def test_bound_sees_an_expert_too_hot_for_its_replicas():
    # One spare slot: two copies of 45 tokens stay under the mean rank load.
    assert bounds.bound_times(np.array([[[90.0, 10.0]]]), 2, 1).tolist() == [[50.0]]
    # A third rank: now the two copies are above the mean, until there is a third.
    assert bounds.bound_times(np.array([[[90.0, 10.0]]]), 3, 1).tolist() == [[45.0]]
    assert bounds.bound_times(np.array([[[90.0, 10.0]]]), 3, 2) == pytest.approx(100 / 3)
    # No spare slot: one rank carries all 90.
    assert bounds.bound_times(np.array([[[90.0, 10.0]]]), 2, 0).tolist() == [[90.0]]
    with pytest.raises(ShapeMismatch):
        bounds.hottest_copy(np.ones((2, 2)), 0, 1)
