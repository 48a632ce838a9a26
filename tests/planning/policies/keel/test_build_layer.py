"""The prices of copies follow from the current placement, and layers share working memory."""

import numpy as np
from hypothesis import given

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.keel.build_layer import working_memory
from tests.planning.policies.keel.searches import searches


def _ranks_of(row, ranks):
    """Return {expert: ranks that hold it} of one layer's slots."""
    found = {}
    for slot, expert in enumerate(row.tolist()):
        if expert >= 0:
            found.setdefault(expert, set()).add(slot // (len(row) // ranks))
    return found


@given(searches())
def test_a_copy_costs_nothing_where_the_expert_is_and_more_from_another_node(drawn):
    search, _ = drawn
    problem = search.problem
    nodes, ranks = problem.topology.node_of_rank, problem.shape.num_ranks
    for row, layer in zip(problem.current.phy2log, search.layers, strict=True):
        found = _ranks_of(row, ranks)
        for expert in range(problem.shape.num_logical_experts):
            homes = found.get(expert, set())
            near = {nodes[rank] for rank in homes}
            far = problem.objective.cross_node_factor
            prices = [
                0.0 if rank in homes else 1.0 if nodes[rank] in near else far
                for rank in range(ranks)
            ]
            assert layer.copy_price[expert].tolist() == prices
            assert layer.had[expert].tolist() == [rank in homes for rank in range(ranks)]
            assert layer.homes[expert] == len(homes)
            away = [price for rank, price in enumerate(prices) if rank not in homes]
            assert layer.cheapest[expert] == min(away, default=0.0)
        assert layer.dearest[0] == layer.copy_price.max()


@given(searches())
def test_layers_share_what_is_computed_anew(drawn):
    search, _ = drawn
    names = working_memory(1, 1, 1)._fields
    for name in names:
        assert len({id(getattr(layer, name)) for layer in search.layers}) == 1, name
    assert isinstance(search.placement(), Placement)
    held = [layer.held for layer in search.layers]
    assert not any(np.shares_memory(a, b) for a, b in zip(held, held[1:], strict=False))
