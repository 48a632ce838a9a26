from dataclasses import replace

import numpy as np

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.outlook import look_ahead, reading_matters
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


def _reading_matters(volumes, share):
    """With experts whose mean tokens are the volume; reading is worth 20 tokens."""
    load = np.repeat(np.asarray(volumes)[:, None], 8, axis=1).reshape(-1, 1, 8)
    problem = PlacementProblem(load, SHAPE, Topology.single_node(4), objective=READING)
    return reading_matters(problem, share)


def test_reading_matters_by_the_half_of_the_steps_with_the_fewest_tokens():
    assert _reading_matters([26.0] * 6, 0.75) and not _reading_matters([27.0] * 6, 0.75)
    assert _reading_matters([20.0, 90.0] * 3, 0.75) and not _reading_matters([30.0, 90.0] * 3, 0.75)
    assert _reading_matters([20.0, 90.0, 30.0], 0.75), "25 of the lower two, not 30 of all"


def test_reading_matters_nowhere_if_it_takes_no_time():
    load = np.zeros((4, 1, 8))
    assert not reading_matters(PlacementProblem(load, SHAPE, Topology.single_node(4)), 0.75)
