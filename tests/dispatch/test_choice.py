from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.dispatch import (
    BatchedSplit,
    DeviceLplbChoice,
    DispatchTables,
    EvenChoice,
    ExactSplit,
    FewestChoice,
    FewestReplicas,
    LibraChoice,
    LplbChoice,
    NearestChoice,
    ReplicaChoice,
    assign_quotas,
)
from evenkeel_moe.dispatch.counts import check_counts, count_choices, occurrence
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem.kernels import batch_split_kernel
from evenkeel_moe.planning.problem.token_split import SplitModel, slot_shares
from tests.dispatch.placements import (
    all_tables,
    choices_of,
    dispatched,
    landed,
    random_demand,
    random_placement,
)
from tests.planning import twins

TWO_NODES = Topology((0, 0, 1, 1))


RULES: dict[str, Callable[[DispatchTables], ReplicaChoice]] = {
    "even": EvenChoice,
    "nearest": NearestChoice,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_every_choice_lands_where_its_expert_is_and_padding_stays(name, seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng)
    experts = torch.from_numpy(rng.integers(-1, 12, (64, 3)))
    for tables in all_tables(placement, TWO_NODES):
        rule = RULES[name](tables)
        for layer in range(placement.num_layers):
            slots = rule.choose(layer, experts)
            assert slots.shape == experts.shape
            held = torch.from_numpy(placement.phy2log[layer].astype(np.int64))
            assert torch.equal(held[slots[experts >= 0]], experts[experts >= 0])
            assert (slots[experts < 0] == -1).all()


def realised_shares(placement, rule_of, topology, tokens):
    """(L, S) share of its expert's tokens each slot gets, every rank routing the same number."""
    layers, experts, slots = (
        placement.num_layers,
        placement.num_logical_experts,
        placement.num_slots,
    )
    got = torch.zeros(layers, slots, dtype=torch.float64)
    ids = torch.arange(experts).repeat(tokens).reshape(-1, 2)
    for tables in all_tables(placement, topology):
        rule = rule_of(tables)
        for layer in range(layers):
            got[layer] += landed(rule.choose(layer, ids), slots)
    return got.numpy() / (tokens * placement.num_ranks)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("even", DispatchModel.EVEN),
        ("nearest", DispatchModel.NEAREST),
    ],
)
def test_rules_are_in_expectation_the_split_models_of_the_planner(name, model):
    rng = np.random.default_rng(11)
    placement = random_placement(rng)
    want = slot_shares(placement, SplitModel(model, TWO_NODES))
    tokens = 6000
    got = realised_shares(placement, RULES[name], TWO_NODES, tokens)
    # Five standard deviations of a share estimated from all ranks' tokens.
    assert np.abs(got - want).max() < 5 * np.sqrt(0.25 / (tokens * placement.num_ranks))
    assert np.abs(got - slot_shares(placement)).max() < 0.02 or model is not DispatchModel.EVEN


