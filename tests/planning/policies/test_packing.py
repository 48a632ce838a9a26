import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.policies.packing import balanced_packing
from tests.planning import twins
from tests.strategies import seeds


@given(st.integers(1, 6), st.integers(1, 5), seeds)
def test_packing_matches_the_twin(packs, each, seed):
    weight = np.random.default_rng(seed).integers(0, 20, (3, packs * each)).astype(np.float32)
    index, place = balanced_packing(weight, packs)
    for row in range(3):
        want = twins.pack(weight[row], packs)
        assert (index[row].tolist(), place[row].tolist()) == (want[0], want[1])


def test_items_that_do_not_divide_over_the_packs_are_refused():
    with pytest.raises(InvalidInput, match="5 items do not divide over 2 packs"):
        balanced_packing(np.ones((1, 5), np.float32), 2)
