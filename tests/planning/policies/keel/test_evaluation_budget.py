from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.evaluation_budget import EvaluationBudget
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem


def problem_of(layers, experts, ranks, slots_per_rank):
    shape = ModelShape(layers, experts, ranks, slots_per_rank, 8, 1)
    return PlacementProblem(np.ones((8, layers, experts)), shape, Topology.single_node(ranks))


def test_no_layer_uses_up_the_share_of_another():
    problem = problem_of(58, 256, 32, 9)
    budget = EvaluationBudget(problem)
    with budget.keeping(0.5):
        budget.spend(0, budget.left(0))
        assert budget.left(0) == 0
        assert budget.left(1) == budget.share - budget.share // 2
    assert budget.left(0) == budget.share // 2
    budget.spend(0, budget.left(0))
    assert budget.left(57) == budget.share
    assert budget.share * 58 > KeelOptions().least_evaluations


def test_the_budget_of_the_problem_bounds_all_layers_together():
    budget = EvaluationBudget(replace(problem_of(58, 256, 32, 9), max_evaluations=100))
    budget.spend(3, 90)
    assert budget.left(4) == 10


@pytest.mark.parametrize("least", [2_000_000, 600_000])
def test_a_small_model_has_one_pool(least):
    problem = problem_of(26, 64, 16, 5)
    budget = EvaluationBudget(problem, KeelOptions(least_evaluations=least))
    budget.spend(0, 500_000)
    with budget.keeping(0.5):
        assert [budget.left(layer) for layer in range(26)] == [least - 500_000] * 26


def test_plans_with_large_layers_evaluate_about_as_many_candidates_whatever_their_size():
    options = KeelOptions(common_layer_size=10_000)
    few, many = (
        EvaluationBudget(problem_of(50, 256, ranks, 9), options).share * 50 for ranks in (32, 128)
    )
    assert many == few == options.large_evaluations


def test_shares_suffice_unless_other_layers_may_use_them():
    problem = problem_of(58, 256, 32, 9)
    every = range(58)
    assert EvaluationBudget(problem).suffice_for(every)
    assert not EvaluationBudget(problem_of(26, 64, 16, 5)).suffice_for([0]), "one pool"
    share = EvaluationBudget(problem).share
    tight = EvaluationBudget(replace(problem, max_evaluations=10 * share))
    assert not tight.suffice_for(every) and tight.suffice_for(range(10))
    tight.spend(3, share)
    assert tight.suffice_for(range(10)) and not tight.suffice_for(range(11))
    tight.spend(50, 1)
    assert not tight.suffice_for(range(10))
    with tight.keeping(0.5):
        assert tight.suffice_for(range(10))
