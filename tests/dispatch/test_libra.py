from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from evenkeel_moe.dispatch import (
    DispatchTables,
    LibraChoice,
    Lookahead,
    PrefetchBuffers,
    ShardingRule,
    extra_budget,
    plan_replicas,
    prediction_accuracy,
    resident_mask,
    shard_tokens,
)
from evenkeel_moe.dispatch.libra_sharding import split_by_locality
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from tests.dispatch.placements import (
    all_tables,
    choices_of,
    landed,
    random_demand,
    random_placement,
)


def home_only(experts, ranks):
    """(E, R) experts in contiguous blocks, no replicas."""
    mask = np.zeros((experts, ranks), np.bool_)
    mask[np.arange(experts), np.arange(experts) * ranks // experts] = True
    return mask


def slow_sharding(demand, hosts, resident):
    """Algorithm 2 written down naively, on lists."""
    local, remote = (part.tolist() for part in split_by_locality(demand, hosts, resident))
    ranks, experts = len(local), len(local[0])
    load = [sum(local[r]) + sum(remote[r]) for r in range(ranks)]
    target = -(-sum(load) // ranks)
    while max(load) > target:
        moved = False
        for source in sorted(range(ranks), key=lambda r: (-load[r], r)):
            if load[source] <= target or moved:
                break
            for e in sorted(range(experts), key=lambda e: (-remote[source][e], e)):
                goals = [r for r in range(ranks) if r != source and hosts[e][r]]
                if remote[source][e] <= 0 or not goals:
                    continue
                goal = min(goals, key=lambda r: (load[r], r))
                room = target - load[goal]
                if room <= 0:
                    continue
                amount = min(remote[source][e], room, load[source] - target)
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
    """The least peak any assignment of the travelling tokens reaches, by linear programming."""
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
@given(st.integers(0, 100_000), st.sampled_from(ShardingRule))
def test_sharding_is_algorithm_two_or_optimal_and_loses_no_token(seed, rule):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    demand = random_demand(rng, ranks, 8, tokens=60).numpy()
    resident = home_only(8, ranks)
    hosts = resident | (rng.random(resident.shape) < 0.3)
    answer = shard_tokens(demand, hosts, resident, rule=rule)
    if rule is ShardingRule.GREEDY:
        assert np.array_equal(answer.remote, slow_sharding(demand, hosts, resident))
    else:
        assert answer.rank_load.max() == np.ceil(best_peak(answer.local, demand, hosts) - 1e-6)
    total = answer.local + answer.remote
    assert np.array_equal(total.sum(axis=0), demand.sum(axis=0))
    assert (total >= 0).all()
    assert not (total.T[~hosts] > 0).any()
    # Local tokens are never touched.
    assert np.array_equal(answer.local, np.where(hosts.T, demand, 0))
    first = np.add(*split_by_locality(demand, hosts, resident))
    assert answer.rank_load.max() <= first.sum(axis=1).max()


def test_sharding_by_hand():
    # Rank 0 is home of both experts; expert 1 has a copy on rank 1. Ranks 1 and 2 ask for 6 of expert 0 and 4 of expert 1.
    demand = np.array([[2, 0], [0, 0], [6, 4]])
    hosts = np.array([[True, False, False], [True, True, False]])
    resident = np.array([[True, False, False], [True, False, False]])
    answer = shard_tokens(demand, hosts, resident)
    # 12 tokens, target 4. Expert 0 has nowhere to go; all 4 of expert 1 fit on rank 1.
    assert answer.local.tolist() == [[2, 0], [0, 0], [0, 0]]
    assert answer.remote.tolist() == [[6, 0], [0, 4], [0, 0]]
    assert answer.rank_load.tolist() == [8, 4, 0]


def test_greedy_stops_within_its_tolerance():
    # Rank 2 asks for 6 tokens of expert 0, which ranks 0 and 1 can compute.
    asked = np.array([[0, 0], [0, 0], [6, 0]])
    hosts = np.array([[True, True, False], [True, False, False]])
    resident = np.array([[True, False, False], [True, False, False]])
    greedy = ShardingRule.GREEDY
    loose = shard_tokens(asked, hosts, resident, rule=greedy, tolerance=2.0)
    tight = shard_tokens(asked, hosts, resident, rule=greedy)
    # The mean is 2: 6 is within three times that; without tolerance rank 1 fills up to 2.
    assert loose.rank_load.tolist() == [6, 0, 0]
    assert tight.rank_load.tolist() == [4, 2, 0]
    assert shard_tokens(asked, hosts, resident).rank_load.max() == 3
    with pytest.raises(InvalidInput):
        shard_tokens(asked, hosts, tolerance=-0.1)


def test_phase_one_brings_in_what_own_tokens_want_most():
    resident = home_only(8, 4)
    demand = np.zeros((4, 8))
    demand[0, [2, 4, 6]] = [5, 9, 7]
    plan = plan_replicas(demand, resident, 2, locality=1.0, fill=False)
    assert plan.extra[0].tolist() == [4, 6]
    assert plan.hosts[4, 0] and plan.hosts[6, 0] and not plan.hosts[2, 0]


def test_phase_two_copies_the_hot_expert_of_the_fullest_rank_to_the_emptiest():
    # Everybody wants expert 0 of rank 0; rank 3 is idle.
    resident = home_only(4, 4)
    demand = np.array([[0.0, 0, 0, 0], [30, 6, 0, 0], [30, 0, 6, 0], [30, 0, 0, 0]])
    plan = plan_replicas(demand, resident, 1, locality=0.0, fill=False)
    # Loads 90, 6, 6, 0: the emptiest rank 3 comes first, then rank 1. Both exceed the mean of 25.5 with their own
    # tokens, but relieve rank 0; a copy on rank 2 would no longer lower the peak of 36.
    assert plan.extra.tolist() == [[-1], [0], [-1], [0]]
    assert plan.copies == 2
    loads = shard_tokens(demand.astype(np.int64), plan.hosts, resident).rank_load
    assert loads.max() == 36


def test_filling_spends_what_is_left_on_experts_with_the_most_remote_tokens_per_host():
    resident = home_only(4, 4)
    demand = np.array([[8.0, 0, 0, 4], [0, 8, 4, 0], [0, 4, 8, 0], [4, 0, 0, 8]])
    # Balanced as it is: nothing to plan.
    assert plan_replicas(demand, resident, 1, locality=0.0, fill=False).copies == 0
    # Every expert has four remote tokens and one host; ties go to the lower expert and the rank with most room.
    plan = plan_replicas(demand, resident, 1, locality=0.0)
    assert plan.extra.tolist() == [[1], [0], [3], [2]]


def test_filling_helps_when_the_prediction_is_wrong():
    rng = np.random.default_rng(6)
    resident = home_only(64, 8)
    law = rng.permutation(1.0 / np.arange(1, 65) ** 0.8)
    demand = np.stack([rng.multinomial(2000, law / law.sum()) for _ in range(8)])
    wrong = demand * np.exp(rng.normal(0, 0.4, demand.shape))
    peaks = []
    for fill in (False, True):
        plan = plan_replicas(wrong, resident, 4, fill=fill)
        peaks.append(shard_tokens(demand, plan.hosts, resident).rank_load.max())
    assert peaks[1] < peaks[0]
    assert peaks[1] < 1.03 * demand.sum() / 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]))
