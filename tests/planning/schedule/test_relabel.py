from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import (
    align_slots,
    copy_prices,
    count_moves,
    fewest_moves,
    moves_by_layer,
    price_of_moves,
    relabel,
)
from tests.planning import twins
from tests.planning.builders import a_problem
from tests.strategies import loads, placements, seeds, shapes, topologies


@st.composite
def pairs(draw, /, **kwargs):
    shape = draw(shapes(**kwargs))
    return shape, draw(placements(shape)), draw(placements(shape))


def by_rank(placement, layer):
    return placement.phy2log[layer].reshape(placement.num_ranks, -1)


def contents(placement, layer):
    """The experts of each rank in a layer, in rank order."""
    return [tuple(sorted(row[row >= 0].tolist())) for row in by_rank(placement, layer)]


@given(pairs(), st.data(), st.sampled_from([1.0, 2.0, 3.5]))
def test_a_copy_that_no_rank_of_the_node_can_send_has_a_price_of_its_own(case, data, factor):
    shape, current, target = case
    topology = data.draw(topologies(shape.num_ranks))
    price = np.zeros(shape.num_layers)
    problem = a_problem(
        np.zeros((1, shape.num_layers, shape.num_logical_experts)),
        shape,
        topology,
        current=current,
        cross_node_factor=factor,
    )
    for layer in range(shape.num_layers):
        present = [set(row) for row in contents(current, layer)]
        each = copy_prices(problem, layer)
        for rank, wanted in enumerate(contents(target, layer)):
            node = topology.node_of_rank[rank]
            senders = [held for r, held in enumerate(present) if topology.node_of_rank[r] == node]
            for expert in range(shape.num_logical_experts):
                near = any(expert in held for held in senders)
                expected = 0.0 if expert in present[rank] else 1.0 if near else factor
                assert each[expert, rank] == expected
                price[layer] += expected * (expert in wanted)
    assert price_of_moves(current, target, topology, factor) == pytest.approx(price)


@given(pairs())
def test_moves_match_the_twin(case):
    _, current, target = case
    want = [
        twins.moves(old, new, current.num_ranks)
        for old, new in zip(current.phy2log, target.phy2log, strict=True)
    ]
    assert moves_by_layer(current, target).tolist() == want
    assert count_moves(current, target) == sum(want)
    assert count_moves(current, current) == 0


def test_a_local_copy_is_not_a_move():
    old = Placement(np.array([[0, 1, 2, -1]]), num_ranks=2, num_logical_experts=3)
    twice = Placement(np.array([[0, 1, 2, 2]]), num_ranks=2, num_logical_experts=3)
    assert count_moves(old, twice) == 0
    received_once = Placement(np.array([[0, 0, 2, 1]]), num_ranks=2, num_logical_experts=3)
    assert count_moves(old, received_once) == 1


@given(pairs(max_ranks=5))
def test_no_renaming_needs_fewer_moves(case):
    _, current, target = case
    best = [
        min(
            twins.moves(old, new.reshape(current.num_ranks, -1)[list(order)], current.num_ranks)
            for order in permutations(range(current.num_ranks))
        )
        for old, new in zip(current.phy2log, target.phy2log, strict=True)
    ]
    assert moves_by_layer(current, fewest_moves(current, target)).tolist() == best


@given(pairs(), st.data())
def test_renaming_keeps_what_ranks_hold_together_and_every_rank_load(case, data):
    shape, current, target = case
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    topology = data.draw(topologies(shape.num_ranks))
    for renamed in (
        fewest_moves(current, target),
        fewest_moves(current, target, topology=topology),
    ):
        assert count_moves(current, renamed) <= count_moves(current, target)
        for layer in range(shape.num_layers):
            assert sorted(contents(renamed, layer)) == sorted(contents(target, layer))
        old = np.sort(metrics.rank_load(load, target), axis=2)
        assert np.sort(metrics.rank_load(load, renamed), axis=2) == pytest.approx(old)


