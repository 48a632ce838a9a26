"""The dispatch rules: which slots a rank's tokens go to, and how the rows of one layer travel.

Rules that choose a slot for each choice use the exchange by slots. Libra has its own two-stage
exchange (`libra`). A rule keeps maps of its own that follow the router's epoch. So a swap changes
both at the same step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.dispatch import (
    DispatchTables,
    FewestChoice,
    LplbChoice,
    NearestChoice,
    ReplicaChoice,
    Waterfill,
    count_choices,
    expand_topk,
)
from evenkeel_moe.engines.reference.config import DispatchRule
from evenkeel_moe.engines.reference.exchange import Exchange
from evenkeel_moe.engines.reference.libra import TwoStageDispatch
from evenkeel_moe.engines.reference.parts import LayerDispatch, LayerOutcome, RankParts

_CHOICES: dict[DispatchRule, Callable[[DispatchTables], ReplicaChoice]] = {
    DispatchRule.NEAREST: NearestChoice,
    DispatchRule.LPLB: LplbChoice,
    DispatchRule.FEWEST: FewestChoice,
}
"""The rules that need more than the router's map."""


def make_dispatch(parts: RankParts, connect: Callable[[str], Communicator]) -> LayerDispatch:
    """Make the dispatch of a rank's configuration; collective over the group.

    Args:
        parts: of this rank.
        connect: makes another communicator of the group.
    """
    if parts.config.dispatch.fetches:
        return TwoStageDispatch(parts, connect("prefetch"))
    return SlotDispatch(parts)


class SlotDispatch:
    """All rules that choose a slot of the placement for each choice."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts
        self._config = config = parts.config
        self._router = parts.router
        self._communicator = parts.communicator
        self._waterfill: Waterfill | None = None
        if config.dispatch.moves_shared:
            self._waterfill = Waterfill(
                config.num_ranks,
                config.slots_per_rank,
                config.rank,
                all_ranks=config.dispatch is DispatchRule.WATERFILL_ALL_RANKS,
            )
        # With Waterfill, each rank has one more slot, for the shared expert.
        shared = int(self._waterfill is not None)
        width = config.slots_per_rank + shared
        self._exchange = Exchange(parts.communicator, width, config.d_model, parts.pace, shared)
        self._rule: ReplicaChoice | None = None
        self._rule_epoch = -1

    def layer(
        self, layer: int, x: Tensor, chosen: Tensor, token_hash: Tensor, stop: bool
    ) -> LayerOutcome:
        """See `LayerDispatch.layer`."""
        slots = self._slots(layer, chosen, token_hash)
        if self._waterfill is not None:
            shared_rank = self._shared_rank(self._waterfill, layer, slots)
            weights = torch.ones(slots.shape)
            slots, _ = expand_topk(slots, weights, shared_rank, self._config.slots_per_rank)
        columns = slots.shape[1]
        result = self._exchange.layer(
            x.repeat_interleave(columns, dim=0),
            slots.reshape(-1),
            self._router.epoch,
            stop,
            lambda local: self._tensors(layer, local),
        )
        outputs = result.outputs.reshape(len(x), columns, x.shape[1])
        top_k = chosen.shape[1]
        served = int(result.received.sum())
        return LayerOutcome(
            choices=outputs[:, :top_k],
            shared=outputs[:, top_k] if self._waterfill is not None else None,
            counts=result.received[: self._config.slots_per_rank],
            served=served if self._waterfill is not None else served + len(x),
            compute_s=result.compute_s,
            stop=result.stop,
        )

    def close(self) -> None:
        """Do nothing: this dispatch has no threads."""

    def _slots(self, layer: int, chosen: Tensor, token_hash: Tensor) -> Tensor:
        if self._config.dispatch is DispatchRule.EVEN or self._config.dispatch.moves_shared:
            return self._router.destinations(layer, chosen, token_hash)
        rule = self._current_rule()
        demand = None
        if rule.needs_demand:
            demand = self._communicator.all_gather(count_choices(chosen, self._config.experts))
        return rule.choose(layer, chosen, demand)

    def _current_rule(self) -> ReplicaChoice:
        if self._rule is None or self._rule_epoch != self._router.epoch:
            self._rule = _CHOICES[self._config.dispatch](self._parts.dispatch_tables())
            self._rule_epoch = self._router.epoch
        return self._rule

    def _shared_rank(self, rule: Waterfill, layer: int, slots: Tensor) -> Tensor:
        """Return (n,): the rank of each token's shared expert, chosen by the ranks' routed load."""
        own, tokens = rule.static_score(slots)
        if self._config.dispatch is DispatchRule.WATERFILL_STATIC:
            return rule.choose(slots, own, tokens, salt=layer)
        gathered = self._communicator.all_gather(torch.cat([own, tokens.unsqueeze(0)]))
        score = rule.dynamic_score(gathered[:, :-1])
        return rule.choose(slots, score, gathered[:, -1].sum(), salt=layer)

    def _tensors(self, layer: int, local: int) -> Sequence[Tensor]:
        if local == self._config.slots_per_rank:
            return self._parts.model.shared[layer]
        return self._parts.weights.tensors(layer, local)
