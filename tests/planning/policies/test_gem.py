import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gem_setups import GEM_SETUPS, gem_setup
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.gem import (
    GemOptions,
    cost_table,
    initial_mapping,
    plan_gem,
    refine_mapping,
    search_layers,
)
from evenkeel_moe.planning.problem import metrics, moe_time
from tests.planning.builders import a_problem
from tests.strategies import cost_curves, loads, shapes


def problem_of(load, ranks, costs=None, **fields):
    _, layers, experts = load.shape
    shape = ModelShape(layers, experts, ranks, -(-experts // ranks), 1, 100)
    return a_problem(load, shape, cost=CostModel(costs), **fields)


@given(shapes(), st.data())
def test_every_expert_gets_one_slot_and_ranks_the_same_number(shape, data):
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    problem = a_problem(load, shape, max_evaluations=500)
    proposal = plan_gem(problem)
    proposal.placement.check(shape)
    assert (proposal.placement.logcnt == 1).all()
    held = (proposal.placement.phy2log.reshape(shape.num_layers, shape.num_ranks, -1) >= 0).sum(
        axis=2
    )
    assert held.max() - held.min() <= 1
    assert np.ptp(held.sum(axis=0)) <= 1


@given(st.integers(2, 6), st.integers(2, 12), st.integers(1, 4), st.integers(0, 2), st.data())
def test_pools_that_just_hold_every_expert_are_not_overrun(ranks, experts, layers, spare, data):
    """If experts do not divide over ranks, the ranks with one more change from layer to layer."""
    fewest = -(-experts // ranks)
    pool = -(-layers * experts // ranks) + spare
    shape = ModelShape(layers, experts, ranks, fewest + 1, 1, 100, pool_slots_per_rank=pool)
    load = data.draw(loads(layers, experts))
    placement = plan_gem(a_problem(load, shape, max_evaluations=500)).placement
    placement.check(shape)
    assert (placement.logcnt == 1).all()
    if pool >= layers * fewest:
        owned = ModelShape(layers, experts, ranks, fewest + 1, 1, 100)
        assert plan_gem(a_problem(load, owned, max_evaluations=500)).placement == placement


def test_more_restarts_never_score_worse_and_the_budget_replays():
    load = np.random.default_rng(5).integers(0, 100, (8, 3, 16)).astype(float)
    few = plan_gem(problem_of(load, 4), GemOptions(restarts=1))
    many = plan_gem(problem_of(load, 4))
    assert many.score <= few.score
    assert many.score < few.score * 0.999  # restarts find something on this load
    again = plan_gem(problem_of(load, 4, max_evaluations=many.evaluations))
    assert again.placement == many.placement


def test_every_restart_runs_on_traffic_of_a_recorded_traces_size():
    load = np.random.default_rng(7).gamma(2.0, 20.0, (100, 6, 64)).round()
    shape = ModelShape(6, 64, 8, 9, 6, 100)
    problem = a_problem(load, shape)
    tokens, table = cost_table(problem.load, 8, problem.objective.cost)
    noise = np.ones((GemOptions().restarts, 6, 64))
    capacity = np.full((6, 8), 8)
    *_, one = search_layers(tokens, noise[:1], capacity, table, GemOptions().least_drop, 1 << 60)
    *_, every = search_layers(tokens, noise, capacity, table, GemOptions().least_drop, 1 << 60)
    assert every == 30 * one
    assert plan_gem(problem).evaluations > 0.9 * every > 2_000_000


def test_its_own_bound_holds_beside_the_one_asked_for(monkeypatch):
    monkeypatch.setattr("evenkeel_moe.planning.policies.gem._MOST_WORK", 8)
    load = np.random.default_rng(5).integers(0, 100, (8, 3, 16)).astype(float)
    once = plan_gem(problem_of(load, 4), GemOptions(restarts=1))
    assert plan_gem(problem_of(load, 4, max_evaluations=1 << 60)).evaluations == once.evaluations


def test_a_slow_rank_gets_less_load():
    load = np.random.default_rng(6).integers(50, 100, (6, 2, 32)).astype(float)
    costs = gem_setup("high", 4, tile_tokens=10, tiles=100)
    by_rank = metrics.rank_load(load, plan_gem(problem_of(load, 4, costs)).placement).sum(
        axis=(0, 1)
    )
    assert by_rank[0] < 0.92 * by_rank[1:].mean()


def test_parts_of_tokens_count_and_whole_ones_stay_exact():
    load = np.array([[[0.4, 0.3, 0.05, 0.05]]])
    assert plan_gem(problem_of(load, 2)).score == pytest.approx(0.45)
    mixed = np.array([[[64.0, 0.5, 7.0, 0.3]]])
    units, table = cost_table(mixed, 2, CostModel())
    taken = table[0, units[0, :, 0]]
    assert taken[:3].tolist() == [64.0, 0.5, 7.0] and taken[3] == pytest.approx(0.3, rel=1e-2)
    assert plan_gem(problem_of(load * 5e-324 / 0.05, 2)).score >= 0.0


def test_setups_have_the_spread_of_the_paper():
    for name, slowest in (("low", 1.0), ("moderate", 0.88), ("high", 0.88)):
        costs = gem_setup(name, 4, tile_tokens=64, tiles=8)
        speed = costs.tile_seconds[:, 0].min() / costs.tile_seconds[:, 0]
        assert speed.min() == pytest.approx(slowest)
        assert speed.max() == pytest.approx(1.0)
        assert len(np.unique(speed.round(6))) == {"low": 1, "moderate": 4, "high": 2}[name]
    assert set(GEM_SETUPS) == {"low", "moderate", "high"}


def test_what_it_refuses():
    with pytest.raises(InvalidInput, match="unknown set-up 'huge'"):
        gem_setup("huge", 4, tile_tokens=1, tiles=1)
    with pytest.raises(InvalidInput, match="restarts is 0"):
        GemOptions(restarts=0)
    shape = ModelShape(1, 3, 2, 2, 1, 100)
    assert plan_gem(a_problem(np.ones((1, 1, 3)), shape)).score == 2.0


# --- kernels --------------------------------------------------------------------------------------


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