@given(pairs(), st.data())
def test_nodes_stay_together_when_asked(case, data):
    shape, current, target = case
    topology = data.draw(topologies(shape.num_ranks))
    node = np.array(topology.node_of_rank)
    renamed = fewest_moves(current, target, topology=topology)
    assert count_moves(current, renamed) <= count_moves(current, target)

    def by_node(placement, layer):
        held = contents(placement, layer)
        return sorted(
            sorted(held[rank] for rank in np.nonzero(node == n)[0]) for n in range(node.max() + 1)
        )

    for layer in range(shape.num_layers):
        assert by_node(renamed, layer) == by_node(target, layer)


def test_nodes_change_places_as_a_whole():
    current = Placement(np.array([[0, 1, 2, 3]]), num_ranks=4, num_logical_experts=4)
    target = Placement(np.array([[3, 2, 1, 0]]), num_ranks=4, num_logical_experts=4)
    nodes = Topology((0, 0, 1, 1))
    assert fewest_moves(current, target, topology=nodes) == current
    # One expert of each pair is on the wrong node and must move.
    crossed = Placement(np.array([[0, 2, 1, 3]]), num_ranks=4, num_logical_experts=4)
    assert count_moves(current, fewest_moves(current, crossed, topology=nodes)) == 2
    assert count_moves(current, fewest_moves(current, crossed)) == 0


@given(pairs(), seeds)
def test_ranks_of_unequal_speed_keep_their_part(case, seed):
    shape, current, target = case
    rates = np.random.default_rng(seed).integers(1, 3, shape.num_ranks).astype(float)
    renamed = fewest_moves(current, target, costs=CostCurves.linear(rates))
    assert count_moves(current, renamed) <= count_moves(current, target)
    for layer in range(shape.num_layers):
        for speed in set(rates.tolist()):
            ranks = np.nonzero(rates == speed)[0]
            old, new = contents(target, layer), contents(renamed, layer)
            assert sorted(old[r] for r in ranks) == sorted(new[r] for r in ranks)


@given(pairs(pooled=True))
def test_pooled_renaming_overflows_no_pool(case):
    shape, current, target = case
    renamed = fewest_moves(current, target, pooled=True)
    renamed.check(shape)
    assert renamed.used_per_rank().tolist() == target.used_per_rank().tolist()


