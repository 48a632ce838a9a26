import pytest
from hypothesis import given

from evenkeel_moe.planning.policies.keel.replacements import best_replacement
from evenkeel_moe.planning.policies.keel.state import refresh
from tests.planning.policies.keel.searches import (
    LEAST,
    MANY,
    every_replacement,
    is_exact,
    searches,
)


@given(searches())
def test_no_replacement_gains_more_than_the_best_one_found(drawn):
    search, price = drawn
    for i, layer in enumerate(search.layers):
        refresh(layer, search.objective)
        room, spare = search.rooms[i], search.spare(i)
        slot, expert, gain, _, _ = best_replacement(
            layer, search.objective, room, spare, price, MANY, LEAST, MANY
        )
        brute = max([0.0, *every_replacement(search, i, price)])
        if slot >= 0:
            assert layer.row[slot] != expert
            assert gain <= brute + 1e-9
        # With the sharp norm the two halves of a replacement are computed one after the other,
        # which gives no bound.
        if is_exact(search) and not search.objective.quick:
            assert gain == pytest.approx(max(brute, LEAST), rel=1e-6, abs=2e-9)
