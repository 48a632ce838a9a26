import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.planning.problem.moe_time import waterfilled_work
from tests.planning import twins
from tests.strategies import seeds


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
