"""Random placements and demand, including placements that break an invariant."""

import numpy as np
import pytest
import torch

from evenkeel_moe.dispatch import DispatchTables, count_choices
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology


def random_placement(rng, layers=3, experts=12, ranks=4, per_rank=6, duplicates=True, empty=0.15):
    """Place every expert at least once and fill the other slots at random."""
    rows = []
    slots = ranks * per_rank
    for _ in range(layers):
        while True:
            row = np.full(slots, -1)
            row[rng.permutation(slots)[:experts]] = np.arange(experts)
            hot = 1.0 / np.arange(1, experts + 1)
            for slot in np.flatnonzero(row < 0):
                if rng.random() >= empty:
                    row[slot] = rng.choice(experts, p=hot / hot.sum())
            if duplicates or Placement(row[None], ranks, experts).first_duplicate() is None:
                break
            row = _without_duplicates(row, ranks)
            break
        rows.append(row)
    return Placement(np.array(rows), ranks, experts)


def _without_duplicates(row, ranks):
    by_rank = row.reshape(ranks, -1).copy()
    for held in by_rank:
        seen = set()
        for index, expert in enumerate(held):
            if expert in seen:
                held[index] = -1
            seen.add(expert)
    return by_rank.reshape(-1)


def home_only(experts, ranks):
    """(E, R) experts in contiguous blocks, no replicas."""
    mask = np.zeros((experts, ranks), np.bool_)
    mask[np.arange(experts), np.arange(experts) * ranks // experts] = True
    return mask


def random_demand(rng, ranks, experts, tokens=200):
    """Return skewed (R, E) int64 demand with an unused expert and an idle rank."""
    law = rng.permutation(1.0 / np.arange(1, experts + 1) ** 1.2)
    law[rng.integers(experts)] = 0.0
    demand = np.stack([rng.multinomial(tokens, law / law.sum()) for _ in range(ranks)])
    if ranks > 1:
        demand[rng.integers(ranks)] = 0
    return torch.from_numpy(demand.astype(np.int64))


def choices_of(rng, demand_row):
    """(n, 1) experts in random order that count to one rank's demand."""
    ids = np.repeat(np.arange(len(demand_row)), demand_row.numpy())
    return torch.from_numpy(rng.permutation(ids).astype(np.int64)).reshape(-1, 1)


def all_tables(placement, topology=None):
    topology = topology or Topology.single_node(placement.num_ranks)
    return [DispatchTables.of(placement, topology, rank) for rank in range(placement.num_ranks)]


def landed(slots, num_slots):
    """Count the choices of each slot: (num_slots,)."""
    return count_choices(slots, num_slots)


def dispatched(rng, placement, rule_of, layer, demand):
    """Let each rank dispatch its tokens by a rule of its own; return the tokens of each slot, (S,).

    Checks that each token lands where its expert is, and padding nowhere.
    """
    got = torch.zeros(placement.num_slots, dtype=torch.int64)
    held = torch.from_numpy(placement.phy2log[layer].astype(np.int64))
    for rank, tables in enumerate(all_tables(placement)):
        experts = torch.cat([choices_of(rng, demand[rank]), torch.full((3, 1), -1)])
        slots = rule_of(tables).choose(layer, experts, demand)
        assert torch.equal(held[slots[:-3]], experts[:-3]) and (slots[-3:] == -1).all()
        got += landed(slots, placement.num_slots)
    assert int(got.sum()) == int(demand.sum())
    return got


def check_split(split, placement, counts):
    """Check that shares are shares, and realise the peak of the answer."""
    shares = split.probabilities
    assert bool((shares >= 0).all())
    assert torch.allclose(shares.sum(dim=2), torch.ones(counts.shape, dtype=torch.float64))
    assert bool((shares[torch.from_numpy(placement.log2phy < 0)] == 0).all())
    for layer, slots in enumerate(placement.log2phy):
        used = np.zeros(placement.num_ranks)
        tokens = shares[layer].numpy() * counts[layer][:, None]
        held = slots >= 0
        np.add.at(used, slots[held] // placement.slots_per_rank, tokens[held])
        assert split.peak[layer].item() == pytest.approx(used.max(), rel=1e-9, abs=1e-9)
