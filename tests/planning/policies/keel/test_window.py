from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.window import look_ahead
from evenkeel_moe.planning.problem.objective import Objective
from tests.planning.builders import a_problem

SHAPE = ModelShape(1, 8, 4, 2, 2, 100)
READING = Objective(cost=CostModel(replica=ReplicaWork(read_tokens=20.0)))
STILL = KeelOptions(foresight=0.999)
"""Without a forecast, which would move the loads too."""
STEPS, LAYERS, EXPERTS, RANKS = 10, 2, 12, 4


def _planned_tokens(volumes, objective=READING, **options):
    """Return (T,) tokens of the planned steps over those of the window."""
    load = np.outer(volumes, np.arange(1.0, 9.0)).reshape(-1, 1, 8)
    problem = a_problem(load, SHAPE, objective=objective)
    expected, _ = look_ahead(problem, replace(STILL, **options))
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


def _problem():
    rng = np.random.default_rng(0)
    load = rng.integers(0, 50, (STEPS, LAYERS, EXPERTS)).astype(np.float64)
    shape = ModelShape(LAYERS, EXPERTS, RANKS, 4, 2, 1)
    return a_problem(load, shape)


def test_a_window_of_common_size_keeps_its_steps():
    problem, window = look_ahead(_problem(), STILL)
    assert (window.blocks == problem.load).all()
    assert (window.block_weights == window.weights).all()
    mean_rank_load = problem.load.sum() / (STEPS * LAYERS * RANKS)
    assert window.unit_tokens == pytest.approx(mean_rank_load)
    assert window.unit_cost == pytest.approx(mean_rank_load)


def test_steps_of_a_large_layer_are_merged_and_no_load_is_lost():
    options = replace(STILL, merged_size=EXPERTS * RANKS * STEPS // 4)
    problem, window = look_ahead(_problem(), options)
    weights = window.weights
    assert window.blocks.shape == (3, LAYERS, EXPERTS)  # 4, 4 and 2 steps
    assert window.block_weights == pytest.approx(
        [weights[:4].sum(), weights[4:8].sum(), weights[8:].sum()]
    )
    assert np.tensordot(window.block_weights, window.blocks, axes=1) == pytest.approx(
        np.tensordot(weights, problem.load, axes=1)
    )


def test_a_part_of_what_origins_differ_by_is_expected_to_last_under_nearest_dispatch():
    source = np.random.default_rng(1).gamma(1.0, 5.0, (RANKS, LAYERS, EXPERTS))
    problem = replace(_problem(), source_load=source)
    kept, _ = look_ahead(problem, STILL)
    assert kept.source_load is source
    near = replace(problem, objective=Objective(dispatch=DispatchModel.NEAREST))
    shrunk, _ = look_ahead(near, STILL)
    even = source.mean(axis=0)
    assert shrunk.source_load - even == pytest.approx(0.25 * (source - even))
