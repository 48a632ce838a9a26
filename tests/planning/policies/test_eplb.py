import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.copies import (
    interleaved_capacity,
    pack_copies,
    replicate_experts,
)
from evenkeel_moe.planning.policies.eplb import (
    Variant,
    balanced_packing,
    plan_eplb,
    rebalance_experts,
)
from evenkeel_moe.planning.problem import metrics
from tests.planning import twins
from tests.planning.builders import a_problem
from tests.strategies import seeds, shapes, topologies

# The example of the README of deepseek-ai/EPLB.
README_WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_PHY2LOG = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_readme_example():
    assert rebalance_experts(np.array(README_WEIGHT), 16, 4, 2, 8).tolist() == README_PHY2LOG


@st.composite
def eplb_sizes(draw):
    """Sizes (experts, slots, groups, nodes, ranks) that divide as EPLB needs."""
    nodes = draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    ranks = nodes * draw(st.integers(1, 4))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 3))
    return experts, per_rank * ranks, groups, nodes, ranks


@settings(max_examples=300)
@given(eplb_sizes(), seeds)
def test_reference_rule_bit_for_bit_on_loads_without_ties(sizes, seed):
    experts, slots, groups, nodes, ranks = sizes
    # With continuous weights no two quotients are equal.
    weight = np.random.default_rng(seed).lognormal(6.0, 1.0, (2, experts)).astype(np.float32)
    got = rebalance_experts(weight, slots, groups, nodes, ranks)
    assert got.tolist() == [twins.eplb(row, slots, groups, nodes, ranks) for row in weight]


def test_zero_load_spreads_replicas_evenly():
    copies = Placement(rebalance_experts(np.zeros((1, 4)), 8, 1, 1, 4), 4, 4).logcnt
    assert copies.tolist() == [[2, 2, 2, 2]]
    # The reference rule gives one expert every spare slot of its node here.
    copies = Placement(rebalance_experts(np.zeros((1, 8)), 12, 2, 2, 4), 4, 8).logcnt
    assert copies.max() == 2


@pytest.mark.parametrize(
    ("load", "ranks", "slots", "copies", "rank_load"),
    [
        ([0.0, 100.0, 0.0, 0.0], 4, 2, None, [25.0] * 4),
        ([1.0, 1.0, 1.0], 1, 5, [1, 1, 1], [3.0]),
        ([30.0, 20.0], 5, 1, [3, 2], [10.0] * 5),
        ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 3, 2, [1] * 6, [7.0] * 3),
    ],
    ids=["one hot expert", "one rank", "more ranks than experts", "no spare slot"],
)
def test_small_problems_have_the_plan_that_one_sees(load, ranks, slots, copies, rank_load):
    shape = ModelShape(1, len(load), ranks, slots, 1, 1)
    placement = plan_eplb(a_problem(np.array([[load]]), shape)).placement
    assert copies is None or placement.logcnt[0].tolist() == copies
    assert metrics.rank_load(np.array([[load]]), placement)[0, 0].tolist() == rank_load


def test_duplicates_are_the_reference_rule_and_avoided_by_default():
    weight = np.array([[100.0, 1.0, 1.0]])
    assert Placement(rebalance_experts(weight, 6, 1, 1, 2), 2, 3).first_duplicate() is not None
    apart = Placement(rebalance_experts(weight, 6, 1, 1, 2, allow_duplicates=False), 2, 3)
    assert apart.first_duplicate() is None
    assert apart.logcnt.tolist() == [[2, 2, 2]]


