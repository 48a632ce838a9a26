"""What every dispatch of the reference engine is called with and answers."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from evenkeel_moe.dispatch import DispatchTables
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.slots import Router
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology

__all__ = ["LayerDispatch", "LayerOutcome", "tables_of"]


@dataclass(frozen=True, eq=False, slots=True)
class LayerOutcome:
    """What one layer brought this rank."""

    choices: Tensor
    """(n, k, D) result of each of this rank's choices."""
    shared: Tensor | None
    """(n, D) results of the shared expert where it was dispatched; None where each rank runs its own."""
    counts: Tensor
    """(slots_per_rank,) int64 on the CPU - tokens of each local slot, to be recorded. What a transient expert served
    counts for a slot that holds it for good: over all ranks the sum is every routed choice once."""
    served: int
    """Tokens computed here, shared ones included."""
    compute_s: float
    """Seconds in the experts, without the collectives."""
    stop: bool
    """Some rank asked to stop after this step."""


class LayerDispatch(Protocol):
    """Carries one layer's tokens to their experts and back; every rank calls it for the same layer."""

    def layer(
        self, layer: int, x: Tensor, chosen: Tensor, token_hash: Tensor, stop: bool
    ) -> LayerOutcome:
        """Run every choice of every row.

        Args:
            layer: which.
            x: (n, D) activations of this rank.
            chosen: (n, k) int64 experts.
            token_hash: (n,) int64, not negative.
            stop: this rank wants to stop after the step.

        Raises:
            EpochMismatch: a rank's map has another epoch; nothing was computed.
        """
        ...

    def close(self) -> None:
        """End what runs beside the engine's thread."""
        ...


def tables_of(config: RankConfig, router: Router, device: torch.device) -> DispatchTables:
    """A rule's view of the router's present map."""
    placement = Placement(router.phy2log, router.num_ranks, config.experts)
    topology = Topology(config.nodes) if config.nodes else Topology.single_node(config.num_ranks)
    return DispatchTables.of(placement, topology, config.rank, device)