def test_plans_hold_their_budget_and_never_copy_what_is_there(seed, most, locality):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=1, experts=10, ranks=4, per_rank=4)
    resident = resident_mask(placement, 0)
    demand = random_demand(rng, 4, 10).numpy()
    plan = plan_replicas(demand, resident, most, locality=locality)
    assert plan.extra.shape == (4, most)
    for rank in range(4):
        brought = plan.extra[rank][plan.extra[rank] >= 0].tolist()
        assert len(set(brought)) == len(brought)
        assert not resident[brought, rank].any()
        assert set(np.flatnonzero(plan.hosts[:, rank])) == set(
            np.flatnonzero(resident[:, rank])
        ) | set(brought)


def test_exact_predictions_and_enough_replicas_balance_to_one():
    rng = np.random.default_rng(2)
    ranks, experts = 8, 64
    resident = home_only(experts, ranks)
    law = rng.permutation(1.0 / np.arange(1, experts + 1))
    demand = np.stack([rng.multinomial(4096, law / law.sum()) for _ in range(ranks)])
    plan = plan_replicas(demand, resident, 4)
    load = shard_tokens(demand, plan.hosts, resident).rank_load
    assert load.max() / load.mean() < 1.01
    untouched = shard_tokens(demand, resident, resident).rank_load
    assert untouched.max() / untouched.mean() > 1.3


