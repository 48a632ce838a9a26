"""The gain of a move is by how much it lowers the objective when it is made and all is anew."""

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.evaluation_budget import EvaluationBudget
from evenkeel_moe.planning.policies.keel.moves import replacement_gain, swap_gain
from evenkeel_moe.planning.policies.keel.search import Search
from evenkeel_moe.planning.policies.keel.state import load_ranks, refresh
from evenkeel_moe.planning.policies.keel.window import search_window
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

SHAPE = ModelShape(1, 8, 4, 4, 1, 100)
WORKS = {
    "tokens": ReplicaWork(),
    "reading": ReplicaWork(read_tokens=20.0),
    "tiles": ReplicaWork(read_tokens=8.0, start_tokens=1.0, tile_tokens=4.0),
}


def layer_of(work, dispatch=DispatchModel.EVEN):
    """A layer with loads that leave no rank idle; experts have one to four copies."""
    load = np.random.default_rng(3).gamma(3.0, 10.0, (20, 1, 8))
    problem = PlacementProblem(
        load,
        SHAPE,
        Topology.single_node(4),
        objective=Objective(cost=CostModel(replica=work), dispatch=dispatch),
    )
    row = [0, 1, 2, 3, 0, 4, 5, -1, 0, 1, 6, 7, 0, 1, 2, -1]
    start = Placement(np.array([row], np.int32), 4, 8)
    window = search_window(problem, np.ones(len(load)) / len(load))
    search = Search(problem, start, window, EvaluationBudget(problem))
    return search.layers[0], search.objective


def gain_by_trying(layer, objective, changes):
    """Return the gain of putting experts into slots, with loads and costs computed anew."""
    row, before = layer.row.copy(), refresh(layer, objective)
    for slot, expert in changes.items():
        layer.row[slot] = expert
    load_ranks(layer, objective)
    gain = before - refresh(layer, objective)
    layer.row[:] = row
    load_ranks(layer, objective)
    refresh(layer, objective)
    return gain


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_a_replacement_gains_what_it_promises(work):
    layer, objective = layer_of(work)
    refresh(layer, objective)
    tried = 0
    for slot, old in enumerate(layer.row.tolist()):
        for expert in range(-1, 8):
            if old == expert or (expert >= 0 and layer.held[expert, slot // 4] > 0):
                continue
            if old < 0 or layer.copies[old] > 1:
                gain = replacement_gain(layer, objective, slot, expert)
                by_trying = gain_by_trying(layer, objective, {slot: expert})
                assert gain == pytest.approx(by_trying, abs=1e-9), (slot, expert)
                tried += 1
    assert tried > 50


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_a_swap_gains_what_it_promises(work):
    layer, objective = layer_of(work)
    refresh(layer, objective)
    tried = 0
    for a, e in enumerate(layer.row.tolist()):
        for b, f in enumerate(layer.row.tolist()):
            apart = a // 4 != b // 4 and e >= 0 and layer.held[e, b // 4] == 0
            if apart and (f < 0 or layer.held[f, a // 4] == 0):
                gain = swap_gain(layer, objective, a, b)
                by_trying = gain_by_trying(layer, objective, {a: f, b: e})
                assert gain == pytest.approx(by_trying, abs=1e-9), (a, b)
                tried += 1
    assert tried > 30
