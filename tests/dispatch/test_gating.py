"""The gate's properties as the load-balancing guide states them."""

import math

import pytest
import torch

from evenkeel_moe.dispatch import hash_topk, topk_gate
from evenkeel_moe.errors import InvalidInput, ShapeMismatch


def slow_gate(row, k):
    peak = max(row)
    weights = [math.exp(value - peak) for value in row]
    weights = [w / sum(weights) for w in weights]
    order = sorted(range(len(row)), key=lambda e: (-weights[e], e))[:k]
    kept = sum(weights[e] for e in order)
    return order, [weights[e] / kept for e in order]


def test_kept_weights_are_the_largest_sorted_and_sum_to_one():
    generator = torch.Generator().manual_seed(0)
    for experts, k in [(8, 2), (5, 1), (6, 6), (11, 4)]:
        logits = torch.randn(20, experts, generator=generator, dtype=torch.float64)
        ids, weights = topk_gate(logits, k)
        assert torch.allclose(weights.sum(dim=1), torch.ones(20, dtype=torch.float64))
        assert (weights.diff(dim=1) <= 0).all()
        for row, got, share in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
            order, kept = slow_gate(row, k)
            assert got == order
            assert share == pytest.approx(kept)


def test_without_renormalising_mass_is_lost():
    logits = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    assert (topk_gate(logits, 2, renormalise=False)[1].sum(dim=1) < 1).all()
    _, dense = topk_gate(logits, 8)
    assert torch.allclose(dense.sort(dim=1).values, torch.softmax(logits, 1).sort(dim=1).values)


def test_top_one_takes_everything_and_ties_go_to_the_lower_expert():
    ids, weights = topk_gate(torch.tensor([[1.0, 3.0, 2.0]]), 1)
    assert ids.tolist() == [[1]] and weights.tolist() == [[1.0]]
    ids, weights = topk_gate(torch.zeros(3, 6), 3)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(weights, torch.full((3, 3), 1 / 3))


def test_hash_layers_take_experts_from_the_table_and_weights_from_the_gate():
    table = torch.tensor([[0, 3], [2, 1]])
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 0.0]])
    ids, weights = hash_topk(torch.tensor([1, 0]), table, logits)
    assert ids.tolist() == [[2, 1], [0, 3]]
    assert weights[0].tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])
    assert weights[1].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_sum_to_one_beside_a_far_higher_expert_that_the_table_leaves_out(dtype):
    logits = torch.tensor([[200.0, 1.0, 1.0, 0.0]], dtype=dtype)
    _, weights = hash_topk(torch.tensor([0]), torch.tensor([[1, 2]]), logits)
    assert weights.dtype == dtype
    assert weights[0].tolist() == [0.5, 0.5]


def test_wrong_sizes_are_refused():
    with pytest.raises(InvalidInput):
        topk_gate(torch.zeros(2, 3), 4)
    with pytest.raises(ShapeMismatch):
        topk_gate(torch.zeros(3), 1)
    with pytest.raises(ShapeMismatch):
        hash_topk(torch.zeros(2, dtype=torch.int64), torch.zeros(4, 2), torch.zeros(3, 4))
