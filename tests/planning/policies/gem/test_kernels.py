import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.planning.policies.gem.kernels import initial_mapping, refine_mapping
from evenkeel_moe.planning.policies.gem.policy import cost_table
from evenkeel_moe.planning.problem import moe_time
from tests.strategies import cost_curves, loads


def plain_refine(load, rank_of, costs, least_drop):
    """Run Algorithm 3 as printed: score every swap from nothing."""
    ranks = costs.slope_s_per_token.shape[0]

    def step_costs(mapping):
        total = np.zeros((load.shape[1], ranks))
        for expert, rank in enumerate(mapping):
            total[:, rank] += load[expert]
        return moe_time.rank_times(total, CostModel(costs)).max(axis=1)

    rank_of = rank_of.copy()
    while True:
        now = step_costs(rank_of)
        best, pair = 0.0, None
        for i, j in itertools.combinations(range(ranks), 2):
            for a in np.nonzero(rank_of == i)[0]:
                for b in np.nonzero(rank_of == j)[0]:
                    swapped = rank_of.copy()
                    swapped[a], swapped[b] = j, i
                    drop = sum(now - step_costs(swapped))
                    if drop > best:
                        best, pair = drop, (a, b)
        if pair is None:
            return rank_of
        a, b = pair
        rank_of[a], rank_of[b] = rank_of[b], rank_of[a]
        if best < least_drop * now.sum():
            return rank_of


@given(loads(1, 7, max_steps=5), st.integers(2, 4), st.data())
def test_refinement_takes_the_swaps_of_the_plain_search(load, ranks, data):
    costs = data.draw(cost_curves(ranks))
    units, table = cost_table(load, ranks, CostModel(costs))
    tokens = units[0]
    order = np.argsort(-tokens.sum(axis=1), kind="mergesort")
    start = initial_mapping(tokens, order, np.full(ranks, -(-7 // ranks)), table)
    ours = start.copy()
    score, _ = refine_mapping(tokens, ours, table, 0.001)
    plain = plain_refine(tokens, start, costs, 0.001)
    assert ours.tolist() == plain.tolist()
    total = np.zeros((tokens.shape[1], ranks))
    for expert, rank in enumerate(ours):
        total[:, rank] += tokens[expert]
    assert score == pytest.approx(
        moe_time.rank_times(total, CostModel(costs)).max(axis=1).sum(), abs=1e-9
    )


@given(loads(1, 7, max_steps=5), st.integers(2, 4), st.data())
def test_first_mapping_puts_each_expert_where_the_partial_score_grows_least(load, ranks, data):
    costs = data.draw(cost_curves(ranks))
    units, table = cost_table(load, ranks, CostModel(costs))
    tokens = units[0]
    order = np.argsort(-tokens.sum(axis=1), kind="mergesort")
    capacity = -(-7 // ranks)
    rank_of = initial_mapping(tokens, order, np.full(ranks, capacity), table)
    assert (np.bincount(rank_of, minlength=ranks) <= capacity).all()
    total, held = np.zeros((tokens.shape[1], ranks)), np.zeros(ranks, int)
    for expert in order:
        grown = {}
        for rank in np.nonzero(held < capacity)[0]:
            trial = total.copy()
            trial[:, rank] += tokens[expert]
            grown[rank] = moe_time.rank_times(trial, CostModel(costs)).max(axis=1).sum()
        chosen = rank_of[expert]
        assert grown[chosen] == pytest.approx(min(grown.values()))
        total[:, chosen] += tokens[expert]
        held[chosen] += 1
