"""The search over numbers of copies, for ranks with one slot each."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.cost import CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel import policy
from evenkeel_moe.planning.policies.keel.copy_counts import CountSearch
from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS
from evenkeel_moe.planning.policies.keel.window import counts_suffice, search_window
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.schedule.relabel import count_moves
from evenkeel_moe.settings import Settings
from tests.strategies import seeds


def problem_of(seed, layers, experts, ranks, steps=24, *, current=True, **kwargs):
    rng = np.random.default_rng(seed)
    shape = ModelShape(layers, experts, ranks, 1, 1, 1000)
    popularity = rng.lognormal(0.0, 0.8, (layers, experts))
    load = rng.poisson(popularity * 64, (steps, layers, experts)).astype(float)
    return PlacementProblem(
        load,
        shape,
        Topology(tuple(rank // 4 for rank in range(ranks))),
        current=Placement.initial(shape) if current else None,
        **kwargs,
    )


def search_of(problem, start=None):
    weights = np.full(len(problem.load), 1 / len(problem.load))
    window = search_window(problem, weights)
    start = start or problem.current or Placement.initial(problem.shape)
    return CountSearch(problem, start, window, DEFAULT_OPTIONS), window


def norm(problem, window, copies):
    """The norm of the search, from its definition."""
    times = window.tokens[0] * window.unit_tokens / window.unit_cost / copies[:, None]
    return window.weights @ (copies[:, None] * times**8).sum(axis=0) ** (1 / 8)


@pytest.mark.parametrize("price", [None, 0.02, 0.3, 1.0])
def test_no_other_counts_are_much_better(price):
    worst = 0.0
    for seed in range(40):
        problem = problem_of(seed, 1, 4, 8, 6, current=price is not None)
        rng = np.random.default_rng(seed)
        row = np.append(np.arange(4), rng.integers(0, 4, 4)).astype(np.int32)
        search, window = search_of(problem, Placement(row[None], 8, 4))
        search.search(price or 0.0)
        had = Placement.initial(problem.shape).logcnt[0]

        def cost(copies, problem=problem, window=window, had=had, price=price):
            paid = np.maximum(copies - had, 0).sum()
            return norm(problem, window, copies) + (price or 0.0) * paid

        every = [np.array(c) for c in product(range(1, 6), repeat=4) if sum(c) <= 8]
        worst = max(worst, cost(search.copies[0]) / min(map(cost, every)))
    assert worst < 1.0005


@given(
    seed=seeds,
    experts=st.integers(2, 20),
    further=st.integers(0, 20),
    budget=st.integers(0, 20),
    copy_cost=st.sampled_from([0.0, 1e3, 1e6]),
)
def test_every_expert_is_placed_within_the_budget_and_the_plan_pays(
    seed, experts, further, budget, copy_cost
):
    problem = problem_of(
        seed, 3, experts, experts + further, objective=Objective(copy_cost=copy_cost)
    )
    assert counts_suffice(problem)
    found = policy.plan_keel(replace(problem, replica_budget=min(budget, further)))
    copies = found.placement.logcnt
    assert copies.min() >= 1
    assert copies.sum(axis=1).max() <= experts + min(budget, further)
    assert found.numbers["copies"] == count_moves(problem.current, found.placement)
    if budget >= further:
        assert found.score <= moe_time.score(problem, problem.current) * (1 + 1e-9)
    threads = policy.plan_keel(
        replace(problem, replica_budget=min(budget, further), threads=3)
    ).placement
    assert (threads.phy2log == found.placement.phy2log).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_general_search_finds_nothing_better(monkeypatch, seed):
    problem = problem_of(seed, 4, 24, 40)
    later = replace(problem, load=problem.load[:, :, ::-1].copy())
    counted = policy.plan_keel(problem)
    drifted = policy.plan_keel(replace(later, current=counted.placement))
    for module in ("policy", "window"):
        path = f"evenkeel_moe.planning.policies.keel.{module}.counts_suffice"
        monkeypatch.setattr(path, lambda _problem: False)
    for one, at in ((counted, problem), (drifted, replace(later, current=counted.placement))):
        general = policy.plan_keel(at)
        assert one.score <= 1.002 * general.score
        assert one.numbers["copies"] <= general.numbers["copies"] + 2


def test_few_copies_are_the_best_ones_and_a_search_keeps_its_allowance():
    problem = problem_of(3, 2, 16, 32)
    few, _ = search_of(problem)
    few.search(100.0)
    assert count_moves(problem.current, few.placement()) == 0
    few.search_few(0.05, 0.001, 100.0)
    moves = count_moves(problem.current, few.placement())
    assert 0 < moves <= int(0.05 * 64)
    free, _ = search_of(problem)
    free.search(0.0)
    assert count_moves(problem.current, free.placement()) > moves


def test_ranks_keep_the_copies_that_are_still_wanted():
    shape = ModelShape(1, 3, 6, 1, 1, 1000)
    current = Placement(np.array([[2, 2, 0, 2, 1, -1]], np.int32), 6, 3)
    problem = PlacementProblem(np.ones((1, 1, 3)), shape, Topology((0,) * 6), current=current)
    search, _ = search_of(problem)
    search.copies[:] = 2
    assert search.placement().phy2log[0].tolist() == [2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"cost": CostModel(CostCurves.linear(np.full(8, 1e-6)))},
        {"cost": CostModel(replica=ReplicaWork(3.0))},
        {"dispatch": DispatchModel.FEWEST},
        {"limits": PlanLimits(max_moves=2)},
        {"cross_node_factor": 2.0},
    ],
)
def test_where_more_than_counts_matters_the_general_search_is_used(change):
    problem = problem_of(1, 2, 6, 8)
    assert not counts_suffice(replace(problem, objective=replace(Objective(), **change)))
    assert counts_suffice(problem)


def test_within_one_node_the_price_of_other_nodes_changes_nothing():
    here = replace(problem_of(1, 2, 6, 8), topology=Topology.single_node(8))
    by_default = Settings().planner.cross_node_factor
    assert by_default > 1.0
    dear = replace(here, objective=Objective(cross_node_factor=by_default))
    assert counts_suffice(dear)
    assert policy.plan_keel(dear).placement == policy.plan_keel(here).placement
