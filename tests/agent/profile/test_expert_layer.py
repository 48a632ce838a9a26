"""The layer that a profile measures."""

from dataclasses import replace

import pytest
import torch

from evenkeel_moe.agent.profile.expert_layer import ExpertShape, GroupedLayer, Point
from evenkeel_moe.errors import InvalidInput

SHAPE = ExpertShape(256, 512, 6, "float32")


def test_a_layer_is_one_batched_call_per_matrix():
    calls: list[tuple[int, ...]] = []
    real = torch.bmm

    def watched(left, right):
        calls.append(tuple(left.shape))
        return real(left, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", watched)
        run = GroupedLayer(SHAPE, torch.device("cpu"))
        calls.clear()
        run(Point(8, 4))
    assert calls == [(4, 8, 256), (4, 8, 512)]


def test_a_number_type_that_torch_cannot_multiply_is_refused():
    with pytest.raises(InvalidInput, match="no layer of float8_e4m3fn on cpu"):
        GroupedLayer(replace(SHAPE, dtype="float8_e4m3fn"), torch.device("cpu"))


def test_impossible_shapes_are_refused():
    with pytest.raises(InvalidInput, match="d_ffn is 0"):
        ExpertShape(8, 0, 1)
    with pytest.raises(InvalidInput, match="no number type"):
        ExpertShape(8, 8, 1, "float3")
