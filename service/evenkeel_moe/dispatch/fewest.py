"""Fewest active experts: one replica per expert and batch, few experts on the fullest rank.

Where decode is limited by reading weights, a second replica of an expert costs a second read and
saves nothing. So this rule sends all tokens of an expert to one replica, and chooses replicas so
that the rank with the most active experts has as few as possible: exactly the least, see
`batch_split`. It balances tokens only among choices that are equal in this; for large batches,
whose time follows the tokens, LPLB is the better rule.

METRO has a near-optimal algorithm for GPUs. The exact choice here runs on a CPU thread, because it
takes less time there than LPLB's split.

Source: METRO (arXiv 2512.09277).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.batch_split import choose_replicas, list_layers
from evenkeel_moe.dispatch.choice import check_demand
from evenkeel_moe.dispatch.counts import check_counts
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement


class FewestReplicas:
    """The replica of every expert with the fewest active experts per rank, on one CPU thread.

    It is not safe for concurrent use: its results are overwritten from batch to batch.

    Attributes:
        active: (L, R) int64 active experts of each rank in the last batch.
        rank_load: (L, R) float64 [tokens] of each rank in the last batch.
    """

    def __init__(self, placement: Placement) -> None:
        """Prepare a placement, once per epoch.

        Raises:
            InfeasiblePlan: an expert has no replica.
        """
        placement.check_placed()
        layers, _, ranks, experts = placement.sizes
        # A copy: numba would compile another version for a read-only array.
        rows = placement.phy2log.copy()
        first, following, _ = list_layers(rows, experts, ranks)
        self._lists = rows, first, following
        self.active: NDArray[np.int64] = np.zeros((layers, ranks), np.int64)
        self.rank_load: NDArray[np.float64] = np.zeros((layers, ranks))
        self._slots = np.full((layers, experts), -1, np.int64)

    def choose(self, counts: Tensor, layer: int | None = None) -> Tensor:
        """Choose the replicas for one batch of every layer, or of one.

        Args:
            counts: (L, E) [tokens], summed over all ranks; idle ranks add nothing. (1, E) for one
                layer. On a GPU this copies them to the CPU, which is a sync.
            layer: index of the layer; None for all.

        Returns:
            (L, E) int64 slot of each expert with tokens, -1 for the others, on the CPU; the next
            call overwrites it.

        Raises:
            ShapeMismatch: counts of another placement.
            InvalidInput: half precision, or counts that `check_counts` refuses.
        """
        which = slice(None) if layer is None else slice(layer, layer + 1)
        slots = self._slots[which]
        load = check_counts(counts.cpu(), slots.shape, "counts").contiguous().numpy()
        out = self.active, self.rank_load, self._slots
        _choose_layers(load, which.start or 0, *self._lists, *out)
        return torch.from_numpy(slots)


@kernel
def _choose_layers(
    load: NDArray[np.float64],
    first_layer: int,
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> None:
    """Run `choose_replicas` on an (n, E) load of the layers from `first_layer` on."""
    for n in range(load.shape[0]):
        layer = first_layer + n
        choose_replicas(
            load[n], phy2log[layer], first[layer], following[layer], active[layer],
            tokens[layer], chosen[layer],
        )  # fmt: skip


class FewestChoice:
    """One replica for all tokens of an expert, chosen anew for every batch; equal on all ranks."""

    needs_demand = True

    def __init__(self, tables: DispatchTables) -> None:
        """Prepare the tables' placement."""
        self._tables = tables
        self._replicas = FewestReplicas(tables.placement)

    def table(self, layer: int, counts: Tensor) -> Tensor:
        """Return the slot that serves each expert in one batch of a layer.

        An engine that looks replicas up in a table of its own writes this over it.

        Args:
            layer: index of the MoE layer.
            counts: (E,) [tokens], summed over all ranks.

        Returns:
            (E,) int64 slots on the device of the tables. An expert without tokens keeps its first
            replica, so that every entry is valid.

        Raises:
            ShapeMismatch, InvalidInput: counts of another deployment or type.
        """
        found = self._tables.log2phy[layer, :, 0]
        chosen = self._replicas.choose(counts.unsqueeze(0), layer)[0].to(found.device)
        return torch.where(chosen >= 0, chosen, found)

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`. On a GPU it copies counts to the CPU, which is a sync."""
        wanted = check_demand(self._tables, experts, demand)
        served = self.table(layer, wanted.sum(dim=0))
        return torch.where(experts >= 0, served[experts.clamp(min=0).to(torch.int64)], -1)
