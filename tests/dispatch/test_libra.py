"""Libra as a replica choice: every rank dispatches what token sharding decided."""

import numpy as np
import pytest
import torch

from evenkeel_moe.dispatch import (
    DispatchTables,
    LibraChoice,
    LibraVariant,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from tests.dispatch.placements import (
    all_tables,
    choices_of,
    landed,
    random_demand,
    random_placement,
)


@pytest.mark.parametrize("variant", LibraVariant)
@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_dispatch_what_sharding_decided_with_transient_slots_behind_the_placement(
    seed, most, variant
):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2, duplicates=False)
    for layer in range(2):
        demand = random_demand(rng, 4, 12)
        predicted = (demand.double() * torch.from_numpy(rng.uniform(0.7, 1.3, (4, 12)))).round()
        rules = [LibraChoice(tables, most, variant=variant) for tables in all_tables(placement)]
        total = torch.zeros(rules[0].num_slots, dtype=torch.int64)
        for rank, rule in enumerate(rules):
            plan = rule.plan(layer, predicted)
            experts = choices_of(rng, demand[rank])
            slots = rule.choose(layer, experts, demand)
            held = np.concatenate([placement.phy2log[layer], plan.extra.reshape(-1)])
            assert torch.equal(torch.from_numpy(held.astype(np.int64))[slots], experts)
            # A token whose expert is on its rank, resident or transient, stays there.
            owner = np.concatenate([placement.rank_of_slot(), np.repeat(np.arange(4), most)])
            here = torch.from_numpy(plan.hosts[:, rank])[experts]
            assert ((torch.from_numpy(owner.astype(np.int64))[slots] == rank) | ~here).all()
            total += landed(slots, rule.num_slots)
            assert rule.last_sharding is not None
            wanted = rule.last_sharding.rank_load
        by_rank = np.zeros(4, np.int64)
        np.add.at(by_rank, owner, total.numpy())
        assert np.array_equal(by_rank, wanted)


def test_a_plan_serves_one_batch_only():
    placement = Placement(np.array([[0, 1]]), 2, 2)
    rule = LibraChoice(DispatchTables.of(placement, Topology.single_node(2), 0), 1, locality=1.0)
    demand = torch.tensor([[0, 6], [0, 0]])
    experts = torch.full((6, 1), 1)
    rule.plan(0, demand)
    assert set(rule.choose(0, experts, demand)[:, 0].tolist()) == {2}
    assert set(rule.choose(0, experts, demand)[:, 0].tolist()) == {1}


def test_the_published_variant_stops_where_the_refined_one_uses_all_experts_it_may_fetch():
    tables = DispatchTables.of(
        Placement(np.arange(8, dtype=np.int32)[None], 4, 8), Topology.single_node(4), 0
    )
    demand = torch.tensor([[6, 0, 3, 2, 2, 3, 2, 3]] * 4)
    plans = {v: LibraChoice(tables, 2, variant=v).plan(0, demand) for v in LibraVariant}
    assert plans[LibraVariant.REFINED].copies == 8
    assert plans[LibraVariant.PUBLISHED].copies < 8