@given(pairs())
def test_an_expert_that_stays_keeps_its_slot(case):
    shape, current, target = case
    aligned = align_slots(current, target)
    for layer in range(shape.num_layers):
        assert contents(aligned, layer) == contents(target, layer)
        stays = [
            slot
            for slot, expert in enumerate(current.phy2log[layer])
            if expert >= 0 and expert in by_rank(target, layer)[slot // shape.slots_per_rank]
        ]
        assert (aligned.phy2log[layer, stays] == current.phy2log[layer, stays]).all()


def test_newcomers_take_the_slots_of_those_that_leave_first():
    current = Placement(np.array([[0, -1, 1, 2]]), num_ranks=2, num_logical_experts=3)
    target = Placement(np.array([[2, -1, 1, 0]]), num_ranks=2, num_logical_experts=3)
    assert align_slots(current, target).phy2log.tolist() == [[2, -1, 1, 0]]


def test_renamed_ranks_are_aligned_too():
    current = Placement(np.array([[0, 1, 2, 3]]), num_ranks=2, num_logical_experts=4)
    target = Placement(np.array([[3, 2, 1, 0]]), num_ranks=2, num_logical_experts=4)
    assert fewest_moves(current, target) == current


def test_relabel_respects_the_dispatcher():
    shape = ModelShape(1, 4, 4, 1, 1, 1)
    current = Placement(np.array([[0, 1, 2, 3]]), num_ranks=4, num_logical_experts=4)
    crossed = Placement(np.array([[0, 2, 1, 3]]), num_ranks=4, num_logical_experts=4)
    load, nodes = np.ones((1, 1, 4)), Topology((0, 0, 1, 1))

    def moves(dispatch=DispatchModel.EVEN, keep_nodes=False, **kwargs):
        objective = Objective(dispatch=dispatch)
        problem = a_problem(load, shape, nodes, current=current, objective=objective, **kwargs)
        return count_moves(current, relabel(problem, crossed, keep_nodes=keep_nodes))

    assert moves() == 0
    assert moves(keep_nodes=True) == 2
    assert moves(dispatch=DispatchModel.NEAREST) == 2
    assert moves(dispatch=DispatchModel.NEAREST, source_load=np.ones((4, 1, 4))) == 2
    assert moves(dispatch=DispatchModel.OPTIMAL) == 0
    assert relabel(a_problem(load, shape, nodes), crossed) == crossed


@given(pairs(), st.data())
def test_relabelling_keeps_the_score(case, data):
    shape, current, target = case
    rng = np.random.default_rng(data.draw(seeds))
    problem = a_problem(
        data.draw(loads(shape.num_layers, shape.num_logical_experts)),
        shape,
        data.draw(topologies(shape.num_ranks)),
        current=current,
        cost=CostModel(CostCurves.linear(rng.integers(1, 3, shape.num_ranks).astype(float))),
        dispatch=data.draw(st.sampled_from(DispatchModel)),
        source_load=data.draw(
            st.sampled_from(
                [None, np.ones((shape.num_ranks, shape.num_layers, shape.num_logical_experts))]
            )
        ),
    )
    before = moe_time.score(problem, target)
    if problem.objective.dispatch is not DispatchModel.OPTIMAL:
        assert moe_time.score(problem, relabel(problem, target)) == pytest.approx(before)


def test_other_deployments_are_refused():
    small = Placement(np.array([[0, 1]]), num_ranks=2, num_logical_experts=2)
    large = Placement(np.array([[0, 1, 0, 1]]), num_ranks=2, num_logical_experts=2)
    for function in (count_moves, align_slots, fewest_moves):
        with pytest.raises(ShapeMismatch):
            function(small, large)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("speeds", [1, 3])
@given(seed=seeds)
def test_with_one_slot_a_rank_no_assignment_keeps_more(pooled, speeds, seed):
    rng = np.random.default_rng(seed)
    layers, ranks, experts = 2, 9, int(rng.integers(1, 8))
    rows = np.concatenate(
        [np.tile(np.arange(experts), (2 * layers, 1)), rng.integers(-1, experts, (4, 9 - experts))],
        axis=1,
    )
    rows = rng.permuted(rows, axis=1).astype(np.int32)
    current, target = (Placement(part, ranks, experts) for part in (rows[:layers], rows[layers:]))
    rates = rng.integers(1, speeds + 1, ranks).astype(float)
    costs = CostCurves.linear(rates) if speeds > 1 else None
    renamed = fewest_moves(current, target, costs=costs, pooled=pooled)
    for layer in range(layers):
        old, present = target.phy2log[layer], current.phy2log[layer]
        classes = np.stack([rates if speeds > 1 else np.ones(ranks), (old >= 0) & pooled])
        kept = (old[:, None] == present[None, :]) & (old[:, None] >= 0)
        apart = (classes[:, :, None] != classes[:, None, :]).any(axis=0)
        best = np.where(apart, -100, kept.astype(int))
        most = best[linear_sum_assignment(best, maximize=True)].sum()
        new = renamed.phy2log[layer]
        assert ((new == present) & (new >= 0)).sum() == most
        for one in np.unique(classes, axis=1).T:
            among = (classes == one[:, None]).all(axis=0)
            assert sorted(new[among]) == sorted(old[among])
        # A rank that has no reason to change keeps its name.
        assert (new[(old == present) & (old >= 0)] == old[(old == present) & (old >= 0)]).all()
    again = fewest_moves(target, target, costs=costs, pooled=pooled)
    assert (again.phy2log == target.phy2log).all()


def test_threads_change_no_name_of_a_rank():
    rng = np.random.default_rng(5)
    rows = np.stack([rng.permutation(256) for _ in range(6)]).astype(np.int32)
    current = Placement(rows[:3], 128, 256)
    target = Placement(rows[3:], 128, 256)
    one, three = (fewest_moves(current, target, threads=threads) for threads in (1, 3))
    assert count_moves(current, one) < count_moves(current, target)
    assert (one.phy2log == three.phy2log).all()
