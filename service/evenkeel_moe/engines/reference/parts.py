"""The parts of one rank that its dispatch, its forward pass and its agent share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.dispatch import DispatchTables
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.pace import Pace
from evenkeel_moe.engines.reference.requests import Lengths, RequestTraffic, draw_requests
from evenkeel_moe.engines.reference.slots import PooledWeights, Router
from evenkeel_moe.engines.reference.traffic import (
    TextTraffic,
    Traffic,
    code_tokens,
    prose_tokens,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology


@dataclass(eq=False, slots=True)
class ProcessParts:
    """The parts that a rank process keeps while it lives, from group to group."""

    model: Model
    weights: PooledWeights
    requests: RequestTraffic | None = None
    """With their KV cache; None if the ranks serve endless text."""

    @classmethod
    def build(cls, config: RankConfig, device: torch.device) -> "ProcessParts":
        """Make the parts of a process that begins, with empty slots."""
        model = Model.build(**config.model_sizes, device=device)
        buffers = config.layers * config.pool_slots_per_layer
        weights = PooledWeights(
            config.layers, config.slots_per_rank, buffers, config.d_model, config.d_ffn, device
        )
        return cls(model, weights)

    def read_ahead(self, config: RankConfig) -> None:
        """Read what is read at its first use: a group that serves would wait for it."""
        _ = self.model.experts
        prose_tokens()
        if config.shift_at:
            code_tokens()

    def recover(self, config: RankConfig, placement: Placement, held: NDArray[np.int32]) -> int:
        """Load what the placement gives this rank in the place of ranks that died.

        Args:
            config: of this rank in the group of those who are left.
            placement: with which it begins.
            held: (L, slots_per_rank) experts in this rank's slots.

        Returns:
            the number of experts that were loaded.

        Raises:
            InfeasiblePlan: the placement needs more buffers than the pool has.
        """
        make_room = {} if self.requests is None else {"make_room": self.requests.make_room}
        return self.weights.load(placement, config.rank, config.seed, held, **make_room)

    def begin(self, config: RankConfig, placement: Placement) -> None:
        """Fill the slots of a process in its first group from the checkpoint; then take requests.

        Raises:
            InfeasiblePlan: the placement needs more buffers than the pool has.
            InvalidInput: the experts leave too few buffers for the longest request.
        """
        self.weights.load(placement, config.rank, config.seed)
        if not config.requests_per_s:
            return
        lengths = Lengths(config.prompt_tokens, config.output_tokens)
        # With the group in the seed, no two processes of a run are asked the same.
        seed = config.seed, config.rank, config.group
        asked = draw_requests(seed, config.requests_per_s, lengths)
        self.requests = RequestTraffic(
            self.model, self.weights, asked, lengths.most, config.tokens_per_step
        )


@dataclass(frozen=True, eq=False, slots=True)
class RankParts:
    """One rank's configuration, model, input, slots, tables and group."""

    config: RankConfig
    model: Model
    traffic: Traffic
    weights: PooledWeights
    router: Router
    communicator: Communicator
    """The engine's own, over all ranks."""
    pace: Pace

    @classmethod
    def build(
        cls,
        config: RankConfig,
        process: ProcessParts,
        placement: Placement,
        epoch: int,
        communicator: Communicator,
    ) -> "RankParts":
        """Make the parts of a rank of a group, whose slots hold the experts of the placement."""
        model, weights = process.model, process.weights
        router = Router(placement, epoch, model.device)
        traffic = process.requests or TextTraffic(
            config.num_ranks, config.tokens_per_step, config.shift_at, config.shift_back
        )
        return cls(config, model, traffic, weights, router, communicator, Pace(config))

    def dispatch_tables(self) -> DispatchTables:
        """Return the router's current map in the form of the dispatch rules."""
        config = self.config
        placement = Placement(self.router.phy2log, self.router.num_ranks, config.experts)
        nodes = config.nodes
        topology = Topology(nodes) if nodes else Topology.single_node(config.num_ranks)
        return DispatchTables.of(placement, topology, config.rank, self.model.device)


@dataclass(frozen=True, eq=False, slots=True)
class LayerOutcome:
    """The result of one layer on one rank."""

    choices: Tensor
    """(n, k, D) results of this rank's choices."""
    shared: Tensor | None
    """(n, D) results of a dispatched shared expert; None if each rank runs its own copy."""
    counts: Tensor
    """(slots_per_rank,) int64 on the CPU - tokens of each local slot, to be recorded. Tokens of a
    fetched expert count for a slot of the placement that has the expert. So over all ranks the
    sum counts every routed choice once."""
    served: int
    """Tokens computed on this rank, also by the shared expert."""
    compute_s: float
    """Seconds in the routed experts, without the collectives."""
    stop: bool
    """True if some rank asked to stop after this step."""
    spans: Sequence["Span"] = ()
    """The stages that ended in this layer, if `RankConfig.timeline` asks for them."""


class Span(NamedTuple):
    """The time of one stage of a layer."""

    layer: int
    stage: str
    began: float
    """[s] of `time.perf_counter`."""
    ended: float


class LayerDispatch(Protocol):
    """Sends one layer's tokens to their experts and back; all ranks call it for the same layer."""

    def layer(
        self, layer: int, x: Tensor, chosen: Tensor, token_hash: Tensor, stop: bool
    ) -> LayerOutcome:
        """Run every choice of every row.

        Args:
            layer: the layer.
            x: (n, D) activations of this rank.
            chosen: (n, k) int64 experts.
            token_hash: (n,) int64 >= 0.
            stop: True if this rank wants to stop after the step.

        Raises:
            EpochMismatch: a rank's map has another epoch; no result leaves the layer.
        """
        ...

    def close(self) -> None:
        """Stop the threads of the dispatch."""
        ...
