import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.planning.problem.waterfill_times import waterfilled_work
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


@pytest.mark.parametrize(
    ("routed", "shared"),
    [((2, 3), (2, 3)), ((2, 3, 4), (2, 4)), ((2, 3, 4), (2, 3, 4)), ((2, 3, 0), (2, 3))],
)
def test_arrays_of_other_shapes_are_refused(routed, shared):
    with pytest.raises(ShapeMismatch, match=r"\(T, L, R\)"):
        waterfilled_work(np.ones(routed), np.ones(shared))


def test_values_that_are_no_work_are_refused():
    good = np.ones((1, 1, 2))
    with pytest.raises(InvalidInput, match="routed work holds 1 negative"):
        waterfilled_work(good * [1, -1], np.ones((1, 1)))
    with pytest.raises(InvalidInput, match="shared work holds 1 values that are not finite"):
        waterfilled_work(good, np.full((1, 1), np.nan))
    assert waterfilled_work(np.ones((0, 2, 3)), np.ones((0, 2))).shape == (0, 2, 3)
