import numpy as np
import pytest

from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.window import search_window
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

STEPS, LAYERS, EXPERTS, RANKS = 10, 2, 12, 4


def problem_and_weights():
    rng = np.random.default_rng(0)
    load = rng.integers(0, 50, (STEPS, LAYERS, EXPERTS)).astype(np.float64)
    weights = rng.random(STEPS)
    shape = ModelShape(LAYERS, EXPERTS, RANKS, 4, 2, 1)
    return PlacementProblem(load, shape, Topology.single_node(RANKS)), weights / weights.sum()


def test_a_window_of_common_size_keeps_its_steps():
    problem, weights = problem_and_weights()
    window = search_window(problem, weights)
    assert window.load is problem.load
    assert (window.weights == weights).all()
    mean_rank_load = problem.load.sum() / (STEPS * LAYERS * RANKS)
    assert window.unit_tokens == pytest.approx(mean_rank_load)
    assert window.tokens == pytest.approx(np.moveaxis(problem.load, 0, 2) / mean_rank_load)


def test_steps_of_a_large_layer_are_merged_and_no_load_is_lost():
    problem, weights = problem_and_weights()
    options = KeelOptions(common_layer_size=EXPERTS * RANKS * STEPS // 4)
    window = search_window(problem, weights, options)
    assert window.load.shape == (3, LAYERS, EXPERTS)  # 4, 4 and 2 steps
    assert window.weights == pytest.approx(
        [weights[:4].sum(), weights[4:8].sum(), weights[8:].sum()]
    )
    assert np.tensordot(window.weights, window.load, axes=1) == pytest.approx(
        np.tensordot(weights, problem.load, axes=1)
    )


def test_merged_steps_without_weight_count_nothing():
    problem, weights = problem_and_weights()
    weights[:4] = 0.0
    window = search_window(
        problem, weights, KeelOptions(common_layer_size=EXPERTS * RANKS * STEPS // 4)
    )
    assert (window.weights[0], window.load[0].max()) == (0.0, 0.0)


def test_layers_without_load_are_told():
    problem, weights = problem_and_weights()
    problem.load[:, 1] = 0.0
    assert search_window(problem, weights).loaded.tolist() == [True, False]
