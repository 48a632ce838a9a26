"""The model: a small MoE with exact float32 arithmetic, so that the order of sums does not matter.

Activations are integers in -8..8, weights are -1, 0 or 1, and scales are powers of two. The
weight of a choice is a number of sixteenths that depends only on its position among the choices.
Every intermediate sum is a multiple of 1/16 (or 1/2) far below 2**24 units, so float32 represents
it exactly. Between layers values are rounded to integers. So two runs that compute the same sums
in different orders, on different ranks or devices, give equal bits, and one wrong weight shows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.errors import InvalidInput

VOCABULARY = 4096
WORD_KINDS = 8
"""Number of word kinds; each has VOCABULARY // WORD_KINDS consecutive token ids."""
_CLUSTERS_PER_KIND = 4
_LIMIT = 8.0
"""Activations between layers are integers in -_LIMIT.._LIMIT."""
_HIDDEN_LIMIT = 31.0


def original_expert(
    seed: int, layer: int, expert: int, d_model: int, d_ffn: int
) -> tuple[Tensor, ...]:
    """Return the tensors of one expert as in the checkpoint; the same on every rank.

    Returns:
        (w_in (D, F), w_out (F, D), scale (F,)), all float32 on the CPU. `expert` -1 is the shared
        expert.
    """
    rng = np.random.default_rng((seed, 1 + layer, 1 + expert))
    w_in = rng.integers(-1, 2, (d_model, d_ffn)).astype(np.float32)
    w_out = rng.integers(-1, 2, (d_ffn, d_model)).astype(np.float32)
    scale = np.exp2(rng.integers(-1, 2, d_ffn)).astype(np.float32)
    return tuple(torch.from_numpy(array) for array in (w_in, w_out, scale))


def expert_forward(tensors: Sequence[Tensor], x: Tensor) -> Tensor:
    """Run one expert's FFN: (n, D) integers -> (n, D) integers, |value| <= 31 * F."""
    w_in, w_out, scale = tensors
    hidden = torch.relu(x @ w_in) * scale
    return torch.floor(hidden / 8).clamp_(max=_HIDDEN_LIMIT) @ w_out


def combine_weights(top_k: int) -> Tensor:
    """Return (k,) float32: the share of each choice in sixteenths, best choice first."""
    return torch.tensor([max(1, 8 >> choice) / 16 for choice in range(top_k)], dtype=torch.float32)


def _clustered_embedding(rng: np.random.Generator, d_model: int) -> NDArray[np.float32]:
    """Return (V, D) integers; words of one kind are close to each other, as in trained models.

    So the gates prefer some experts.
    """
    ids = np.arange(VOCABULARY)
    kind = ids // (VOCABULARY // WORD_KINDS)
    cluster = kind * _CLUSTERS_PER_KIND + ids % _CLUSTERS_PER_KIND
    kinds = rng.integers(-4, 5, (WORD_KINDS, d_model))
    clusters = rng.integers(-1, 2, (WORD_KINDS * _CLUSTERS_PER_KIND, d_model))
    words = rng.integers(-1, 2, (VOCABULARY, d_model))
    table: NDArray[np.int64] = kinds[kind] + clusters[cluster] + words
    return table.astype(np.float32)


class PlainLayer(NamedTuple):
    """The values of one layer, which one process computes alone."""

    before: Tensor
    """(n, D) input of its experts."""
    chosen: Tensor
    """(n, k) experts of each row."""
    routed: Tensor
    """(n, D) sum of their results, in sixteenths."""
    after: Tensor
    """(n, D) activations after the layer."""


