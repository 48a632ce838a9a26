import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, ShapeMismatch
from evenkeel_moe.model.placement import EMPTY
from evenkeel_moe.planning.policies.replication import replicate_experts
from tests.planning import twins
from tests.strategies import seeds


@given(st.integers(1, 40), st.integers(1, 60), seeds)
def test_replication_matches_the_twin(experts, extra, seed):
    weight = np.random.default_rng(seed).integers(1, 50, (3, experts)).astype(np.float32)
    logical, copies = replicate_experts(weight, experts + extra)
    for row in range(3):
        want, count = twins.replicate(weight[row], experts + extra)
        assert logical[row].tolist() == want
        assert copies[row].tolist() == count.tolist()


def test_copies_are_bounded():
    weight = np.array([[90.0, 10.0, 1.0]], np.float32)
    assert replicate_experts(weight, 7, max_copies=3)[1].tolist() == [[3, 3, 1]]
    logical, copies = replicate_experts(weight, 9, max_copies=2)
    assert copies.tolist() == [[2, 2, 2]]
    assert logical[0, 6:].tolist() == [EMPTY] * 3


def test_rows_of_one_dimension_and_too_few_slots_are_refused():
    with pytest.raises(ShapeMismatch):
        replicate_experts(np.ones(3, np.float32), 3)
    with pytest.raises(InfeasiblePlan, match="2 slots cannot hold one copy each of 3 experts"):
        replicate_experts(np.ones((1, 3), np.float32), 2)
