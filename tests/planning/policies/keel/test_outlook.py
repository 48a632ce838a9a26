from dataclasses import replace

import numpy as np

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.outlook import look_ahead
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

SHAPE = ModelShape(1, 8, 4, 2, 2, 100)
READING = Objective(cost=CostModel(replica=ReplicaWork(read_tokens=20.0)))


def _planned_tokens(volumes, objective=READING, **options):
    """Return (T,) tokens of the planned steps over those of the window."""
    load = np.outer(volumes, np.arange(1.0, 9.0)).reshape(-1, 1, 8)
    problem = PlacementProblem(load, SHAPE, Topology.single_node(4), objective=objective)
    # Without a forecast: that would move the loads too.
    expected, _ = look_ahead(problem, replace(KeelOptions(foresight=0.999), **options))
    return expected.load.sum(axis=(1, 2)) / load.sum(axis=(1, 2))


def test_a_plan_is_for_more_and_for_fewer_tokens_where_their_number_moves():
    ratio = _planned_tokens(np.repeat([10.0, 12.0, 8.0, 10.0], 10))
    spread = np.std([10.0, 12.0, 8.0, 10.0], ddof=1) / 10.0
    assert np.allclose(ratio[::2], 1.0 + 4.0 * spread)
    assert np.allclose(ratio[1::2] * ratio[::2], 1.0)
    assert (_planned_tokens(np.repeat([10.0, 12.0, 8.0, 10.0], 10), volume_spread=0.0) == 1.0).all()


def test_a_number_of_tokens_that_differs_only_from_step_to_step_changes_no_plan():
    assert (_planned_tokens(np.tile([8.0, 12.0], 20)) == 1.0).all()


def test_tokens_are_planned_as_they_are_where_their_number_does_not_matter():
    moved = np.repeat([10.0, 12.0, 8.0, 10.0], 10)
    assert (_planned_tokens(moved, objective=Objective()) == 1.0).all()
