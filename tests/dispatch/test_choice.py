from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.dispatch import (
    DispatchTables,
    EvenChoice,
    NearestChoice,
    ReplicaChoice,
    assign_quotas,
)
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem.token_split import SplitModel, slot_shares
from tests.dispatch.placements import (
    all_tables,
    choices_of,
    landed,
    random_demand,
    random_placement,
)

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
