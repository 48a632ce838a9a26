"""The inputs a problem accepts and refuses, for every policy and dispatch model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostSource
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem.derived_cost import (
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    derived_cost,
    shared_tokens,
)
from evenkeel_moe.planning.problem.moe_time import rank_times, replica_work
from evenkeel_moe.planning.problem.placement_problem import origin_shares
from tests.planning.builders import a_problem
from tests.strategies import seeds, shapes

SHAPE = ModelShape(2, 8, 4, 3, 2, 100)
EVERY = pytest.mark.parametrize("name", sorted(POLICIES))


def problem_of(**fields):
    load = np.random.default_rng(1).poisson(20, (5, 2, 8)).astype(np.float64)
    return a_problem(fields.pop("load", load), SHAPE, **fields)


def sources(value):
    """Return valid source loads with one value replaced."""
    found = np.ones((4, 2, 8))
    found[1, 0, 3] = value
    return found


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (sources(np.nan), "source_load holds 1 values that are not finite"),
        (sources(np.inf), "source_load holds 1 values that are not finite"),
        (sources(-5.0), "source_load holds 1 negative values, smallest -5"),
        (sources(1e16), r"source_load holds 1 values above 9.0072e\+15, largest 1e\+16"),
    ],
)
def test_source_loads_that_cannot_be_are_refused(source, words):
    with pytest.raises(InvalidInput, match=words):
        problem_of(source_load=source)


@pytest.mark.parametrize("size", [(4, 2, 7), (4, 1, 8), (2, 2, 8), (1, 2, 8), (2, 8), (5, 4, 2, 8)])
def test_source_loads_of_another_deployment_are_refused(size):
    with pytest.raises(ShapeMismatch, match=r"source_load must be \(4, 2, 8\), got \("):
        problem_of(source_load=np.ones(size))


@pytest.mark.parametrize("number", ["copy_cost", "cross_node_factor", "max_evaluations", "seed"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1])
def test_numbers_that_cannot_be_are_refused(number, value):
    with pytest.raises(InvalidInput, match=f"{number} is {value}, must be finite and not negative"):
        problem_of(**{number: value})


def test_a_copy_between_nodes_that_is_cheaper_than_one_within_is_refused():
    with pytest.raises(InvalidInput, match=r"cross_node_factor is 0\.5, must be at least 1"):
        problem_of(cross_node_factor=0.5)


@pytest.mark.parametrize("limit", ["max_moves", "max_bytes", "max_layers"])
def test_limits_below_zero_are_refused(limit):
    with pytest.raises(InvalidInput, match=f"{limit} is -1, must be finite and not negative"):
        problem_of(limits=PlanLimits(**{limit: -1}))


def test_loads_beyond_what_can_be_counted_are_refused():
    with pytest.raises(
        InvalidInput, match=r"load holds 16 values above 9.0072e\+15, largest 1e\+300"
    ):
        problem_of(load=np.full((1, 2, 8), 1e300))


GOOD, EVEN = [[1.0, 2.0], [1.0, 2.0]], [1.0, 1.0]


@pytest.mark.parametrize(
    ("stairs", "slope", "words"),
    [
        ([[-1.0, 2.0], [1.0, 2.0]], EVEN, "tile_seconds holds 1 negative values, smallest -1"),
        ([[1.0, np.nan], [1.0, 2.0]], EVEN, "tile_seconds holds 1 values that are not finite"),
        ([[1.0, 2.0], [1.0, np.inf]], EVEN, "tile_seconds holds 1 values that are not finite"),
        ([[1.0, 2.0], [3.0, 2.5]], EVEN, "1 tiles cost less than the one before, the most by 0.5"),
        (GOOD, [1.0, -2.0], "slope_s_per_token holds 1 negative values, smallest -2"),
        (GOOD, [np.nan, 1.0], "slope_s_per_token holds 1 values that are not finite"),
        ([[], []], EVEN, r"with K at least 1 .*got \(2, 0\) and \(2,\)"),
        ([[1.0], [1.0]], [1.0], r"got \(2, 1\) and \(1,\)"),
    ],
)
def test_curves_that_cannot_be_are_refused(stairs, slope, words):
    with pytest.raises(InvalidInput, match=words):
        CostCurves(4, np.array(stairs), np.array(slope))


@pytest.mark.parametrize("tokens", [0, -1, np.nan, np.inf])
def test_tiles_that_cannot_be_are_refused(tokens):
    with pytest.raises(
        InvalidInput, match=f"tile_tokens is {tokens}, must be finite and at least 1"
    ):
        CostCurves(tokens, np.ones((2, 1)), np.ones(2))


@given(shapes(), seeds)
def test_origin_shares_sum_to_one_and_are_even_where_no_rank_routed(shape, seed):
    rng = np.random.default_rng(seed)
    size = (shape.num_ranks, shape.num_layers, shape.num_logical_experts)
    source = (rng.integers(0, 3, size) * rng.integers(0, 2, size[1:])).astype(np.float64)
    shares = origin_shares(source, shape)
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    silent = source.sum(axis=0) == 0
    assert (shares[:, silent] == 1.0 / shape.num_ranks).all()
    np.testing.assert_allclose((shares * source.sum(axis=0)), source)


# --- The derived cost model is a roofline with the figures of the data sheet ----------------------


WEIGHTS = 3 * 7168 * 2048
DEEPSEEK = ModelShape(58, 256, 32, 9, 8, WEIGHTS, shared_experts=1.0)


def test_one_token_takes_as_long_as_reading_and_a_thousand_as_computing():
    cost = derived_cost(DEEPSEEK, "NVIDIA H100 80GB HBM3", "fp8")
    tokens = np.zeros((1, 32))
    tokens[0, :2] = 1.0, 1024.0
    seconds = rank_times(replica_work(tokens, cost.replica), cost)[0]
    assert seconds[0] == pytest.approx(WEIGHTS / (3.35e12 * BANDWIDTH_SHARE))
    assert seconds[1] == pytest.approx(1024 * 2 * WEIGHTS / (1978.9e12 * FLOPS_SHARE))
    assert seconds[2] == 0.0
    assert cost.replica.read_tokens == pytest.approx(225, abs=2)
    assert cost.source is CostSource.DERIVED
    assert "fp8 per expert on H100" in cost.detail
    assert cost.shared_tokens == pytest.approx(1 / 8)


def test_weights_that_the_device_cannot_compute_are_read_small_and_computed_large():
    packed = replace(DEEPSEEK, bytes_per_expert=int(WEIGHTS * 0.53125))
    cost = derived_cost(packed, "H100", "int4")
    half = derived_cost(replace(DEEPSEEK, bytes_per_expert=2 * WEIGHTS), "H100", "bf16")
    assert cost.curves is not None and half.curves is not None
    assert np.allclose(cost.curves.slope_s_per_token, half.curves.slope_s_per_token, rtol=1e-6)
    assert cost.replica.read_tokens == pytest.approx(half.replica.read_tokens * 0.53125 / 2)
    assert "computed in bf16" in cost.detail


@pytest.mark.parametrize(
    ("device", "weight_format", "words"),
    [
        ("NVIDIA L4", "bf16", "not in the table"),
        ("H100", "", "number type ''"),
        ("H100", "fp5", "number type 'fp5'"),
        ("H100", "fp32", "arithmetic of H100 in fp32"),
    ],
)
def test_what_is_not_known_is_not_derived(device, weight_format, words):
    with pytest.raises(InvalidInput, match=words):
        derived_cost(DEEPSEEK, device, weight_format)


def test_a_shape_without_bytes_is_not_derived():
    with pytest.raises(InvalidInput, match="bytes of an expert"):
        derived_cost(replace(DEEPSEEK, bytes_per_expert=0), "H100", "fp8")


def test_shared_experts_that_are_not_known_add_no_work():
    assert shared_tokens(replace(DEEPSEEK, shared_experts=None)) == 0.0
