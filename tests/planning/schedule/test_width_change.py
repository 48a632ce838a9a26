from itertools import combinations, permutations

import numpy as np
import pytest

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.schedule import width_change
from evenkeel_moe.planning.schedule.survivors import rows_that_stay
from evenkeel_moe.planning.schedule.width_change import (
    carry_over,
    check_retired,
    choose_retired,
    copies_to,
    evacuate,
    holders,
    stranded,
    widened,
)


def shape(ranks, per_rank, experts=6, layers=2, **more):
    return ModelShape(layers, experts, ranks, per_rank, 1, 1000, **more)


def random_placement(of, seed):
    """Return a placement in which every expert has a replica and no rank holds one twice."""
    rng = np.random.default_rng(seed)
    rows = Placement.initial(of).phy2log.copy()
    for row in rows:
        row[:] = rng.permutation(of.num_logical_experts)[row]
    return Placement(rows, of.num_ranks, of.num_logical_experts)


def fewest_by_trying(held, ranks, per_rank):
    """Return the fewest copies of one layer, over all ways to give every expert a slot."""
    experts = len(held)
    slots = [rank for rank in range(ranks) for _ in range(per_rank)]
    ways = set(permutations(slots, experts))
    return min(sum(not held[e, rank] for e, rank in enumerate(way)) for way in ways)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 3), (2, 4), (4, 2), (3, 2), (6, 1)])
def test_no_placement_of_a_width_needs_fewer_copies_than_what_is_carried_over(
    seed, ranks, per_rank
):
    now = random_placement(shape(3, 3), seed)
    former = [rank if rank < 3 else None for rank in range(ranks)]
    held = holders(rows_that_stay(now, tuple(former)))
    target = carry_over(held, shape(ranks, per_rank), np.ones((2, 6)))
    target.check(shape(ranks, per_rank))
    least = sum(fewest_by_trying(held[layer], ranks, per_rank) for layer in range(2))
    assert copies_to(held, target) == least


def test_free_slots_keep_the_heaviest_experts_that_their_rank_holds_and_stay_empty_on_who_joins():
    now = Placement(np.array([[0, 1, 2, 0, 1, 3]], np.int32), 2, 4)
    held = holders(rows_that_stay(now, (0, 1, None)))
    load = np.array([[5.0, 9.0, 1.0, 1.0]])
    of = shape(3, 3, experts=4, layers=1)
    target = carry_over(held, of, load)
    assert copies_to(held, target) == 0
    assert [sorted(row) for row in target.phy2log.reshape(3, 3).tolist()] == [
        [0, 1, 2],
        [0, 1, 3],
        [EMPTY] * 3,
    ]
    two = carry_over(held, shape(3, 2, experts=4, layers=1), load)
    assert (two.logcnt[0] >= 1).all() and two.phy2log.max() == 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("retired", [(3,), (0, 2)])
def test_after_an_evacuation_no_expert_lives_on_retiring_ranks_alone_and_the_fewest_have_moved(
    seed, retired
):
    of = shape(4, 3)
    now = random_placement(of, seed)
    after = evacuate(now, of, retired)
    after.check(of)
    assert stranded(holders(after), retired) == 0
    rows, before = (one.phy2log.reshape(2, 4, 3) for one in (after, now))
    assert (rows[:, list(retired)] == before[:, list(retired)]).all()
    moved = (rows != before) & ~(rows == EMPTY)
    assert moved.sum() == stranded(holders(now), retired)


def test_what_all_ranks_hold_is_not_evacuated_and_too_few_slots_are_refused():
    of = shape(3, 4)
    now = random_placement(of, 0)
    again = evacuate(evacuate(now, of, (2,)), of, (2,))
    assert stranded(holders(again), (2,)) == 0
    with pytest.raises(InfeasiblePlan, match="1 ranks x 4 slots = 4 slots cannot hold 6 experts"):
        evacuate(now, of, (0, 2))
    pooled = shape(3, 6, pool_slots_per_rank=6)
    with pytest.raises(
        InfeasiblePlan, match="1 ranks x 6 pooled slots cannot hold 2 layers x 6 experts"
    ):
        evacuate(now, pooled, (1, 2))


