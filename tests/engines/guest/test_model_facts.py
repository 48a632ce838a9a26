"""What a model says of its number type and shared experts is told, and nothing is guessed."""

from types import SimpleNamespace

import pytest
import torch

from evenkeel_moe.engines.guest.model_facts import shared_experts, weight_format


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.int8, "int8"),
        (torch.uint8, ""),
        (torch.int32, ""),
    ],
)
def test_the_matrices_of_an_expert_name_its_number_type(dtype, name):
    scales = torch.zeros(4, dtype=torch.float32)
    gate_up, down = torch.zeros((16, 24), dtype=dtype), torch.zeros((24, 8), dtype=dtype)
    assert weight_format([scales, gate_up, down]) == name


def test_two_numbers_in_a_byte_name_no_number_type():
    packed = [torch.zeros((16, 12), dtype=torch.int8), torch.zeros((24, 4), dtype=torch.int8)]
    assert weight_format(packed) == ""


def test_no_tensors_name_no_number_type():
    assert weight_format([]) == ""


@pytest.mark.parametrize(
    ("fields", "work"),
    [
        ({"n_shared_experts": 1, "moe_intermediate_size": 2048}, 1.0),
        ({"num_shared_experts": 2}, 2.0),
        ({"shared_expert_intermediate_size": 5632, "moe_intermediate_size": 1408}, 4.0),
        ({"n_shared_experts": None, "num_experts_per_tok": 8}, None),
        ({"shared_expert_intermediate_size": 512}, None),
    ],
    ids=["DeepSeek", "Ernie", "Qwen2-MoE", "none told", "no size of routed experts"],
)
def test_shared_experts_are_read_from_the_configuration(fields, work):
    assert shared_experts(SimpleNamespace(**fields)) == work
