from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies import proposal
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.proposal import fill_empty_slots
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import count_moves
from tests.planning.builders import a_problem

SHAPE = ModelShape(2, 6, 3, 4, 2, 100)
TOPOLOGY = Topology.single_node(3)
LINEAR = CostCurves.linear(np.array([1e-6, 1.5e-6, 1e-6]))
STAIRS = CostCurves(8, np.array([[1.0, 2.0], [1.0, 3.0], [2.0, 2.5]]), np.array([0.1, 0.2, 0.1]))
COSTS = {
    "tokens": TOKENS,
    "speeds": CostModel(LINEAR, fixed=1e-5),
    "stairs": CostModel(STAIRS, shared_tokens=0.5),
    "reading": CostModel(replica=ReplicaWork(read_tokens=9.0, start_tokens=1.0, tile_tokens=4.0)),
}


def problem_of(seed, **changes):
    rng = np.random.default_rng(seed)
    load = rng.uniform(0, 40, (5, 2, 6)) * (rng.random((5, 2, 6)) < 0.8)
    return a_problem(load, SHAPE, TOPOLOGY, objective=Objective(**{"fill_slots": True, **changes}))


def sparse_placement(seed, shape=SHAPE):
    """One copy of every expert, and a further one of some; the other slots are empty."""
    rng = np.random.default_rng(seed)
    rows = np.full((shape.num_layers, shape.num_ranks, shape.slots_per_rank), EMPTY, np.int32)
    for layer in range(shape.num_layers):
        rows[layer, :, :2] = rng.permutation(6).reshape(3, 2)
        if rng.random() < 0.5:
            rows[layer, 0, 2] = rows[layer, 1, 0]
    return Placement(rows.reshape(shape.num_layers, -1), shape.num_ranks, 6)


def on_node(problem, layer, rank, expert):
    """Return True if a rank of the same node has the expert at present."""
    nodes = np.array(problem.topology.node_of_rank)
    row = problem.current.phy2log[layer].reshape(len(nodes), -1)
    return expert in row[nodes == nodes[rank]]


def twin(problem, placement):
    """Fill slot by slot: build each placement that one more replica gives, and time it."""
    objective, current = problem.objective, problem.current
    per_rank, ranks = placement.slots_per_rank, placement.num_ranks
    split = SplitModel(topology=problem.topology, source_load=problem.source_load)

    def time_of(row, layer):
        one = Placement(row[None], ranks, placement.num_logical_experts)
        load = problem.load[:, layer : layer + 1]
        return moe_time.rank_times(
            moe_time.rank_work(load, one, objective.cost, split), objective.cost
        )

    rows = placement.phy2log.copy()
    for layer, row in enumerate(rows):
        while (row == EMPTY).any():
            by_rank = time_of(row, layer)[:, 0].sum(axis=0)
            rank = min(np.flatnonzero(row == EMPTY) // per_rank, key=lambda r: (by_rank[r], r))
            mine = slice(rank * per_rank, (rank + 1) * per_rank)
            slot = rank * per_rank + int(np.flatnonzero(row[mine] == EMPTY)[0])
            present = set() if current is None else set(current.phy2log[layer, mine].tolist())
            tried = []
            for expert in range(placement.num_logical_experts):
                if expert in row[mine]:
                    continue
                other = row.copy()
                other[slot] = expert
                time = float(time_of(other, layer).max(axis=2).sum())
                # A verdict adopts copies that gain half more than their price.
                dear = 1.5 * objective.cost_per_move * len(problem.load)
                if current is None or not on_node(problem, layer, rank, expert):
                    dear *= objective.cross_node_factor
                copy = 0.0 if expert in present else dear
                tried.append((round(time + copy, 9), expert not in present, expert))
            row[slot] = min(tried)[2]
    return rows


def by_rank(rows):
    return np.sort(np.asarray(rows).reshape(len(rows), SHAPE.num_ranks, -1), axis=2)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("copy_cost", [0.0, 500.0])
@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 0, 1)], ids=["one node", "two nodes"])
def test_slots_are_filled_as_by_timing_every_candidate(cost, copy_cost, nodes):
    for seed in range(12):
        sparse = sparse_placement(seed)
        problem = problem_of(seed, cost=cost, copy_cost=copy_cost, cross_node_factor=40.0)
        problem = replace(problem, topology=Topology(nodes))
        for current in (None, Placement.initial(SHAPE)):
            asked = replace(problem, current=current)
            filled = fill_empty_slots(asked, sparse)
            filled.check(SHAPE, fill_slots=True)
            assert np.array_equal(by_rank(filled.phy2log), by_rank(twin(asked, sparse))), seed


