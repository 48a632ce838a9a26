import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft import (
    Benefit,
    CraftOptions,
    GainWeighting,
    ReplicaRule,
    allocate_replicas,
    choose_factor,
    factor_by_memory,
    gain_of,
    plan_craft,
    replay_layer,
    replica_benefit,
)
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import slot_shares
from tests.planning.builders import a_problem
from tests.strategies import loads, placements, seeds, shapes, topologies


def rule_of(name):
    return CraftOptions(rule=ReplicaRule(name))


FIGURE_7 = Benefit(
    counts=np.array([1, 2, 4]),
    gain=np.array([[0.03, 0.03, 0.05, 0.0], [0.10, 0.09, 0.15, 0.0], [0.09, 0.08, 0.40, 0.0]]),
    base=np.array([0.8, 0.8, 0.5, 1.0]),
)
"""Four layers on four ranks: the third is the most skewed, the first two moderately, the fourth is
balanced. The figure prints no gains; these are our own."""


@pytest.mark.parametrize("weighting", GainWeighting)
def test_figure_7_allocates_2_2_4_0_of_8_replicas(weighting):
    assert allocate_replicas(FIGURE_7, 8, weighting).tolist() == [2, 2, 4, 0]


@given(seeds, st.integers(0, 12), st.sampled_from(GainWeighting))
def test_no_other_allocation_is_worth_more(seed, budget, weighting):
    rng = np.random.default_rng(seed)
    counts = np.array([1, 2, 4])
    benefit = Benefit(counts, rng.uniform(-0.2, 0.5, (3, 3)), np.full(3, 0.5))

    def worth(allocation):
        gains = [
            benefit.gain[counts.tolist().index(r), layer]
            * (r if weighting is GainWeighting.BY_REPLICAS else 1)
            for layer, r in enumerate(allocation)
            if r
        ]
        return sum(gains)

    allocation = allocate_replicas(benefit, budget, weighting)
    every = [a for a in itertools.product((0, 1, 2, 4), repeat=3) if sum(a) <= budget]
    assert allocation.sum() <= budget
    assert worth(allocation) == pytest.approx(max(worth(a) for a in every))


def test_benefit_grows_with_replicas_where_one_expert_is_hot():
    load = np.ones((5, 2, 8))
    load[:, 0, 3] = 20.0
    benefit = replica_benefit(load, Topology.single_node(4), 4)
    assert benefit.counts.tolist() == [1, 2, 4]
    assert (np.diff(benefit.gain[:, 0]) > 0).all() and benefit.gain[0, 0] > 0.1
    assert (benefit.gain[:, 1] < 0.02).all()
    assert benefit.base[0] == pytest.approx((27 / 4) / 21)


def test_a_hot_expert_has_no_more_copies_than_ranks_to_hold_them():
    """Loads divided by copies that no rank can hold would look more balanced than is possible."""
    load = np.ones((10, 2, 8))
    load[:, 0, 0] = 1000.0
    benefit = replica_benefit(load, Topology.single_node(4), 4)
    assert (benefit.base + benefit.gain).max() <= 1.0
    shape = ModelShape(2, 8, 4, 4, 2, 100, pool_slots_per_rank=6)
    proposal = plan_craft(a_problem(load, shape), rule_of("memory"))
    assert proposal.placement.logcnt[0].tolist() == [4, 2, 1, 1, 1, 1, 1, 1]
    assert proposal.numbers["replicas"] == (proposal.placement.phy2log >= 0).sum() - 2 * 8


@given(shapes(pooled=False), st.data())
def test_no_layer_gains_more_than_perfect_balance(shape, data):
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    benefit = replica_benefit(load, data.draw(topologies(shape.num_ranks)), shape.slots_per_rank)
    assert (benefit.base + benefit.gain <= 1.0 + 1e-6).all()


