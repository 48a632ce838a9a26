import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.libra import LibraOptions, plan_libra
from evenkeel_moe.planning.policies.proposal import place_on_ranks
from tests.planning.builders import a_problem
from tests.strategies import seeds


def local_load(demand, home, held):
    """Return the load of each rank if tokens stay local, else go to the home rank."""
    load = np.zeros(len(demand))
    for rank, wants in enumerate(demand):
        for expert, tokens in enumerate(wants):
            load[rank if held[expert, rank] else home[expert]] += tokens
    return load


def replicate_by_source(demand, home, capacity, locality):
    """Return (E, R) the ranks on which the policy places each expert, after an idle layer."""
    ranks, experts = demand.shape
    shape = ModelShape(2, experts, ranks, capacity, 1, 1)
    alone = np.broadcast_to(home[:, None] == np.arange(ranks), (2, experts, ranks))
    source_load = np.stack([np.zeros_like(demand), demand], axis=1)
    problem = a_problem(
        source_load.sum(axis=0)[None],
        shape,
        current=place_on_ranks(alone, capacity),
        source_load=source_load,
    )
    return plan_libra(problem, LibraOptions(locality)).placement.held(1)


def slow_algorithm_1(demand, home, capacity, locality):
    """Algorithm 1 written down naively, line by line."""
    ranks, experts = demand.shape
    held = [{e for e in range(experts) if home[e] == rank} for rank in range(ranks)]
    room = [capacity - len(own) for own in held]
    local = [int(places * locality) for places in room]
    for rank in range(ranks):
        wanted = [e for e in range(experts) if e not in held[rank] and demand[rank, e] > 0]
        held[rank] |= set(sorted(wanted, key=lambda e: (-demand[rank, e], e))[: local[rank]])
    for _ in range(sum(room) - sum(local)):
        matrix = np.array([[e in own for own in held] for e in range(experts)])
        load = local_load(demand, home, matrix)
        source = int(np.argmax(load))
        if load[source] <= demand.sum() / ranks:
            break
        away = np.where(matrix.T, 0, demand).sum(axis=0) * (home == source)
        hottest = int(np.argmax(away))
        goals = [r for r in range(ranks) if hottest not in held[r] and len(held[r]) < capacity]
        if away[hottest] <= 0 or not goals:
            break
        goal = min(goals, key=lambda r: (load[r], r))
        if load[goal] + demand[goal, hottest] <= demand.sum() / ranks:
            held[goal].add(hottest)
    return np.array([[e in own for own in held] for e in range(experts)])


@given(seeds, st.integers(1, 5), st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0]))
def test_libra_is_algorithm_1_line_by_line(seed, ranks, experts, locality):
    rng = np.random.default_rng(seed)
    # Sums of multiples of the number of ranks have exact means.
    demand = ranks * rng.integers(0, 9, (ranks, experts)).astype(float)
    home = np.arange(experts) % ranks
    capacity = -(-experts // ranks) + 2
    held = replicate_by_source(demand, home, capacity, locality)
    assert held.tolist() == slow_algorithm_1(demand, home, capacity, locality).tolist()


def test_phase_1_copies_the_remote_experts_a_rank_wants_most():
    demand = np.array([[9.0, 0, 1, 8], [0, 9, 0, 0]])
    home = np.array([0, 0, 1, 1])
    held = replicate_by_source(demand, home, 3, 1.0)
    assert held[3, 0] and not held[2, 0]
    assert held[1, 1]


def test_phase_2_relieves_the_fullest_rank():
    demand = np.array([[10.0, 0, 0, 0], [10.0, 0, 5, 0], [10.0, 0, 0, 5]])
    home = np.array([0, 0, 1, 2])
    held = replicate_by_source(demand, home, 2, 0.0)
    # Expert 0 weighs 30 of 40 on rank 0; the mean is 13.3. A copy would bring ranks 1 and 2 to 15.
    assert held.sum() == 4
    lighter = replicate_by_source(
        np.array([[10.0, 0, 0, 0], [8.0, 0, 2, 0], [8.0, 0, 0, 2]]), home, 2, 0.0
    )
    assert lighter[0, 1] and lighter[0, 2]


def test_phase_2_ends_at_a_refusal():
    # Rank 0 computes 28 tokens of expert 0 and 5 of expert 1 for others; the mean is 19. The
    # emptiest rank 3 would exceed it with its 28 tokens of expert 0, but not with 5 of expert 1.
    demand = np.array([[10.0, 0, 0, 0, 0], [0, 0, 17, 0, 0], [0, 0, 0, 16, 0], [28, 5, 0, 0, 0]])
    home = np.array([0, 0, 1, 2, 3])
    assert replicate_by_source(demand, home, 2, 0.0).sum() == 5


def test_what_it_refuses():
    with pytest.raises(InvalidInput, match="locality is 2"):
        LibraOptions(2)