def test_ranks_of_a_pool_are_evacuated_by_one_copy_of_each_stranded_expert():
    """A pool's slots need not divide over the layers."""
    of = shape(3, 4, experts=4, pool_slots_per_rank=4)
    rows = [[0, 1, 2, -1, 3, -1, -1, -1, 0, -1, -1, -1], [0, -1, -1, -1, 1, 2, 3, -1] + 4 * [-1]]
    now = Placement(np.array(rows, np.int32), 3, 4)
    assert evacuate(now, of, (2,)) == now, "rank 2 holds nothing alone"
    of = shape(4, 5, experts=10, layers=3, pool_slots_per_rank=10)
    now = Placement.initial(of)
    for rank in range(4):
        after = evacuate(now, of, (rank,))
        after.check(of)
        alone = stranded(holders(now), (rank,))
        assert (copies_to(holders(now), after), stranded(holders(after), (rank,))) == (alone, 0)


@pytest.mark.parametrize("most", [0, 5000], ids=["one by one", "all compared"])
@pytest.mark.parametrize("seed", range(8))
def test_the_ranks_to_retire_strand_the_fewest_experts(monkeypatch, most, seed):
    monkeypatch.setattr(width_change, "_MOST_CHOICES", most)
    held = holders(random_placement(shape(6, 2), seed))
    topology = Topology((0, 0, 1, 1, 2, 2))
    losses = {of: stranded(held, of) for of in combinations(range(6), 1)}
    found = choose_retired(held, topology, 1)
    assert losses[found] == min(losses.values())
    assert found == max(of for of, loss in losses.items() if loss == min(losses.values()))
    for nodes in (1, 2):
        found = choose_retired(held, topology, 2 * nodes, whole_nodes=True)
        whole = {
            tuple(r for n in of for r in (2 * n, 2 * n + 1)) for of in combinations(range(3), nodes)
        }
        assert found in whole
        if most or nodes == 1:
            assert stranded(held, found) == min(stranded(held, of) for of in whole)
    assert choose_retired(held, topology, 0) == ()
    assert len(choose_retired(held, topology, 5)) == 5


def test_an_expert_is_stranded_if_all_its_replicas_retire():
    held = holders(Placement(np.array([[0, 1, 1, 2, 2, 0]], np.int32), 3, 3))
    assert [stranded(held, of) for of in ((), (0,), (0, 1), (0, 1, 2))] == [0, 0, 1, 3]


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda: check_retired((1, 9), 4), InvalidInput, "ranks 9 do not exist: .* 0 to 3"),
        (lambda: check_retired((1, 1), 4), InvalidInput, "named twice"),
        (lambda: check_retired((0, 1), 2), InvalidInput, "all 2 ranks would retire"),
        (
            lambda: choose_retired(
                np.ones((1, 1, 4), np.bool_), Topology((0, 0, 1, 1)), 1, whole_nodes=True
            ),
            ShapeMismatch,
            "1 ranks to retire are not whole nodes: each of the 2 nodes has 2 ranks",
        ),
        (
            lambda: choose_retired(
                np.ones((1, 1, 3), np.bool_), Topology((0, 0, 1)), 1, whole_nodes=True
            ),
            ShapeMismatch,
            "nodes have 1, 2 ranks",
        ),
    ],
)
def test_ranks_that_cannot_retire_are_refused_with_the_numbers(ask, error, words):
    with pytest.raises(error, match=words):
        ask()


def test_who_joins_fills_new_nodes_as_large_as_todays():
    topology = Topology((0, 0, 1, 1))
    assert widened(topology, [0, 1, 2, 3], 7).node_of_rank == (0, 0, 1, 1, 2, 2, 3)
    assert widened(topology, [2, 3], 2).node_of_rank == (0, 0)
    assert widened(topology, [0, 2], 2).node_of_rank == (0, 1)
