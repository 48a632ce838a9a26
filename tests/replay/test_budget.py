import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.replay.budget import budget_curve, budgets_to_try, plan_uniform


def test_budgets_are_powers_of_two_and_the_fleets_own():
    assert budgets_to_try(64, 8, 8) == (0, 1, 2, 4, 8, 16, 32, 64)
    assert budgets_to_try(10, 4, 6) == (0, 1, 2, 4, 6, 8)
    assert budgets_to_try(8, 1, 0) == (0,)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_every_layer_gets_the_asked_for_copies_on_ranks_even_to_one_slot(
    ranks, experts, replicas, seed
):
    replicas = min(replicas, experts * (ranks - 1))
    per_rank = -(-(experts + replicas) // ranks)
    shape = ModelShape(3, experts, ranks, per_rank, 1, 1)
    load = np.random.default_rng(seed).integers(0, 9, (2, 3, experts)).astype(np.float64)
    placement = plan_uniform(
        PlacementProblem(load, shape, Topology.single_node(ranks)), replicas
    ).placement
    placement.check(shape)
    assert ((placement.logcnt - 1).sum(axis=1) <= replicas).all()
    filled = (placement.phy2log.reshape(3, ranks, per_rank) >= 0).sum(axis=2)
    base = (experts + replicas) // ranks
    assert filled.max() <= base + ((experts + replicas) % ranks > 0)
    if filled.sum() == 3 * (experts + replicas):
        # Which ranks have one more slot rotates over the layers, so memory is even as well.
        assert np.ptp(filled.sum(axis=0)) <= 1


def test_replicas_beyond_the_slots_are_refused(setup):
    with pytest.raises(
        InfeasiblePlan, match="8 experts . 3 replicas = 11 copies, a layer has 10 slots"
    ):
        plan_uniform(setup.problem(0, 6, None), 3)


def test_the_curve_prices_memory_and_counts_gain_per_replica(setup):
    points = budget_curve(setup, (0, 2, 8), 10)
    assert [point.replicas_per_layer for point in points] == [0, 2, 8]
    # 8 replicas x 2 layers x 10 bytes over 2 ranks.
    assert [point.kv_bytes_lost for point in points] == [0.0, 20.0, 80.0]
    assert np.isnan(points[0].gain_per_replica)
    gain = (points[2].balancedness_mean - points[1].balancedness_mean) / 6
    assert points[2].gain_per_replica == pytest.approx(gain)
    # Every expert on both ranks: a perfect split.
    assert points[2].balancedness_mean == pytest.approx(1.0)
    assert points[2].time_over_fluid == pytest.approx(1.0)