def test_hierarchical_only_where_it_is_faster():
    shape = ModelShape(1, 8, 4, 3, 1, 1, num_expert_groups=2)
    nodes = Topology((0, 1, 0, 1))
    # All load is in one group: on one node, half of the ranks would be idle.
    skewed = np.array([[[9.0, 8.0, 7.0, 6.0, 0.0, 0.0, 0.0, 0.0]]])
    proposal = plan_eplb(a_problem(skewed, shape, nodes))
    assert proposal.numbers["keep_nodes"] == 0.0
    assert proposal.numbers["score_hierarchical"] > proposal.numbers["score_global"]
    # Both forms are equally fast, so groups stay whole, each on one node.
    even = np.ones((1, 1, 8))
    proposal = plan_eplb(a_problem(even, shape, nodes))
    assert proposal.numbers["keep_nodes"] == 1.0
    ranks = proposal.placement.phy2log.reshape(4, 3)
    assert set(ranks[[0, 2]].ravel() // 4) == {0}
    assert set(ranks[[1, 3]].ravel() // 4) == {1}


def test_variant_is_binding():
    shape = ModelShape(1, 8, 4, 3, 1, 1, num_expert_groups=2)
    problem = a_problem(np.ones((1, 1, 8)), shape, Topology((0, 0, 1, 1)))
    assert plan_eplb(problem, Variant.GLOBAL).numbers["keep_nodes"] == 0.0
    lonely = a_problem(np.ones((1, 1, 8)), shape)
    with pytest.raises(InvalidInput, match="hierarchical EPLB is not possible: there is one node"):
        plan_eplb(lonely, Variant.HIERARCHICAL)
    uneven = a_problem(np.ones((1, 1, 8)), shape, Topology((0, 1, 1, 1)))
    with pytest.raises(InvalidInput, match=r"\[1, 3\] ranks"):
        plan_eplb(uneven, Variant.HIERARCHICAL)
    odd = a_problem(np.ones((1, 1, 8)), shape, Topology((0, 1, 2, 2)))
    with pytest.raises(InvalidInput, match="2 expert groups do not divide over 3 nodes"):
        plan_eplb(odd, Variant.HIERARCHICAL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((17, 1, 1, 4), "17 slots do not divide over 4 ranks: 16 or 20 slots would"),
        ((16, 5, 1, 4), "12 experts do not .* 5 expert groups: 10 or 15 experts would"),
        ((16, 4, 3, 6), "16 slots do not divide over 6 ranks"),
        ((18, 4, 3, 6), "4 expert groups do not divide over 3 nodes: 3 or 6 expert groups would"),
        ((16, 6, 3, 8), "8 ranks do not divide over 3 nodes: 6 or 9 ranks would"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        rebalance_experts(np.ones((1, 12)), *arguments)


def test_too_few_slots_are_refused():
    with pytest.raises(InfeasiblePlan, match="8 slots cannot hold one copy each of 12 experts"):
        rebalance_experts(np.ones((1, 12)), 8, 1, 1, 4)
    with pytest.raises(ShapeMismatch):
        rebalance_experts(np.ones(12), 12, 1, 1, 4)


def test_replica_budget_is_kept():
    shape = ModelShape(2, 6, 3, 4, 1, 1)
    load = np.random.default_rng(0).integers(1, 9, (2, 2, 6)).astype(float)
    for budget, filled in ((0, 6), (3, 9), (6, 12)):
        problem = a_problem(load, shape, replica_budget=budget)
        assert (plan_eplb(problem).placement.phy2log >= 0).sum(axis=1).tolist() == [filled, filled]
    with pytest.raises(
        InvalidInput, match="6 experts \\+ 1 redundant = 7 slots do not divide over 3 ranks"
    ):
        plan_eplb(a_problem(load, shape, replica_budget=1))
    with pytest.raises(InfeasiblePlan, match="needs 5 slots") as error:
        plan_eplb(a_problem(load, shape, replica_budget=9))
    assert error.value.reason is Reason.MEMORY_EXCEEDED


def test_pooled_slots_give_every_layer_the_same_share():
    shape = ModelShape(3, 6, 3, 6, 1, 1, pool_slots_per_rank=10)
    placement = plan_eplb(a_problem(np.ones((1, 3, 6)), shape)).placement
    placement.check(shape)
    assert (placement.phy2log >= 0).sum(axis=1).tolist() == [9, 9, 9]


def test_a_pool_that_cannot_hold_equal_layers_is_refused():
    shape = ModelShape(2, 5, 2, 3, 1, 1, pool_slots_per_rank=5)
    with pytest.raises(
        InfeasiblePlan, match=r"2 slots per rank and layer x 2 ranks = 4 cannot hold 5"
    ):
        plan_eplb(a_problem(np.ones((1, 2, 5)), shape))


@given(st.integers(1, 6), st.integers(1, 5), seeds)
def test_packing_matches_the_twin(packs, each, seed):
    weight = np.random.default_rng(seed).integers(0, 20, (3, packs * each)).astype(np.float32)
    index, place = balanced_packing(weight, packs)
    for row in range(3):
        want = twins.pack(weight[row], packs)
        assert (index[row].tolist(), place[row].tolist()) == (want[0], want[1])


# --- replication ----------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 60), seeds)
def test_replication_matches_the_twin(experts, extra, seed):
    weight = np.random.default_rng(seed).integers(1, 50, (3, experts)).astype(np.float32)
    logical, copies = replicate_experts(weight, experts + extra)
    for row in range(3):
        want, count = twins.replicate(weight[row], experts + extra)
        assert logical[row].tolist() == want
        assert copies[row].tolist() == count.tolist()


def test_copies_are_bounded():
    weight = np.array([[90.0, 10.0, 1.0]], np.float32)
    assert replicate_experts(weight, 7, max_copies=3)[1].tolist() == [[3, 3, 1]]
    logical, copies = replicate_experts(weight, 9, max_copies=2)
    assert copies.tolist() == [[2, 2, 2]]
    assert logical[0, 6:].tolist() == [EMPTY] * 3


# --- capacity packing -----------------------------------------------------------------------------


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


def test_figure_7_interleaves_layer_1_on_ranks_0_and_2_and_layer_2_on_1_and_3():
    """Two nodes of two ranks, four experts a layer; every rank ends with R = 2 replicas."""
    capacity = interleaved_capacity(4 + np.array([2, 2, 4, 0]), Topology((0, 0, 1, 1)))
    assert (capacity - 1).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert (capacity.sum(axis=0) == 4 + 2).all()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
def test_capacity_is_even_inside_layers_and_over_them(copies, data):
    ranks = data.draw(st.integers(1, 8))
    topology = data.draw(topologies(ranks))
    capacity = interleaved_capacity(np.array(copies), topology)
    assert capacity.sum(axis=1).tolist() == copies
    assert (np.ptp(capacity, axis=1) <= 1).all()
    assert np.ptp(capacity.sum(axis=0)) <= 1


@given(st.integers(1, 8), st.data())
def test_odd_copies_of_the_first_layer_spread_over_equal_nodes(odd, data):
    topology = data.draw(topologies(8, equal_nodes=True))
    capacity = interleaved_capacity(np.array([odd]), topology)[0]
    by_node = np.bincount(np.array(topology.node_of_rank), weights=capacity)
    assert np.ptp(by_node) <= 1
