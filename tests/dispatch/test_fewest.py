import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.dispatch import FewestChoice, FewestReplicas
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.kernels import batch_split_kernel
from tests.dispatch.placements import (
    all_tables,
    choices_of,
    landed,
    random_demand,
    random_placement,
)
from tests.planning import twins


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
    rules = [FewestChoice(tables) for tables in all_tables(placement)]
    for layer in range(2):
        demand = random_demand(rng, 4, 12, tokens=8)
        got = torch.zeros(placement.num_slots, dtype=torch.int64)
        for rank, rule in enumerate(rules):
            experts = choices_of(rng, demand[rank])
            slots = rule.choose(layer, experts, demand)
            held = torch.from_numpy(placement.phy2log[layer].astype(np.int64))
            assert torch.equal(held[slots], experts)
            got += landed(slots, placement.num_slots)
        counts = demand.sum(dim=0).numpy()
        filled = got.numpy() > 0
        assert np.sort(placement.phy2log[layer][filled]).tolist() == np.flatnonzero(counts).tolist()
        assert int(got.sum()) == counts.sum()
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


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(InfeasiblePlan, match="layer 0 expert 1") as lost:
        FewestReplicas(Placement(np.array([[0, 0, -1, 2]]), 2, 3))
    assert lost.value.reason is Reason.EXPERT_WITHOUT_REPLICA
    placement = Placement(np.array([[0, 1]]), 2, 2)
    chooser = FewestReplicas(placement)
    with pytest.raises(InvalidInput, match="float16"):
        chooser.choose(torch.ones(1, 2, dtype=torch.float16))
    with pytest.raises(ShapeMismatch):
        chooser.choose(torch.ones(2, 2))
    with pytest.raises(InvalidInput, match="negative"):
        chooser.choose(torch.tensor([[1, -2]]))
    rule = FewestChoice(all_tables(placement)[0])
    with pytest.raises(InvalidInput, match="all-gather"):
        rule.choose(0, torch.tensor([[0]]))
    with pytest.raises(ShapeMismatch):
        rule.choose(0, torch.tensor([[0]]), torch.ones(3, 2, dtype=torch.int64))
