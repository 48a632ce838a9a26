"""Exact arithmetic: every order of sums gives the same bits, and one wrong weight shows."""

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.reference.model import (
    Model,
    combine_weights,
    expert_forward,
    original_expert,
)
from evenkeel_moe.errors import InvalidInput

CPU = torch.device("cpu")


def build(**changes):
    values = {
        "seed": 3,
        "layers": 2,
        "experts": 8,
        "top_k": 2,
        "d_model": 32,
        "d_ffn": 64,
        "device": CPU,
    }
    return Model.build(**{**values, **changes})


def tokens(count=200):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 4096, count))


def test_experts_come_from_the_seed_and_differ():
    first = original_expert(3, 1, 4, 32, 64)
    assert all(
        torch.equal(a, b) for a, b in zip(first, original_expert(3, 1, 4, 32, 64), strict=True)
    )
    for other in (
        original_expert(3, 1, 5, 32, 64),
        original_expert(3, 0, 4, 32, 64),
        original_expert(4, 1, 4, 32, 64),
    ):
        assert not torch.equal(first[0], other[0])


def test_float32_equals_float64_bit_for_bit_through_all_layers():
    """A rounded sum would differ in double precision."""
    model, share = build(), combine_weights(2).double()
    for experts, layer in zip(
        model.experts, model.undistributed(model.embed(tokens())), strict=True
    ):
        exact = torch.zeros_like(layer.before, dtype=torch.float64)
        for row, x in enumerate(layer.before.double()):
            for choice in range(2):
                wide = tuple(t.double() for t in experts[int(layer.chosen[row, choice])])
                exact[row] += expert_forward(wide, x[None])[0] * share[choice]
        assert torch.equal(layer.routed.double(), exact)
        assert torch.equal(layer.after, layer.after.round()) and layer.after.abs().max() <= 8


def test_rows_give_the_same_bits_in_any_company_and_order():
    model = build()
    x, expert = model.embed(tokens()), original_expert(3, 0, 1, 32, 64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    together = expert_forward(expert, x)
    assert torch.equal(expert_forward(expert, x[order]), together[order])
    single = torch.cat([expert_forward(expert, row[None]) for row in x])
    assert torch.equal(single, together)


def test_one_flipped_sign_changes_an_output():
    x, expert = build().embed(tokens()), original_expert(3, 0, 1, 32, 64)
    spoiled = tuple(t.clone() for t in expert)
    row, column = torch.nonzero(spoiled[0])[0].tolist()
    spoiled[0][row, column] *= -1
    assert not torch.equal(expert_forward(expert, x), expert_forward(spoiled, x))


def test_routing_takes_distinct_experts_best_first():
    model = build(top_k=3)
    x = model.embed(tokens())
    chosen = model.route(0, x)
    logits = (x @ model.gates[0]).gather(1, chosen)
    assert (logits[:, :-1] >= logits[:, 1:]).all()
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_sizes_beyond_exact_arithmetic_are_refused():
    with pytest.raises(InvalidInput, match="exact range"):
        build(d_ffn=32768)