def test_nearest_prefers_own_rank_then_own_node():
    placement = Placement(np.array([[0, 1, 0, 2, 1, 3, 2, 3]]), 4, 4)
    first, second, third, _ = all_tables(placement, TWO_NODES)
    ids = torch.arange(4).repeat(50, 1)
    assert set(NearestChoice(first).choose(0, ids)[:, 0].tolist()) == {0}
    assert set(NearestChoice(second).choose(0, ids)[:, 0].tolist()) == {2}
    assert set(NearestChoice(second).choose(0, ids)[:, 1].tolist()) == {1}
    assert set(NearestChoice(third).choose(0, ids)[:, 0].tolist()) == {0, 2}
    assert set(NearestChoice(first).choose(0, ids)[:, 3].tolist()) == {5, 7}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_quotas_are_met_exactly_by_ranks_that_do_not_talk(seed, ranks):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=1, experts=6, ranks=ranks, per_rank=-(-9 // ranks))
    demand = random_demand(rng, ranks, 6, tokens=40)
    tables = all_tables(placement)
    width = tables[0].log2phy.shape[2]
    quotas = torch.zeros((6, width), dtype=torch.int64)
    for expert, total in enumerate(demand.sum(dim=0).tolist()):
        copies = int(placement.logcnt[0, expert])
        quotas[expert, :copies] = torch.from_numpy(rng.multinomial(total, np.ones(copies) / copies))
    slots = tables[0].log2phy[0]
    holder = slots // placement.slots_per_rank
    got = torch.zeros(placement.num_slots, dtype=torch.int64)
    home = 0
    for rank in range(ranks):
        chosen = assign_quotas(choices_of(rng, demand[rank]), slots, holder, quotas, demand, rank)
        got += landed(chosen, placement.num_slots)
        home += int((chosen // placement.slots_per_rank == rank).sum())
    want = torch.zeros_like(got).scatter_add_(0, slots.reshape(-1), quotas.reshape(-1))
    assert torch.equal(got, want)
    # As many tokens as the quotas allow never leave their rank.
    by_rank = torch.zeros((6, ranks), dtype=torch.int64).scatter_add_(1, holder, quotas)
    assert home <= int(torch.minimum(by_rank, demand.t()).sum())
    if placement.first_duplicate() is None:
        assert home == int(torch.minimum(by_rank, demand.t()).sum())


@pytest.mark.parametrize("name", RULES)
def test_an_empty_batch_and_a_single_rank(name):
    placement = Placement(np.array([[0, 1, 1, -1]]), 1, 2)
    tables = DispatchTables.of(placement, Topology.single_node(1), 0)
    rule = RULES[name](tables)
    assert rule.choose(0, torch.empty((0, 2), dtype=torch.int64)).shape == (0, 2)
    slots = rule.choose(0, torch.tensor([[0, 1], [1, 0]]))
    assert (slots >= 0).all() and (slots < 3).all()


def test_tables_refuse_what_cannot_be_dispatched():
    placement = Placement(np.array([[0, 0, -1, 2]]), 2, 3)
    with pytest.raises(InfeasiblePlan) as lost:
        DispatchTables.of(placement, Topology.single_node(2), 0)
    assert lost.value.reason is Reason.EXPERT_WITHOUT_REPLICA
    whole = Placement(np.array([[0, 1]]), 2, 2)
    with pytest.raises(InvalidInput, match="rank 2"):
        DispatchTables.of(whole, Topology.single_node(2), 2)
    with pytest.raises(ShapeMismatch):
        DispatchTables.of(whole, Topology.single_node(3), 0)
    rule = EvenChoice(DispatchTables.of(whole, Topology.single_node(2), 0))
    with pytest.raises(InvalidInput, match="float16"):
        rule.choose(0, torch.zeros((2, 2), dtype=torch.float16))
    with pytest.raises(ShapeMismatch):
        rule.choose(0, torch.zeros(2, dtype=torch.int64))


# --- fewest ---------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000))
def test_the_engine_uses_the_replicas_that_the_planner_scores(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 7))
    placement = random_placement(rng, layers=2, experts=9, ranks=ranks, per_rank=9)
    chooser = FewestReplicas(placement)
    for _ in range(2):
        counts = rng.integers(0, 9, (2, 9))
        slots = chooser.choose(torch.from_numpy(counts)).numpy()
        load = counts[None].astype(np.float64)
        per_slot = batch_split_kernel(load, placement.phy2log.copy(), ranks, True)[0]
        for layer in range(2):
            want = np.zeros(placement.num_slots)
            active = counts[layer] > 0
            want[slots[layer][active]] = counts[layer][active]
            assert (slots[layer][~active] == -1).all()
            assert per_slot[layer].tolist() == want.tolist()
            by_rank = want.reshape(ranks, -1)
            assert chooser.rank_load[layer].tolist() == by_rank.sum(axis=1).tolist()
            assert chooser.active[layer].tolist() == (by_rank > 0).sum(axis=1).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_do_not_talk_activate_one_replica_and_reach_the_least_peak(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2, duplicates=bool(seed % 2))
    for layer in range(2):
        demand = random_demand(rng, 4, 12, tokens=8)
        got = dispatched(rng, placement, FewestChoice, layer, demand)
        counts = demand.sum(dim=0).numpy()
        filled = got.numpy() > 0
        assert np.sort(placement.phy2log[layer][filled]).tolist() == np.flatnonzero(counts).tolist()
        peak = filled.reshape(4, -1).sum(axis=1).max()
        assert peak == twins.fewest_active(counts, placement.phy2log[layer], 4)


def test_more_replicas_do_not_activate_more_experts():
    # Expert 0 is on both ranks. An even split would read it twice: 3 experts on rank 0.
    placement = Placement(np.array([[0, 1, 2, 0, 3, -1]]), 2, 4)
    chooser = FewestReplicas(placement)
    slots = chooser.choose(torch.tensor([[40, 1, 1, 1]]))
    assert slots.tolist() == [[3, 1, 2, 4]] and chooser.active.tolist() == [[2, 2]]


def test_every_entry_of_the_table_is_a_replica_and_padding_stays():
    placement = Placement(np.array([[0, 1, 2, 0], [2, 1, 1, 0]]), 2, 3)
    rule = FewestChoice(all_tables(placement)[1])
    table = rule.table(1, torch.tensor([5, 0, 0]))
    assert table.dtype == torch.int64 and table.tolist() == [3, 1, 0]
    # The table of one batch does not change with the next.
    assert rule.table(1, torch.tensor([0, 7, 9])).tolist() == [3, 2, 0]
    assert table.tolist() == [3, 1, 0]
    experts = torch.tensor([[0, -1], [2, 0]])
    demand = torch.tensor([[0, 0, 0], [2, 0, 1]])
    assert rule.choose(1, experts, demand).tolist() == [[3, -1], [0, 3]]
    nothing = rule.choose(1, torch.empty((0, 2), dtype=torch.int64), torch.zeros_like(demand))
    assert nothing.shape == (0, 2)


SOLVERS: dict[str, Callable[[Placement], Callable[[torch.Tensor], object]]] = {
    "exact": lambda placement: ExactSplit(placement).solve,
    "batched": lambda placement: BatchedSplit(placement).solve,
    "fewest": lambda placement: FewestReplicas(placement).choose,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_what_cannot_be_solved_is_refused(name):
    with pytest.raises(InfeasiblePlan, match="layer 0 expert 1") as lost:
        SOLVERS[name](Placement(np.array([[0, 0, -1, 2]]), 2, 3))
    assert lost.value.reason is Reason.EXPERT_WITHOUT_REPLICA
    solve = SOLVERS[name](Placement(np.array([[0, 1]]), 2, 2))
    with pytest.raises(InvalidInput, match="float16"):
        solve(torch.ones(1, 2, dtype=torch.float16))
    with pytest.raises(ShapeMismatch):
        solve(torch.ones(2, 2))
    with pytest.raises(InvalidInput, match="negative"):
        solve(torch.tensor([[1, -2]]))
    with pytest.raises(InvalidInput, match=r"1e\+308"):
        solve(torch.tensor([[1e308, 1e308]], dtype=torch.float64))


@pytest.mark.parametrize("rule", [LplbChoice, DeviceLplbChoice, FewestChoice, LibraChoice])
def test_a_rule_needs_the_demand_of_its_own_deployment_in_whole_tokens(rule):
    """The sum of parts of tokens over ranks may be whole, but quotas by rank would be truncated."""
    chooser, expert = rule(all_tables(Placement(np.array([[0, 1]]), 2, 2))[0]), torch.tensor([[0]])
    with pytest.raises(InvalidInput, match="whole tokens"):
        chooser.choose(0, expert, torch.full((2, 2), 0.5))
    with pytest.raises(InvalidInput, match="all-gather"):
        chooser.choose(0, expert)
    with pytest.raises(ShapeMismatch):
        chooser.choose(0, expert, torch.ones(3, 2, dtype=torch.int64))


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64])
def test_types_that_cannot_count_are_refused(dtype):
    with pytest.raises(InvalidInput, match="cannot hold every whole number"):
        check_counts(torch.ones(3, dtype=dtype), (3,), "counts")


def test_half_precision_really_loses_tokens():
    assert int(torch.tensor(2049, dtype=torch.float16).to(torch.int64)) == 2048
    assert int(torch.tensor(257, dtype=torch.bfloat16).to(torch.int64)) != 257


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64]
)
def test_types_that_can_count_become_float64(dtype):
    values = check_counts(torch.tensor([0, 3, 200], dtype=dtype), (3,), "counts")
    assert values.dtype == torch.float64
    assert values.tolist() == [0, 3, 200]


