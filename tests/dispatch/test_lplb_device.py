"""LPLB that stays on the device: every token lands, and the peak is near the optimum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.dispatch import DeviceLplbChoice, ExactSplit
from evenkeel_moe.dispatch.lplb import whole_quotas
from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from tests.dispatch.placements import (
    all_tables,
    choices_of,
    landed,
    random_demand,
    random_placement,
)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000))
def test_rounded_quotas_sum_to_the_tokens_and_stay_within_one_token_of_the_share(seed):
    rng = np.random.default_rng(seed)
    experts, width = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    drawn = rng.random((experts, width)) * (rng.random((experts, width)) < 0.7)
    drawn[:, 0] += 1e-6
    shares = torch.from_numpy(drawn / drawn.sum(axis=1, keepdims=True))
    counts = torch.from_numpy(rng.integers(0, 10 ** rng.integers(1, 10), experts))
    quotas = whole_quotas(shares, counts)
    assert (quotas >= 0).all() and torch.equal(quotas.sum(dim=1), counts)
    assert ((quotas - shares * counts[:, None]).abs() <= 1 + 1e-6).all()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_do_not_talk_reach_the_optimum_but_for_a_token_per_replica(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2)
    split = (placement.logcnt > 1)[:, None]  # (L, 1, E)
    for layer in range(2):
        demand = random_demand(rng, 4, 12)
        got = torch.zeros(placement.num_slots, dtype=torch.int64)
        for rank, tables in enumerate(all_tables(placement)):
            experts = choices_of(rng, demand[rank])
            padded = torch.cat([experts, torch.full((3, 1), -1)])
            slots = DeviceLplbChoice(tables).choose(layer, padded, demand)
            held = torch.from_numpy(placement.phy2log[layer].astype(np.int64))
            assert torch.equal(held[slots[:-3]], experts) and (slots[-3:] == -1).all()
            got += landed(slots, placement.num_slots)
        counts = demand.sum(dim=0)
        assert torch.equal(
            torch.zeros(12, dtype=torch.int64).scatter_add_(0, held.clamp(min=0), got), counts
        )
        batch = torch.zeros(2, 12, dtype=torch.int64)
        batch[layer] = counts
        best = float(ExactSplit(placement).solve(batch).peak[layer])
        row = placement.phy2log[layer].reshape(4, -1)
        replicas = (split[layer, 0][np.maximum(row, 0)] & (row >= 0)).sum(axis=1)
        loads = got.reshape(4, -1).sum(dim=1).numpy()
        assert (loads <= best + replicas + 1e-6).all()


def test_it_needs_the_demand_of_its_own_deployment():
    placement = Placement(np.array([[0, 1]]), 2, 2)
    chooser = DeviceLplbChoice(all_tables(placement)[0])
    with pytest.raises(InvalidInput, match="all-gather"):
        chooser.choose(0, torch.tensor([[0]]))
    with pytest.raises(ShapeMismatch):
        chooser.choose(0, torch.tensor([[0]]), torch.ones(3, 2, dtype=torch.int64))
    # Without tokens and without a shared expert there is nothing to solve.
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    assert chooser.choose(0, torch.tensor([[-1]]), nothing).tolist() == [[-1]]
