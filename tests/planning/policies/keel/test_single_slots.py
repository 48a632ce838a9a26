"""Where every rank has one slot, the numbers of copies are searched."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.fewest_slots import fill_for_fewest
from evenkeel_moe.planning.policies.keel.moves import Rules
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.keel.single_slots import exchange_copies
from evenkeel_moe.planning.problem import moe_time
from tests.planning.builders import a_problem

EXPERTS, RANKS, LEAST = 32, 64, 1e-6
WEIGHT = np.array([0.1, 0.2, 0.3, 0.4])


def tokens_of(seed):
    """Return (E, T) loads that sum to one time of a mean rank load on every rank."""
    load = np.random.default_rng(seed).gamma(1.0, 1.0, (EXPERTS, 4)) + 0.05
    return load * RANKS / load.sum(axis=0)


def value_of(tokens, copies):
    """The 8-norm over ranks of each step, averaged over the steps."""
    each = tokens / copies[:, None]
    return float(WEIGHT @ ((copies[:, None] * each**8).sum(axis=0) ** 0.125))


def counted(row):
    return np.bincount(row[row >= 0], minlength=EXPERTS)


def exchanged(seed, price, most=RANKS, filled=RANKS):
    row = np.full(RANKS, -1, np.int32)
    row[:filled] = np.arange(filled) % EXPERTS
    rules = Rules(price, 0.0, drops=False, listed=0, trials=0, share=0.0, least=LEAST)
    return row, exchange_copies(tokens_of(seed), WEIGHT, row, row, rules, 3, most)


@pytest.mark.parametrize("price", [0.0, 0.02])
def test_no_exchange_is_left_that_gains_more_than_its_copy_costs(price):
    for seed in range(20):
        start, row = exchanged(seed, price)
        tokens, had, copies = tokens_of(seed), counted(start), counted(row)
        paid = price * np.maximum(copies - had, 0).sum()
        cost = value_of(tokens, copies) + paid
        assert cost <= value_of(tokens, had)
        best = min(
            value_of(tokens, other) + price * np.maximum(other - had, 0).sum()
            for more, less in itertools.permutations(range(EXPERTS), 2)
            if copies[less] > 1
            for other in [
                copies + np.eye(EXPERTS, dtype=int)[more] - np.eye(EXPERTS, dtype=int)[less]
            ]
        )
        # The best exchange is found by its gain in one copy more and one copy less, apart.
        assert best > cost - 0.01


def test_at_a_high_price_nothing_changes_and_at_none_more_than_at_a_low_one():
    made = []
    for price in (10.0, 0.02, 0.0):
        rows = [exchanged(seed, price) for seed in range(10)]
        made.append(sum(int((row != start).sum()) for start, row in rows))
    assert made[0] == 0 < made[1] < made[2]


def test_slots_change_only_for_further_copies():
    for seed in range(10):
        start, row = exchanged(seed, 0.0)
        further = np.maximum(counted(row) - counted(start), 0).sum()
        assert (row != start).sum() == further > 0


def test_empty_slots_are_filled_up_to_the_budget():
    for most in (40, 50, 64):
        _, row = exchanged(0, 0.0, most=most, filled=35)
        assert (row >= 0).sum() == most
        assert counted(row).min() >= 1


@pytest.mark.parametrize("redundant", [8, 12])
def test_a_later_plan_fills_the_empty_slots_of_the_budget_and_no_more(redundant):
    shape = ModelShape(2, 4, 16, 1, 2, 1024)
    present = np.full((2, 16), EMPTY, np.int32)
    present[:, :8] = [0, 1, 2, 3, 0, 0, 0, 1], [3, 2, 1, 0, 3, 3, 3, 2]
    load = np.random.default_rng(0).poisson([800.0, 300.0, 30.0, 10.0], (8, 2, 4)).astype(float)
    problem = a_problem(load, shape, current=Placement(present, 16, 4), replica_budget=redundant)
    assert (plan_keel(problem).placement.logcnt.sum(axis=1) == 4 + redundant).all()


# --- fewest slots ---------------------------------------------------------------------------------


SHAPE = ModelShape(2, 8, 4, 3, 2, 100)
SINGLE = np.array([[0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1]] * 2, np.int32)


def _problem(load, current=None, read=50.0):
    return a_problem(
        load,
        SHAPE,
        current=current,
        cost=CostModel(replica=ReplicaWork(read_tokens=read)),
        dispatch=DispatchModel.FEWEST,
    )


def _sparse(seed=0):
    """Return loads of which half of the experts are active in a step."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.poisson(4.0, (60, 2, 8)) * (rng.random((60, 2, 8)) < 0.5), float)


def test_replicas_let_the_dispatcher_activate_fewer_experts_on_the_slowest_rank():
    problem = _problem(_sparse())
    single = Placement(SINGLE, 4, 8)
    filled = fill_for_fewest(problem, single, 0.0)
    filled.check(SHAPE)
    assert (filled.phy2log[SINGLE >= 0] == SINGLE[SINGLE >= 0]).all()
    assert moe_time.score(problem, filled) < 0.9 * moe_time.score(problem, single)