def test_budget_is_the_scarcer_of_memory_and_time():
    # Two buffers: 10 experts of memory hold 5 places.
    sizes: dict[str, Any] = {"bytes_per_expert": 1 << 20, "bytes_per_s": 900e9}
    assert extra_budget(free_bytes=10 << 20, window_s=1.0, **sizes) == 5
    assert extra_budget(free_bytes=1 << 40, window_s=10e-6, **sizes) == 8
    assert extra_budget(free_bytes=1 << 40, window_s=1.0, most=3, **sizes) == 3
    assert extra_budget(free_bytes=0, window_s=1.0, **sizes) == 0
    with pytest.raises(InvalidInput):
        extra_budget(free_bytes=1, bytes_per_expert=0, window_s=1.0, bytes_per_s=1.0)


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_dispatch_what_sharding_decided_with_transient_slots_behind_the_placement(seed, most):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2, duplicates=False)
    for layer in range(2):
        demand = random_demand(rng, 4, 12)
        predicted = (demand.double() * torch.from_numpy(rng.uniform(0.7, 1.3, (4, 12)))).round()
        rules = [LibraChoice(tables, most) for tables in all_tables(placement)]
        total = torch.zeros(rules[0].num_slots, dtype=torch.int64)
        for rank, rule in enumerate(rules):
            plan = rule.plan(layer, predicted)
            experts = choices_of(rng, demand[rank])
            slots = rule.choose(layer, experts, demand)
            held = np.concatenate([placement.phy2log[layer], plan.extra.reshape(-1)])
            assert torch.equal(torch.from_numpy(held.astype(np.int64))[slots], experts)
            # A token whose expert is on its rank, resident or transient, stays there.
            owner = np.concatenate([placement.rank_of_slot(), np.repeat(np.arange(4), most)])
            here = torch.from_numpy(plan.hosts[:, rank])[experts]
            assert ((torch.from_numpy(owner.astype(np.int64))[slots] == rank) | ~here).all()
            total += landed(slots, rule.num_slots)
            assert rule.last_sharding is not None
            wanted = rule.last_sharding.rank_load
        by_rank = np.zeros(4, np.int64)
        np.add.at(by_rank, owner, total.numpy())
        assert np.array_equal(by_rank, wanted)


def test_a_plan_serves_one_batch_only():
    placement = Placement(np.array([[0, 1]]), 2, 2)
    rule = LibraChoice(DispatchTables.of(placement, Topology.single_node(2), 0), 1, locality=1.0)
    demand = torch.tensor([[0, 6], [0, 0]])
    experts = torch.full((6, 1), 1)
    rule.plan(0, demand)
    assert set(rule.choose(0, experts, demand)[:, 0].tolist()) == {2}
    assert set(rule.choose(0, experts, demand)[:, 0].tolist()) == {1}


def test_transient_experts_live_in_the_buffer_of_their_parity():
    buffers = PrefetchBuffers(2)
    assert buffers.begin(0) == ()
    assert buffers.prefetch(1, (5, 7)) == 1
    with pytest.raises(InvalidInput, match="overwrite"):
        buffers.prefetch(2, (1,))
    buffers.end(0)
    assert buffers.begin(1) == (5, 7)
    assert buffers.prefetch(2, (3,)) == 0
    buffers.end(1)
    assert buffers.begin(2) == (3,)
    buffers.end(2)
    assert buffers.begin(3) == ()
    with pytest.raises(InvalidInput, match="2 places"):
        buffers.prefetch(4, (1, 2, 3))


def test_lookahead_asks_the_next_gate_about_this_hidden_state():
    gates = [lambda x, shift=shift: (x.long() + shift) % 4 for shift in range(3)]
    lookahead = Lookahead(gates)
    hidden = torch.tensor([[0.0], [1.0]])
    ahead = lookahead.predict(0, hidden)
    assert ahead is not None and ahead.tolist() == [[1], [2]]
    assert lookahead.predict(2, hidden) is None
    with pytest.raises(InvalidInput):
        lookahead.predict(3, hidden)


def test_accuracy_is_the_share_of_chosen_experts_predicted():
    actual = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    assert prediction_accuracy(torch.tensor([[1, 3], [2, 0], [0, 1]]), actual) == pytest.approx(
        2 / 3
    )
    assert np.isnan(
        prediction_accuracy(torch.zeros((1, 2), dtype=torch.int64), torch.full((1, 2), -1))
    )
    with pytest.raises(ShapeMismatch):
        prediction_accuracy(torch.zeros((2, 2), dtype=torch.int64), actual)


def test_what_cannot_be_planned_is_refused():
    resident = home_only(4, 2)
    demand = np.ones((2, 4), np.int64)
    for bad in ({"max_extra": -1}, {"max_extra": 1, "locality": 1.5}):
        with pytest.raises(InvalidInput):
            plan_replicas(demand, resident, **bad)
    with pytest.raises(ShapeMismatch):
        plan_replicas(demand.T, resident, 1)
    with pytest.raises(InvalidInput):
        plan_replicas(-demand, resident, 1)
    lost = resident.copy()
    lost[3] = False
    with pytest.raises(InfeasiblePlan):
        plan_replicas(demand, lost, 1)
    with pytest.raises(InfeasiblePlan):
        shard_tokens(demand, lost)
    with pytest.raises(InvalidInput):
        LibraChoice(all_tables(Placement(np.array([[0, 1]]), 2, 2))[0], -1)


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
