import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.planning.policies.copy_prices import copy_prices
from tests.strategies import placements, shapes


@given(st.data())
def test_a_copy_costs_nothing_at_home_one_on_its_node_and_the_factor_elsewhere(data):
    shape = data.draw(shapes())
    row = data.draw(placements(shape)).phy2log[0]
    ranks = shape.num_ranks
    nodes = np.sort(np.array([data.draw(st.integers(0, 2)) for _ in range(ranks)], np.int64))
    prices = copy_prices(row.copy(), shape.num_logical_experts, nodes, 2.5)
    held = [set(part.tolist()) for part in row.reshape(ranks, -1)]
    for expert in range(shape.num_logical_experts):
        for rank in range(ranks):
            near = any(expert in held[r] for r in range(ranks) if nodes[r] == nodes[rank])
            expected = 0.0 if expert in held[rank] else 1.0 if near else 2.5
            assert prices[expert, rank] == expected
