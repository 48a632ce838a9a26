"""The interface of the reference engine's dispatch rules."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from evenkeel_moe.dispatch import DispatchTables
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.slots import Router
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology


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
            EpochMismatch: a rank's map has another epoch; nothing was computed.
        """
        ...

    def close(self) -> None:
        """Stop the threads of the dispatch."""
        ...


def tables_of(config: RankConfig, router: Router, device: torch.device) -> DispatchTables:
    """Return the router's current map in the form of the dispatch rules."""
    placement = Placement(router.phy2log, router.num_ranks, config.experts)
    topology = Topology(config.nodes) if config.nodes else Topology.single_node(config.num_ranks)
    return DispatchTables.of(placement, topology, config.rank, device)
