"""keel and the lower bound against the optimum, on problems small enough to try every placement."""

import itertools

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from tests.planning.builders import a_problem

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