def test_wrong_values_and_shapes_are_named():
    with pytest.raises(ShapeMismatch, match=r"demand must be \(2,\), got \(3,\)"):
        check_counts(torch.zeros(3), (2,), "demand")
    with pytest.raises(InvalidInput) as negative:
        check_counts(torch.tensor([1.0, -1.0]), (2,), "demand")
    assert negative.value.reason is Reason.NEGATIVE_COUNT
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InvalidInput) as endless:
            check_counts(torch.tensor([1.0, bad]), (2,), "demand")
        assert endless.value.reason is Reason.NOT_FINITE


def test_choices_are_counted_without_padding():
    experts = torch.tensor([[0, 2], [2, -1], [-1, -1]])
    assert count_choices(experts, 4).tolist() == [1, 0, 2, 0]
    assert count_choices(torch.empty((0, 2), dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_occurrence_counts_earlier_choices_of_the_same_expert():
    experts = torch.tensor([[3, 1], [1, 3], [-1, 1]])
    index = occurrence(experts, 4)
    assert index[experts >= 0].tolist() == [0, 0, 1, 1, 2]
    generator = torch.Generator().manual_seed(1)
    many = torch.randint(-1, 5, (50, 3), generator=generator)
    seen = [0] * 5
    for expert, got in zip(
        many.reshape(-1).tolist(), occurrence(many, 5).reshape(-1).tolist(), strict=True
    ):
        if expert >= 0:
            assert got == seen[expert]
            seen[expert] += 1
