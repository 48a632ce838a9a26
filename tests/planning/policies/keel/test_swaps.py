import numpy as np
import pytest
from hypothesis import given

from evenkeel_moe.planning.policies.keel.state import refresh
from evenkeel_moe.planning.policies.keel.swaps import best_swaps
from tests.planning.policies.keel.searches import LEAST, MANY, every_swap, is_exact, searches


@given(searches())
def test_no_swap_gains_more_than_the_best_one_found(drawn):
    search, price = drawn
    for i, layer in enumerate(search.layers):
        refresh(layer, search.objective)
        gains, _, _ = best_swaps(layer, search.objective, search.rooms[i], price, MANY, LEAST, MANY)
        brute = max([0.0, *every_swap(search, i, price)])
        assert (np.diff(gains) <= 0).all()
        assert max(gains, default=0.0) <= brute + 1e-9
        if is_exact(search):
            assert max(gains, default=LEAST) == pytest.approx(max(brute, LEAST), rel=1e-6, abs=2e-9)