@given(shapes(), st.data())
def test_proposals_are_sound_and_use_no_more_than_the_budget(shape, data):
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    options = CraftOptions(
        data.draw(st.sampled_from(GainWeighting)), data.draw(st.sampled_from(ReplicaRule))
    )
    problem = a_problem(load, shape, data.draw(topologies(shape.num_ranks)))
    proposal = plan_craft(problem, options)
    proposal.placement.check(shape)


def test_factor_rules():
    gains = np.array([[0.10, 0.10], [0.18, 0.18], [0.20, 0.20], [0.205, 0.205]])
    benefit = Benefit(np.array([1, 2, 4, 8]), gains, np.full(2, 0.6))
    assert choose_factor(benefit, 2, 8, rule_of("memory")) == 8
    assert choose_factor(benefit, 2, 8, CraftOptions(rule=ReplicaRule.KNEE)) == 2
    paper = CraftOptions(rule=ReplicaRule.PER_REPLICA_GAIN)
    assert choose_factor(benefit, 2, 8, paper) == 1
    late_gains = np.array([[0.001] * 2, [0.002] * 2, [0.4] * 2, [0.4] * 2])
    late = Benefit(benefit.counts, late_gains, benefit.base)
    assert choose_factor(late, 2, 8, paper) == 2
    assert choose_factor(Benefit(benefit.counts, -gains, benefit.base), 2, 8, paper) == 0
    steep = CraftOptions(rule=ReplicaRule.MARGINAL_GAIN, min_marginal_gain=0.03)
    assert choose_factor(benefit, 2, 8, steep) == 2
    assert choose_factor(benefit, 2, 0) == 0
    assert gain_of(benefit, np.array([2, 0])) == pytest.approx(0.18)


def test_r_is_the_papers_unless_an_operator_sets_the_replicas_or_slots_share_no_memory():
    load = np.random.default_rng(2).lognormal(0, 1, (6, 6, 8))
    pooled = ModelShape(6, 8, 4, 4, 2, 100, pool_slots_per_rank=18)

    def factor(options=None, shape=pooled, **problem):
        options = options or CraftOptions()
        return plan_craft(a_problem(load, shape, **problem), options).numbers["replication_factor"]

    assert factor() == factor(rule_of("per_replica_gain")) == 1
    assert factor(rule_of("memory")) == 6
    assert factor(CraftOptions(max_replicas_per_rank=3)) == 3
    assert factor(replica_budget=2) == 3  # 2 x 6 layers / 4 ranks
    assert factor(rule_of("per_replica_gain"), replica_budget=2) == 1
    assert factor(shape=ModelShape(6, 8, 4, 3, 2, 100)) == 6


def test_factor_by_memory_is_free_bytes_over_expert_bytes():
    assert factor_by_memory(1000, 44) == 22
    with pytest.raises(InvalidInput, match="1000 free bytes / 0 bytes"):
        factor_by_memory(1000, 0)


# --- kernels --------------------------------------------------------------------------------------


def check_replay(load, placement):
    """Compare the replay of one layer with the metrics."""
    share = slot_shares(placement).astype(np.float32)
    measured = replay_layer(load[:, 0], placement.phy2log, share, placement.num_ranks)
    expected = metrics.balancedness_by_layer(metrics.rank_load(load, placement))
    assert measured[0] == pytest.approx(expected[0] if load.any() else 1.0, rel=1e-5)


@given(shapes(pooled=False, max_layers=1), st.data())
def test_replay_is_the_mean_balancedness_of_the_metrics(shape, data):
    load = data.draw(loads(1, shape.num_logical_experts, max_steps=70))
    check_replay(load, data.draw(placements(shape)))


def test_replay_crosses_blocks_of_steps():
    load = np.random.default_rng(0).integers(0, 50, (150, 1, 6)).astype(float)
    load[70] = 0.0
    check_replay(load, Placement.initial(ModelShape(1, 6, 3, 3, 1, 100)))
