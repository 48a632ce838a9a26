"""Token sharding against a naive Algorithm 2 and the optimum of a linear program."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from evenkeel_moe.dispatch import (
    LibraVariant,
    plan_replicas,
    shard_tokens,
)
from evenkeel_moe.dispatch.libra_sharding import split_evenly
from evenkeel_moe.errors import InvalidInput
from tests.dispatch.placements import (
    home_only,
    random_demand,
)


def first_split(demand, hosts, resident):
    """Return the local and the remote tokens (R, E) before the first move."""
    local = np.where(hosts.T, demand, 0)
    return local, split_evenly((demand - local).sum(axis=0), resident)


def slow_sharding(demand, hosts, resident):
    """Algorithm 2 written down naively on lists."""
    local, remote = (part.tolist() for part in first_split(demand, hosts, resident))
    ranks, experts = len(local), len(local[0])
    load = [sum(local[r]) + sum(remote[r]) for r in range(ranks)]
    target = -(-sum(load) // ranks)
    while max(load) > target:
        moved = False
        above = [r for r in range(ranks) if load[r] > target]
        for source in sorted(above, key=lambda r: (-load[r], r)):
            for e in sorted(range(experts), key=lambda e: (-remote[source][e], e)):
                goals = [r for r in range(ranks) if r != source and hosts[e][r]]
                if remote[source][e] <= 0 or not goals:
                    continue
                goal = min(goals, key=lambda r: (load[r], r))
                room = target - load[goal]
                if room <= 0:
                    continue
                amount = min(remote[source][e], room)
                remote[source][e] -= amount
                remote[goal][e] += amount
                load[source] -= amount
                load[goal] += amount
                moved = True
                break
        if not moved:
            break
    return np.array(remote)


def best_peak(local, demand, hosts):
    """Return the least peak of any assignment of remote tokens, by linear programming."""
    experts, ranks = hosts.shape
    edges = np.argwhere(hosts)
    away = (demand - local).sum(axis=0)
    conserve = np.zeros((experts, len(edges) + 1))
    limit = np.zeros((ranks, len(edges) + 1))
    limit[:, -1] = -1
    for column, (expert, rank) in enumerate(edges):
        conserve[expert, column] = 1
        limit[rank, column] = 1
    cost = np.zeros(len(edges) + 1)
    cost[-1] = 1
    answer = linprog(
        cost, limit, -local.sum(axis=1), conserve, away, bounds=(0, None), method="highs"
    )
    assert answer.status == 0
    return answer.fun


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from(LibraVariant))
def test_sharding_is_algorithm_two_or_optimal_and_loses_no_token(seed, variant):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    demand = random_demand(rng, ranks, 8, tokens=60).numpy()
    resident = home_only(8, ranks)
    hosts = resident | (rng.random(resident.shape) < 0.3)
    answer = shard_tokens(demand, hosts, resident, variant=variant)
    if variant is LibraVariant.PUBLISHED:
        assert np.array_equal(answer.remote, slow_sharding(demand, hosts, resident))
    else:
        assert answer.rank_load.max() == np.ceil(best_peak(answer.local, demand, hosts) - 1e-6)
    total = answer.local + answer.remote
    assert np.array_equal(total.sum(axis=0), demand.sum(axis=0))
    assert (total >= 0).all()
    assert not (total.T[~hosts] > 0).any()
    # Local tokens are never touched.
    assert np.array_equal(answer.local, np.where(hosts.T, demand, 0))
    first = np.add(*first_split(demand, hosts, resident))
    assert answer.rank_load.max() <= first.sum(axis=1).max()


def test_sharding_by_hand():
    # Rank 0 is home of both experts; expert 1 has a copy on rank 1. Ranks 1 and 2 ask for 6 of
    # expert 0 and 4 of expert 1.
    demand = np.array([[2, 0], [0, 0], [6, 4]])
    hosts = np.array([[True, False, False], [True, True, False]])
    resident = np.array([[True, False, False], [True, False, False]])
    answer = shard_tokens(demand, hosts, resident)
    # 12 tokens, target 4. Expert 0 has no other host; all 4 tokens of expert 1 fit on rank 1.
    assert answer.local.tolist() == [[2, 0], [0, 0], [0, 0]]
    assert answer.remote.tolist() == [[6, 0], [0, 4], [0, 0]]
    assert answer.rank_load.tolist() == [8, 4, 0]


def test_as_printed_a_move_may_take_more_than_the_excess():
    # Rank 3 asks for 6 tokens of rank 0's expert, 5 of rank 1's and 4 of its own. Rank 2 can take
    # tokens of the first two. The mean of 15 tokens, rounded up, is 4.
    demand = np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [6, 5, 4]])
    resident = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], np.bool_)
    hosts = resident | np.array([[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], np.bool_)
    # As printed, rank 2 is filled with 4 tokens of rank 0, which is only 2 above the mean.
    greedy = shard_tokens(demand, hosts, resident, variant=LibraVariant.PUBLISHED)
    assert greedy.rank_load.tolist() == [2, 5, 4, 4]
    assert shard_tokens(demand, hosts, resident).rank_load.max() == 4


def test_greedy_stops_within_its_tolerance():
    # Rank 2 asks for 6 tokens of expert 0, which ranks 0 and 1 can compute.
    asked = np.array([[0, 0], [0, 0], [6, 0]])
    hosts = np.array([[True, True, False], [True, False, False]])
    resident = np.array([[True, False, False], [True, False, False]])
    greedy = LibraVariant.PUBLISHED
    loose = shard_tokens(asked, hosts, resident, variant=greedy, tolerance=2.0)
    tight = shard_tokens(asked, hosts, resident, variant=greedy)
    # The mean is 2: 6 is within three times that; without tolerance rank 1 fills up to 2.
    assert loose.rank_load.tolist() == [6, 0, 0]
    assert tight.rank_load.tolist() == [4, 2, 0]
    assert shard_tokens(asked, hosts, resident).rank_load.max() == 3
    with pytest.raises(InvalidInput):
        shard_tokens(asked, hosts, tolerance=-0.1)


def test_edges_an_empty_batch_a_single_rank_and_all_on_one_expert():
    single = shard_tokens(np.array([[3, 4]]), np.ones((2, 1), np.bool_))
    assert single.rank_load.tolist() == [7]
    empty = shard_tokens(np.zeros((3, 4), np.int64), home_only(4, 3))
    assert empty.rank_load.tolist() == [0, 0, 0]
    assert plan_replicas(np.zeros((3, 4)), home_only(4, 3), 2).copies == 0
    hot = np.zeros((4, 4), np.int64)
    hot[:, 0] = 100
    plan = plan_replicas(hot, home_only(4, 4), 1)
    assert shard_tokens(hot, plan.hosts, home_only(4, 4)).rank_load.tolist() == [100] * 4
