import numpy as np

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.eplb import plan_eplb, plan_metro
from evenkeel_moe.planning.problem import metrics, moe_time
from tests.planning.builders import a_problem

SHAPE = ModelShape(1, 8, 4, 2, 2, 100)


def test_active_experts_are_balanced_where_tokens_say_otherwise():
    # Four experts with many tokens in one step of four, and four with one token in every step.
    load = np.ones((8, 1, 8))
    load[:, :, :4] = 0.0
    load[::4, :, :4] = 40.0
    cost = CostModel(replica=ReplicaWork(read_tokens=1000.0))
    problem = a_problem(load, SHAPE, cost=cost)
    proposal = plan_metro(problem)
    active = metrics.rank_load(np.minimum(load, 1.0), proposal.placement)
    assert (active.sum(axis=0) == active.sum(axis=0)[0, 0]).all()
    assert proposal.score == moe_time.score(problem, proposal.placement)


def test_with_one_token_for_each_active_expert_it_is_eplb():
    load = (np.random.default_rng(1).random((6, 2, 8)) < 0.4).astype(float)
    shape = ModelShape(2, 8, 4, 3, 2, 100)
    problem = a_problem(load, shape)
    assert plan_metro(problem).placement == plan_eplb(problem).placement


def test_slots_left_empty_are_filled_by_tokens_and_not_by_activations():
    load = np.full((2, 1, 8), 10.0)
    load[:, :, 0] = 1000.0
    shape = ModelShape(1, 8, 4, 3, 2, 100)
    current = Placement.initial(shape)
    problem = a_problem(
        load, shape, current=current, replica_budget=0, fill_slots=True, copy_cost=5000.0
    )
    filled = plan_metro(problem)
    assert filled.placement.logcnt[0, 0] == 4
    assert filled.score == 2 * 270.0
