"""The derived cost model is a roofline with the figures of the data sheet."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.derived_cost import (
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    derived_cost,
    shared_tokens,
)
from evenkeel_moe.planning.problem.moe_time import rank_times, replica_work

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
