from dataclasses import replace

import numpy as np

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.fewest_slots import fill_for_fewest
from evenkeel_moe.planning.problem import moe_time
from tests.planning.builders import a_problem

SHAPE = ModelShape(2, 8, 4, 3, 2, 100)
SINGLE = np.array([[0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1]] * 2, np.int32)


def _problem(load, current=None, read=50.0):
    return a_problem(
        load,
        SHAPE,
        current=current,
        cost=CostModel(replica=ReplicaWork(read_tokens=read)),
        dispatch=DispatchModel.FEWEST,
    )


def _sparse(seed=0):
    """Return loads of which half of the experts are active in a step."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.poisson(4.0, (60, 2, 8)) * (rng.random((60, 2, 8)) < 0.5), float)


def test_replicas_let_the_dispatcher_activate_fewer_experts_on_the_slowest_rank():
    problem = _problem(_sparse())
    single = Placement(SINGLE, 4, 8)
    filled = fill_for_fewest(problem, single, 0.0)
    filled.check(SHAPE)
    assert (filled.phy2log[SINGLE >= 0] == SINGLE[SINGLE >= 0]).all()
    assert moe_time.score(problem, filled) < 0.9 * moe_time.score(problem, single)


def test_the_first_replica_is_the_expert_that_slows_its_rank():
    load = np.zeros((10, 2, 8))
    load[:, :, [0, 1]] = 10.0  # Rank 0 reads both in every step, and the other ranks read nothing.
    filled = fill_for_fewest(_problem(load), Placement(SINGLE, 4, 8), 0.0)
    added = filled.phy2log[SINGLE < 0]
    assert set(added[added >= 0]) <= {0, 1}
    assert moe_time.score(_problem(load), filled) == 10 * 2 * 50.0


def test_no_replica_is_made_for_less_than_its_price_except_where_the_rank_has_it():
    load, single = _sparse(), Placement(SINGLE, 4, 8)
    kept = fill_for_fewest(_problem(load, current=single), single, 1e6)
    assert (kept.phy2log == SINGLE).all()
    free = fill_for_fewest(_problem(load), single, 0.0)
    again = fill_for_fewest(_problem(load, current=free), single, 1e6)
    assert (np.sort(again.phy2log) == np.sort(free.phy2log)).all()


def test_a_copy_between_nodes_has_to_help_more():
    """Ranks 0 and 1 read two experts each; the others are on another node and read nothing."""
    load = np.zeros((10, 2, 8))
    load[:, :, :4] = 10.0
    single = Placement(SINGLE, 4, 8)
    problem = _problem(load, current=single)
    problem = replace(problem, objective=replace(problem.objective, cross_node_factor=1e6))
    copies = {
        nodes: (fill_for_fewest(replace(problem, topology=Topology(nodes)), single, 1e-3)).phy2log
        for nodes in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 0))
    }
    assert (copies[0, 0, 0, 0] != SINGLE).any()
    assert (copies[0, 0, 1, 1] == SINGLE).all()
    assert (copies[0, 1, 1, 0] != SINGLE).any()