@dataclass(frozen=True, eq=False)
class Model:
    """The parts that every rank has: embeddings, gates and shared experts."""

    seed: int
    num_layers: int
    num_experts: int
    top_k: int
    d_model: int
    d_ffn: int
    embedding: Tensor
    """(V, D) float32 integers; the rows of a token and of its predecessor are added."""
    gates: Tensor
    """(L, D, E) float32 integers."""
    shared: tuple[tuple[Tensor, ...], ...]
    """(L,) tensors of each layer's shared expert."""
    device: torch.device

    @classmethod
    def build(
        cls,
        *,
        seed: int,
        layers: int,
        experts: int,
        top_k: int,
        d_model: int,
        d_ffn: int,
        device: torch.device,
    ) -> "Model":
        """Make the model of a seed.

        Raises:
            InvalidInput: with these sizes the arithmetic would not be exact.
        """
        if 16 * _HIDDEN_LIMIT * d_ffn * (top_k + 1) >= 2**24:
            raise InvalidInput(
                f"d_ffn {d_ffn} with top_k {top_k} leaves the exact range of float32"
            )
        rng = np.random.default_rng((seed, 0))
        embedding = _clustered_embedding(rng, d_model)
        gates = rng.integers(-3, 4, (layers, d_model, experts)).astype(np.float32)
        shared = tuple(
            tuple(t.to(device) for t in original_expert(seed, layer, -1, d_model, d_ffn))
            for layer in range(layers)
        )
        embedded, gated = (torch.from_numpy(array).to(device) for array in (embedding, gates))
        return cls(seed, layers, experts, top_k, d_model, d_ffn, embedded, gated, shared, device)

    @cached_property
    def experts(self) -> list[list[tuple[Tensor, ...]]]:
        """(L, E) tensors of every expert as in the checkpoint."""
        sizes = self.d_model, self.d_ffn
        return [
            [
                tuple(t.to(self.device) for t in original_expert(self.seed, layer, expert, *sizes))
                for expert in range(self.num_experts)
            ]
            for layer in range(self.num_layers)
        ]

    def embed(self, tokens: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the activations of (n,) int64 token ids: (n, D) integers in -8..8.

        `before` are the (n,) tokens before them; None takes the row before each.
        """
        before = torch.roll(tokens, 1) if before is None else before
        return (
            (self.embedding[tokens] + self.embedding[before] / 4).round_().clamp_(-_LIMIT, _LIMIT)
        )

    def route(self, layer: int, x: Tensor) -> Tensor:
        """Return (n, k) int64: the experts of each row, best first; the lower id wins a tie."""
        logits = x @ self.gates[layer]
        # Logits are integers, so scaling by E and subtracting the id makes every value distinct.
        ranked = logits * self.num_experts - torch.arange(self.num_experts, device=x.device)
        return torch.topk(ranked, self.top_k, dim=1).indices

    def next_layer(
        self, layer: int, x: Tensor, routed: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """Return the residual, the shared expert and the routed sum, as integers in -8..8.

        `shared` is the (n, D) output of the shared expert if another rank computed it.
        """
        mixed = (expert_forward(self.shared[layer], x) if shared is None else shared) + routed
        return (x + torch.floor(mixed / 64)).clamp_(-_LIMIT, _LIMIT)

    def undistributed(
        self, x: Tensor, attend: Callable[[int, Tensor], Tensor] = lambda layer, x: x
    ) -> Iterator[PlainLayer]:
        """Yield what each layer computes without an exchange, with the checkpoint's experts.

        Args:
            x: (n, D) activations before the first layer.
            attend: see `Traffic.attend`.
        """
        share = combine_weights(self.top_k).to(x.device)
        for layer, experts in enumerate(self.experts):
            x = attend(layer, x)
            chosen, routed = self.route(layer, x), torch.zeros_like(x)
            for expert in torch.unique(chosen).tolist():
                row, choice = torch.nonzero(chosen == expert, as_tuple=True)
                results = expert_forward(experts[expert], x[row]) * share[choice, None]
                routed.index_add_(0, row, results)
            found = PlainLayer(x, chosen, routed, self.next_layer(layer, x, routed))
            yield found
            x = found.after
