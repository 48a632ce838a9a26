import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import moves_by_layer, relabel
from tests.planning.builders import a_problem

SHAPE = ModelShape(4, 16, 4, 6, 2, 1000)
POOLED = ModelShape(4, 16, 4, 6, 2, 1000, pool_slots_per_rank=20)


def problem_of(seed, shape=SHAPE, read=0.0, **objective):
    """A skewed load, and a present placement that has nothing to do with it."""
    rng = np.random.default_rng(seed)
    mean = rng.gamma(0.5, size=(4, 16))
    load = rng.poisson(400 * mean / mean.sum(axis=1, keepdims=True), (32, 4, 16)).astype(float)
    rows = Placement.initial(shape).phy2log.copy()
    for row in rows:
        row[row >= 0] = rng.permutation(16)[row[row >= 0]]
    return a_problem(
        load,
        shape,
        current=Placement(rows, 4, 16),
        objective=Objective(cost=CostModel(replica=ReplicaWork(read_tokens=read)), **objective),
    )


def planned(problem):
    """The placement that a cycle would judge."""
    placement = relabel(problem, plan_keel(problem).placement)
    placement.check(problem.shape, fill_slots=problem.objective.fill_slots)
    return placement


@pytest.mark.parametrize("limits", [PlanLimits(max_moves=3), PlanLimits(max_bytes=2500)])
@pytest.mark.parametrize("dispatch", DispatchModel)
@pytest.mark.parametrize("read", [10.0, 60.0])
def test_slots_that_must_be_full_are_filled_within_the_limits(read, dispatch, limits):
    most = 3 if limits.max_moves is not None else 2
    for seed in range(3):
        problem = problem_of(seed, read=read, dispatch=dispatch, limits=limits, fill_slots=True)
        assert moves_by_layer(problem.current, planned(problem)).sum() <= most


@pytest.mark.parametrize("dispatch", DispatchModel)
@pytest.mark.parametrize("shape", [SHAPE, POOLED], ids=["fixed", "pooled"])
@pytest.mark.parametrize("read", [0.0, 60.0])
def test_no_more_layers_change_than_may(read, shape, dispatch):
    for seed in range(3):
        problem = problem_of(
            seed, shape, read=read, dispatch=dispatch, limits=PlanLimits(max_layers=1)
        )
        changed = (problem.current.phy2log != planned(problem).phy2log).any(axis=1)
        assert changed.sum() <= 1


def test_in_a_pool_slots_move_from_layers_that_need_no_replica_to_one_that_does():
    rng = np.random.default_rng(0)
    mean = np.full((4, 16), 33.0)
    mean[:, 0] = 0.2
    mean[3] = 12.0
    mean[3, 10] = 300.0
    load = rng.poisson(mean, (32, 4, 16)).astype(float)
    # Every layer has one replica, of the coldest expert; the pool has no slot left.
    rows = np.full((4, 4, 6), -1, np.int32)
    rows[:, :, :4] = np.arange(16).reshape(4, 4)
    for layer in range(4):
        rows[layer, (layer + 1) % 4, 4] = 0
        rows[layer, 0, 4] = 15 if layer == 3 else -1
    shape = ModelShape(4, 16, 4, 6, 2, 1000, pool_slots_per_rank=17)
    problem = a_problem(load, shape, current=Placement(rows.reshape(4, -1), 4, 16))
    held = (planned(problem).phy2log >= 0).sum(axis=1)
    assert held[3] > 17 and held.sum() <= 68
