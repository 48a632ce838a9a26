"""keel and its bound against the optimum of instances small enough to try every placement."""

import itertools

import numpy as np

from evenkeel.model.placement import EMPTY, Placement
from evenkeel.model.topology import ModelShape, Topology
from evenkeel.planning import metrics
from evenkeel.planning.keel import plan_keel
from evenkeel.planning.problem import PlacementProblem

SIZES = ((4, 2, 3), (5, 2, 3), (6, 3, 2), (4, 3, 2), (6, 2, 4))
"""(experts, ranks, slots per rank)."""


def every_placement(experts, ranks, per_rank):
    """Every way to hold each expert at least once; ranks alike, so only sorted sets of them."""
    sets = list(itertools.combinations(range(experts), min(per_rank, experts)))
    for chosen in itertools.combinations_with_replacement(sets, ranks):
        if len(set().union(*chosen)) == experts:
            row = np.full((ranks, per_rank), EMPTY, np.int32)
            for rank, held in enumerate(chosen):
                row[rank, : len(held)] = held
            yield Placement(row.reshape(1, -1), ranks, experts)


def fewer_copies(experts, ranks, per_rank):
    """Likewise with slots left empty."""
    for slots in range(-(-experts // ranks), per_rank + 1):
        for placement in every_placement(experts, ranks, slots):
            row = np.full((ranks, per_rank), EMPTY, np.int32)
            row[:, :slots] = placement.phy2log.reshape(ranks, slots)
            yield Placement(row.reshape(1, -1), ranks, experts)


def test_keel_comes_within_a_hundredth_of_the_optimum_and_the_bound_stays_below_it():
    over = []
    for seed, (experts, ranks, per_rank) in itertools.product(range(6), SIZES):
        rng = np.random.default_rng(seed)
        popularity = rng.lognormal(4.0, 0.8, experts)
        load = np.round(popularity * rng.lognormal(0.0, 0.2, (3, 1, experts)))
        problem = PlacementProblem(
            load, ModelShape(1, experts, ranks, per_rank, 1, 1), Topology.single_node(ranks)
        )
        optimum = min(metrics.score(problem, each) for each in fewer_copies(experts, ranks, per_rank))
        proposal = plan_keel(problem)
        assert proposal.lower_bound is not None
        assert proposal.lower_bound <= optimum * (1 + 1e-9)
        over.append(proposal.score / optimum - 1)
    assert np.mean(over) <= 0.01
