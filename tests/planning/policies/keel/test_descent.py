from hypothesis import given

from evenkeel_moe.planning.policies.keel.descent import descend
from evenkeel_moe.planning.policies.keel.state import refresh
from tests.planning.policies.keel.searches import LEAST, MANY, searches


@given(searches())
def test_a_descent_ends_and_does_not_rise(drawn):
    search, price = drawn
    objective, most = search.objective, 1_000_000
    for i, layer in enumerate(search.layers):
        before = refresh(layer, objective)
        room, spare = search.rooms[i], search.spare(i)
        copies, _, used = descend(layer, objective, room, spare, price, MANY, LEAST, most)
        assert used < most
        if price == 0.0 or search.problem.objective.cross_node_factor == 1.0:
            assert refresh(layer, objective) + price * copies <= before + LEAST
