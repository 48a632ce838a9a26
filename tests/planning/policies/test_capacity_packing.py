import numpy as np
import pytest
from hypothesis import given

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.capacity_packing import pack_copies
from tests.strategies import seeds, shapes


@given(shapes(pooled=False), seeds)
def test_packing_places_every_copy_once_and_never_twice_on_a_rank(shape, seed):
    rng = np.random.default_rng(seed)
    layers, experts, ranks = shape.num_layers, shape.num_logical_experts, shape.num_ranks
    load = rng.random((layers, experts))
    capacity = np.full((layers, ranks), shape.slots_per_rank)
    copies = np.ones((layers, experts), np.int32)
    for _ in range(shape.num_redundant):
        expert = int(rng.integers(experts))
        if copies[0, expert] < ranks:
            copies[:, expert] += 1
    rows = pack_copies(load, copies, capacity, shape.slots_per_rank)
    placement = Placement(rows, ranks, experts)
    placement.check(shape)
    assert (placement.logcnt >= 1).all() and (placement.logcnt <= copies).all()


def test_more_copies_than_places_are_refused():
    with pytest.raises(InfeasiblePlan, match="layer 0: 3 copies exceed 2 places"):
        pack_copies(np.ones((1, 2)), np.array([[2, 1]], np.int32), np.array([[1, 1]]), 1)
