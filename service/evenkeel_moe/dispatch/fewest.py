"""Fewest active experts: one replica per expert and batch, few experts on the fullest rank.

Where decode is limited by reading weights, a second replica of an expert costs a second read and
saves nothing. So this rule sends all tokens of an expert to one replica, and chooses replicas so
that the rank with the most active experts has as few as possible: exactly the least, see
`fewest_active`. It balances tokens only among choices that are equal in this; for large batches,
whose time follows the tokens, LPLB is the better rule.

METRO has a near-optimal algorithm for GPUs. The exact choice here runs on a CPU thread, because it
takes less time there than LPLB's split.

Source: METRO (arXiv 2512.09277).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.dispatch.choice import DemandNeeded, check_experts
from evenkeel_moe.dispatch.counts import check_counts
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.fewest_active import choose_replicas, slots_by_expert
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement


class FewestReplicas:
    """The replica of every expert with the fewest active experts per rank, on one CPU thread.

    It is not safe for concurrent use: its results are overwritten from batch to batch.
    """

    def __init__(self, placement: Placement) -> None:
        """Prepare a placement, once per epoch.

        Raises:
            InfeasiblePlan: an expert has no replica.
        """
        missing = np.argwhere(placement.logcnt == 0)
        if len(missing):
            layer, lost = missing[0]
            raise InfeasiblePlan(
                f"{len(missing)} experts without a replica, first: layer {layer} expert {lost}",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
        layers, _, ranks, experts = placement.sizes
        # A copy: numba would compile another version for a read-only array.
        self._phy2log = placement.phy2log.copy()
        self._first, self._following = _list_slots(self._phy2log, experts, ranks)
        self._active = np.zeros((layers, ranks), np.int64)
        self._tokens = np.zeros((layers, ranks))
        self._slots = np.full((layers, experts), -1, np.int64)

    @property
    def active(self) -> NDArray[np.int64]:
        """(L, R) int64 active experts of each rank in the last batch."""
        return self._active

    @property
    def rank_load(self) -> NDArray[np.float64]:
        """(L, R) float64 [tokens] of each rank in the last batch."""
        return self._tokens

    def choose(self, counts: Tensor) -> Tensor:
        """Choose the replicas for one batch of every layer.

        Args:
            counts: (L, E) [tokens], summed over all ranks; idle ranks add nothing. On a GPU this
                copies them to the CPU, which is a sync.

        Returns:
            (L, E) int64 slot of each expert with tokens, -1 for the others, on the CPU; the next
            call overwrites it.

        Raises:
            ShapeMismatch: counts of another placement.
            InvalidInput: half precision, or counts that are negative or not finite.
        """
        load = check_counts(counts.cpu(), self._slots.shape, "counts").contiguous().numpy()
        _choose_layers(
            load, self._phy2log, self._first, self._following, self._active, self._tokens,
            self._slots,
        )  # fmt: skip
        return torch.from_numpy(self._slots)


@kernel
def _list_slots(
    phy2log: NDArray[np.int32], num_experts: int, num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `slots_by_expert` of every layer: (L, E) and (L, S)."""
    layers, slots = phy2log.shape
    first = np.empty((layers, num_experts), np.int64)
    following = np.empty((layers, slots), np.int64)
    for layer in range(layers):
        first[layer], following[layer] = slots_by_expert(phy2log[layer], num_experts, num_ranks)
    return first, following


@kernel
def _choose_layers(
    load: NDArray[np.float64],
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    active: NDArray[np.int64],
    tokens: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> None:
    """Run `choose_replicas` on every layer of an (L, E) load."""
    for layer in range(load.shape[0]):
        choose_replicas(
            load[layer], phy2log[layer], first[layer], following[layer], active[layer],
            tokens[layer], chosen[layer],
        )  # fmt: skip


class FewestChoice:
    """One replica for all tokens of an expert, chosen anew for every batch; equal on all ranks."""

    needs = DemandNeeded.DEMAND

    def __init__(self, tables: DispatchTables) -> None:
        """Prepare the tables' placement for one layer at a time."""
        self._tables = tables
        placement = tables.placement
        self._solvers = [
            FewestReplicas(
                Placement(
                    placement.phy2log[layer : layer + 1], placement.num_ranks, tables.num_experts
                )
            )
            for layer in range(placement.num_layers)
        ]

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
        tables = self._tables
        chosen = self._solvers[layer].choose(counts.unsqueeze(0))[0].to(tables.device)
        return torch.where(chosen >= 0, chosen, tables.log2phy[layer, :, 0])

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`. On a GPU it copies counts to the CPU, which is a sync."""
        check_experts(experts)
        if demand is None:
            raise InvalidInput(
                "the fewest active experts need the demand of all ranks: all-gather the counts"
                " first"
            )
        tables = self._tables
        check_counts(demand, (tables.num_ranks, tables.num_experts), "demand")
        served = self.table(layer, demand.sum(dim=0))
        return torch.where(experts >= 0, served[experts.clamp(min=0).to(torch.int64)], -1)