def test_the_first_replica_is_the_expert_that_slows_its_rank():
    load = np.zeros((10, 2, 8))
    load[:, :, [0, 1]] = 10.0  # Rank 0 reads both in every step, and the other ranks read nothing.
    filled = fill_for_fewest(_problem(load), Placement(SINGLE, 4, 8), 0.0)
    added = filled.phy2log[SINGLE < 0]
    assert set(added[added >= 0]) <= {0, 1}
    assert moe_time.score(_problem(load), filled) == 10 * 2 * 50.0


def test_no_replica_is_made_for_less_than_its_price_except_where_the_rank_has_it():
    load, single = _sparse(), Placement(SINGLE, 4, 8)
    kept = fill_for_fewest(_problem(load, current=single), single, 1e6)
    assert (kept.phy2log == SINGLE).all()
    free = fill_for_fewest(_problem(load), single, 0.0)
    again = fill_for_fewest(_problem(load, current=free), single, 1e6)
    assert (np.sort(again.phy2log) == np.sort(free.phy2log)).all()


def test_a_copy_between_nodes_has_to_help_more():
    """Ranks 0 and 1 read two experts each; the others are on another node and read nothing."""
    load = np.zeros((10, 2, 8))
    load[:, :, :4] = 10.0
    single = Placement(SINGLE, 4, 8)
    problem = _problem(load, current=single)
    problem = replace(problem, objective=replace(problem.objective, cross_node_factor=1e6))
    copies = {
        nodes: (fill_for_fewest(replace(problem, topology=Topology(nodes)), single, 1e-3)).phy2log
        for nodes in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 0))
    }
    assert (copies[0, 0, 0, 0] != SINGLE).any()
    assert (copies[0, 0, 1, 1] == SINGLE).all()
    assert (copies[0, 1, 1, 0] != SINGLE).any()


# --- optimum --------------------------------------------------------------------------------------


SIZES = (
    (4, 2, 3), (5, 2, 3), (6, 2, 4), (8, 2, 4), (8, 2, 5),
    (4, 3, 2), (5, 3, 2), (6, 3, 2), (6, 3, 3), (7, 3, 3), (8, 3, 3),
)  # fmt: skip
"""(experts, ranks, slots per rank)."""
SEEDS = 6


def every_placement(experts, ranks, per_rank):
    """Return (N, R, E) shares of every placement that holds each expert, up to the order of ranks.

    Slots may stay empty.
    """
    sets = [
        sum(1 << expert for expert in held)
        for size in range(per_rank + 1)
        for held in itertools.combinations(range(experts), size)
    ]
    chosen = np.array(list(itertools.combinations_with_replacement(sets, ranks)))
    chosen = chosen[np.bitwise_or.reduce(chosen, axis=1) == (1 << experts) - 1]
    held = (chosen[:, :, None] >> np.arange(experts)) & 1
    return held / held.sum(axis=1, keepdims=True)


def noisy_load(experts, seed):
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(4.0, 0.8, experts)
    return np.round(popularity * rng.lognormal(0.0, 0.2, (3, 1, experts)))


def optimum(shares, load):
    """Return the least sum over steps of the largest rank load."""
    return np.einsum("nre,te->ntr", shares, load[:, 0]).max(axis=2).sum(axis=1).min()


@pytest.fixture(scope="module")
def instances():
    """Return (problem, optimum) of every size and seed."""
    found = []
    for experts, ranks, per_rank in SIZES:
        shares = every_placement(experts, ranks, per_rank)
        for seed in range(SEEDS):
            load = noisy_load(experts, seed)
            shape = ModelShape(1, experts, ranks, per_rank, 1, 1)
            problem = a_problem(load, shape)
            found.append((problem, optimum(shares, load)))
    return found


def test_keel_comes_within_a_hundredth_of_the_optimum_on_average(instances):
    over = [plan_keel(problem).score / best - 1 for problem, best in instances]
    assert min(over) >= -1e-9
    assert np.mean(over) <= 0.01


@pytest.mark.parametrize("reading", [0.25, 0.5, 1.0, 2.0])
def test_under_the_roofline_keel_comes_within_two_hundredths_of_the_optimum(reading):
    over = []
    for experts, ranks, per_rank in SIZES:
        shares = every_placement(experts, ranks, per_rank)
        for seed in range(2):
            load = noisy_load(experts, seed)
            read = reading * load.mean()
            tokens = shares[:, :, :, None] * load[:, 0].T
            work = np.where(tokens > 0, np.maximum(tokens, read), 0.0)
            best = work.sum(axis=2).max(axis=1).sum(axis=1).min()
            shape = ModelShape(1, experts, ranks, per_rank, 1, 1)
            cost = CostModel(replica=ReplicaWork(read_tokens=read))
            problem = a_problem(load, shape, cost=cost)
            over.append(plan_keel(problem).score / best - 1)
    assert min(over) >= -1e-9
    assert np.mean(over) <= 0.02