def test_what_the_policy_placed_stays():
    filled = fill_empty_slots(problem_of(1), sparse_placement(1)).phy2log
    chosen = sparse_placement(1).phy2log
    assert (filled[chosen != EMPTY] == chosen[chosen != EMPTY]).all()


def test_at_a_high_price_slots_keep_what_they_hold():
    current = Placement.initial(SHAPE)
    sparse = current.phy2log.copy()
    sparse[:, 2::4] = EMPTY
    problem = replace(problem_of(2, copy_cost=1e9), current=current)
    filled = fill_empty_slots(problem, Placement(sparse, 3, 6))
    assert filled == current and count_moves(current, filled) == 0


@pytest.mark.parametrize(
    "changes", [{"dispatch": DispatchModel.FEWEST}, {"limits": PlanLimits(max_layers=2)}]
)
def test_where_no_copy_may_fill_a_slot_it_gets_what_its_rank_holds(changes):
    """Under fewest dispatch the times of the fill do not show what a copy relieves."""
    current = Placement.initial(SHAPE)
    sparse = sparse_placement(4)
    filled = fill_empty_slots(replace(problem_of(4, **changes), current=current), sparse)
    filled.check(SHAPE, fill_slots=True)
    assert count_moves(current, filled) == count_moves(current, sparse)


def test_a_rank_that_holds_nothing_gets_what_relieves_most_where_copies_are_limited():
    """A rank that has joined the group."""
    load = np.tile([[1.0, 2.0, 90.0, 3.0]], (4, 1, 1))
    rows = np.array([[0, 1, 2, 3, EMPTY, EMPTY]], np.int32)
    current, shape = Placement(rows, 3, 4), ModelShape(1, 4, 3, 2, 1, 100)
    problem = a_problem(
        load, shape, current=current, fill_slots=True, limits=PlanLimits(max_moves=2)
    )
    assert fill_empty_slots(problem, current).phy2log[0, 4] == 2
    for moves in (2, 3, 4):
        limited = replace(problem.objective, limits=PlanLimits(max_moves=moves))
        plan = plan_keel(replace(problem, objective=limited)).placement
        plan.check(shape, fill_slots=True)
        assert count_moves(current, plan) <= moves


def test_where_reading_dominates_slots_get_experts_that_are_rarely_chosen():
    shape = ModelShape(1, 6, 3, 3, 1, 100)
    load = np.tile([50.0, 40.0, 30.0, 20.0, 0.01, 30.0], (4, 1, 1))
    rows = np.array([[0, 4, EMPTY, 1, 5, EMPTY, 2, 3, EMPTY]], np.int32)
    cost = CostModel(replica=ReplicaWork(read_tokens=200.0))
    problem = a_problem(load, shape, TOPOLOGY, cost=cost, fill_slots=True)
    filled = fill_empty_slots(problem, Placement(rows, 3, 6)).phy2log
    assert filled[0, [5, 8]].tolist() == [4, 4]


def test_duplicates_are_made_only_where_they_are_allowed():
    shape = ModelShape(1, 2, 2, 3, 1, 100)
    rows = np.array([[0, EMPTY, EMPTY, 1, EMPTY, EMPTY]], np.int32)
    problem = a_problem(np.ones((3, 1, 2)), shape, fill_slots=True)
    refused = fill_empty_slots(problem, Placement(rows, 2, 2))
    assert refused.first_duplicate() is None
    assert (refused.phy2log == EMPTY).sum() == 2
    allowed = replace(problem, objective=replace(problem.objective, allow_duplicates=True))
    fill_empty_slots(allowed, Placement(rows, 2, 2)).check(
        shape, allow_duplicates=True, fill_slots=True
    )


def test_nothing_is_filled_unless_asked_or_where_slots_are_pooled():
    sparse = sparse_placement(0)
    pooled = replace(problem_of(0), shape=replace(SHAPE, pool_slots_per_rank=5))
    for problem in (problem_of(0, fill_slots=False), pooled):
        assert proposal.build_proposal(problem, sparse, 0).placement is sparse
    filled = proposal.build_proposal(problem_of(0), sparse, 0)
    assert filled.numbers["filled_slots"] == (sparse.phy2log == EMPTY).sum()


def test_large_windows_are_filled_by_some_of_their_steps(monkeypatch):
    sparse, problem = sparse_placement(3), problem_of(3)
    trials = int((sparse.phy2log == EMPTY).sum()) * 6 * len(problem.load)
    by_newest = fill_empty_slots(replace(problem, load=problem.load[::-2]), sparse)
    assert by_newest != fill_empty_slots(problem, sparse)
    monkeypatch.setattr(proposal, "_MOST_TRIALS", -(-trials // 2))
    assert fill_empty_slots(problem, sparse) == by_newest
