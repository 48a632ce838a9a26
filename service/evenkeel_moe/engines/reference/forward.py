"""One step of one rank: embed the tokens; then route, exchange and combine them in each layer."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.reference.model import combine_weights
from evenkeel_moe.engines.reference.parts import LayerDispatch, RankParts, Span

_HASH = 2654435761
"""Knuth's multiplier; spreads consecutive token indices over the replicas."""


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """The result of a step."""

    routed: Tensor
    """(L, n, D) routed sums of each layer."""
    final: Tensor
    """(n, D) activations after the last layer."""
    counts: NDArray[np.int64]
    """(L, slots_per_rank) tokens that this rank's slots received."""
    served: NDArray[np.int64]
    """(L,) tokens that this rank computed, with resident, fetched and shared experts."""
    compute_s: NDArray[np.float64]
    """(L,) seconds in the routed experts."""
    stop: bool
    """True if the group stops after this step."""
    spans: list[Span]
    """The stages of all layers, if they are recorded."""


class Forward:
    """The distributed model on one rank."""

    def __init__(self, parts: RankParts, dispatch: LayerDispatch) -> None:
        self._model, self._traffic = parts.model, parts.traffic
        self._rank, self._num_ranks = parts.config.rank, parts.config.num_ranks
        self._dispatch = dispatch
        self._pace = parts.pace
        self._share = combine_weights(parts.model.top_k).to(parts.model.device)

    def step(self, step: int, stop: bool) -> StepResult:
        """Run one step; all ranks of the group call it for the same step.

        Raises:
            EpochMismatch: the ranks' maps differ.
            RuntimeError: a peer has ended.
        """
        tokens = self._traffic.tokens(step, self._rank).to(self._model.device)
        n = len(tokens)
        index = torch.arange(n, device=tokens.device) + (step * self._num_ranks + self._rank) * n
        token_hash = (index * _HASH >> 16) & 0xFFFF
        x = self._model.embed(tokens, self._traffic.before(step, self._rank))
        routed, counts, served, compute_s = [], [], [], []
        spans: list[Span] = []
        self._pace.enter(step)
        for layer in range(self._model.num_layers):
            x = self._traffic.attend(layer, x)
            chosen = self._model.route(layer, x)
            result = self._dispatch.layer(layer, x, chosen, token_hash, stop)
            total = (result.choices * self._share[None, :, None]).sum(dim=1)
            routed.append(total)
            counts.append(result.counts.numpy())
            served.append(result.served)
            compute_s.append(result.compute_s)
            spans += result.spans
            stop = result.stop
            x = self._model.next_layer(layer, x, total, result.shared)
        return StepResult(
            torch.stack(routed),
            x,
            np.stack(counts),
            np.array(served),
            np.array(compute_s),
            stop,
            spans,
        )


class Witness:
    """The same model without distribution, with the checkpoint's experts, for one rank's tokens."""

    def __init__(self, parts: RankParts) -> None:
        self._model, self._traffic, self._rank = parts.model, parts.traffic, parts.config.rank

    def mismatches(self, step: int, result: StepResult) -> int:
        """Return the number of rows of a step with a bit that differs from this model."""
        tokens = self._traffic.tokens(step, self._rank).to(self._model.device)
        x = self._model.embed(tokens, self._traffic.before(step, self._rank))
        wrong = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        layers = self._model.undistributed(x, self._traffic.attend)
        for layer, routed in zip(layers, result.routed, strict=True):
            wrong |= (layer.routed != routed).any(dim=1)
        wrong |= (layer.after != result.final).any(dim=1)
        return int(wrong.sum())
