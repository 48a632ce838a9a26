"""Worked examples of the load-balancing guide and properties of the bench's baselines."""

from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.dispatch_baselines import PathTable, harmoeny
from evenkeel_moe.dispatch import ExactSplit
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.metrics import balancedness, rank_load

HOT = np.array([90.0, 10.0, 10.0, 10.0])


def greedy_replicas(load, slots):
    """Each spare slot to the expert with the most load per copy."""
    copies = np.ones(len(load), int)
    for _ in range(slots - len(load)):
        copies[np.argmax(load / copies)] += 1
    return copies


def best_makespan(copies, ranks, split):
    """The least peak over every way to put the slots on ranks."""
    experts = np.repeat(np.arange(len(copies)), copies)
    best = np.inf
    for where in product(range(ranks), repeat=len(experts)):
        width = max(where.count(rank) for rank in range(ranks))
        rows: NDArray[np.int32] = np.full((ranks, width), -1, np.int32)
        fill = [0] * ranks
        for expert, rank in zip(experts, where, strict=True):
            rows[rank, fill[rank]] = expert
            fill[rank] += 1
        best = min(best, split(Placement(rows.reshape(1, -1), ranks, len(copies))))
    return best


def even_peak(placement):
    return float(rank_load(HOT[None, None], placement).max())


def test_one_hot_expert_pins_the_layer_whatever_the_others_do():
    load = np.array([1.0] * 99 + [50.0])
    placement = Placement(np.arange(100, dtype=np.int32)[None], 100, 100)
    loads = rank_load(load[None, None], placement)
    assert loads.max() == 50.0
    assert float(balancedness(loads)[0, 0]) < 0.03
    # No dispatcher can split an expert with one replica.
    assert ExactSplit(placement).solve(torch.from_numpy(load[None])).peak.tolist() == [50.0]


def test_a_second_replica_of_the_hot_expert_halves_the_peak():
    placement = Placement(np.array([[0, 1, 0, 2, 3, -1, -1, -1]]), 4, 4)
    assert greedy_replicas(HOT, 5).tolist() == [2, 1, 1, 1]
    # 45 plus a cold expert is 55 under the even split; the exact split moves ten.
    assert even_peak(placement) == 55.0
    assert ExactSplit(placement).solve(torch.from_numpy(HOT[None])).peak.tolist() == [55.0]
    apart = Placement(np.array([[0, -1, 0, -1, 1, 2, 3, -1]]), 4, 4)
    assert even_peak(apart) == 45.0


@pytest.mark.parametrize(("slots", "peak"), [(6, 30.0), (7, 32.5)])
def test_a_seventh_slot_makes_the_best_even_split_worse(slots, peak):
    assert best_makespan(greedy_replicas(HOT, slots), 4, even_peak) == pytest.approx(peak)


def test_the_exact_split_makes_the_seventh_slot_harmless():
    # An uneven split avoids the loss of the even split on ranks with cold experts.
    copies = greedy_replicas(HOT, 7)
    assert copies.tolist() == [4, 1, 1, 1]
    placement = Placement(np.array([[0, -1, 0, 1, 0, 2, 0, 3]]), 4, 4)
    assert even_peak(placement) == 32.5
    assert ExactSplit(placement).solve(torch.from_numpy(HOT[None])).peak.tolist() == [30.0]


def test_harmoeny_balances_with_enough_fetches_and_loses_no_token():
    rng = np.random.default_rng(4)
    demand = rng.multinomial(500, np.array([0.6] + [0.4 / 7] * 7), size=4)
    hosts = np.zeros((8, 4), bool)
    hosts[np.arange(8), np.arange(8) // 2] = True
    load, fetched = harmoeny(demand, hosts, 8)
    assert load.sum() == 2000
    assert load.max() == 500 and fetched > 0
    stuck, none = harmoeny(demand, hosts, 0)
    assert none == 0 and stuck.max() > 1000


def test_a_path_table_predicts_what_followed_the_path():
    ids = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[1, 0], [4, 5]]])
    table = PathTable().build(ids)
    assert sorted(table.predict(1, [[0, 1]], 2)) == [2, 3]
    assert sorted(table.predict(1, [[1, 0]], 2)) == [4, 5]
    # An unknown path falls back to the popular experts.
    assert sorted(table.predict(1, [[7, 7]], 2)) == [2, 3]
    assert table.accuracy(ids).tolist() == [1.0]
