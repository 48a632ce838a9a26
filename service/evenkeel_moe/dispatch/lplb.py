"""LPLB: splits tokens over replicas so that the fullest rank has the least load.

This is one linear program per layer and batch: minimise M such that for every rank the load of its
shared copies + its fixed load + a slack = M, and for every expert on several ranks the loads of its
copies sum to the tokens routed to it. The matrix depends on the placement alone; a batch changes
only the right-hand side. `ExactSplit` solves it exactly on a CPU thread; `interior.BatchedSplit` is
the interior-point form for GPUs.

The peak is the best that a dispatcher can reach on this placement: all tokens of an expert with one
replica go to that replica, however hot it is.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.dispatch.choice import DemandNeeded, assign_quotas, check_experts
from evenkeel_moe.dispatch.counts import bad_values, check_counts, check_type
from evenkeel_moe.dispatch.split_kernels import share_kernel, split_kernel
from evenkeel_moe.dispatch.split_structure import SplitStructure
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.placement import Placement


@dataclass(frozen=True, eq=False, slots=True)
class TokenSplit:
    """The split of one batch in every layer."""

    probabilities: Tensor
    """(L, E, X) float64, aligned with log2phy: share of the tokens of an expert for each replica;
    rows sum to 1."""
    peak: Tensor
    """(L,) float64 [tokens]: load of the fullest rank with these shares, the optimum of the
    program."""


class ExactSplit:
    """The exact split of one placement on one CPU thread.

    It is not safe for concurrent use: its buffers, and its results, are reused from batch to batch.
    """

    def __init__(self, placement: Placement) -> None:
        """Prepare a placement, once per epoch.

        Raises:
            InfeasiblePlan: an expert has no replica.
        """
        self.structure = SplitStructure.of(placement)
        edges = len(self.structure.edge_rank)
        self._flow = np.zeros(edges)
        self._used = np.zeros((placement.num_layers, placement.num_ranks))
        self._peak = np.zeros(placement.num_layers)
        self._shares = self.structure.even.copy()
        self._split = TokenSplit(torch.from_numpy(self._shares), torch.from_numpy(self._peak))
        self._shape = (placement.num_layers, placement.num_logical_experts)
        starts = self.structure.entry_from
        layer_of = np.repeat(np.arange(placement.num_layers), np.diff(starts))
        self._entry_layer = layer_of.astype(np.int64)
        self._entry_expert = self.structure.expert[self.structure.entry_at[:, 0]]

    @property
    def rank_load(self) -> NDArray[np.float64]:
        """(L, R) float64 [tokens] load of the ranks after the split of the last batch."""
        return self._used

    def solve(self, counts: Tensor) -> TokenSplit:
        """TokenSplit one batch of every layer.

        Args:
            counts: (L, E) [tokens] - integers or float32/float64 on the CPU, summed over all ranks;
                idle ranks add nothing.

        Returns:
            Probabilities and peaks; the next call overwrites them.

        Raises:
            ShapeMismatch: counts of another placement.
            InvalidInput: half precision, or counts that are negative or not finite.
        """
        load = self._run(counts, whole=False)
        s = self.structure
        share_kernel(
            self._flow,
            load,
            s.even,
            s.expert,
            s.copies,
            s.entry_from,
            s.entry_edge,
            s.entry_at,
            self._shares,
        )
        return self._split

    def quotas(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """TokenSplit one batch of every layer into whole tokens.

        Args:
            counts: (L, E) [tokens], whole numbers.

        Returns:
            (quotas (L, E, X) int64 [tokens] summing to the counts, peak (L,) float64: the optimum
            of the program rounded up, which is the least possible in whole tokens).

        Raises:
            ShapeMismatch, InvalidInput: as `solve`; also for counts that are not whole.
        """
        if counts.is_floating_point() and bool((counts != counts.floor()).any()):
            raise InvalidInput("counts must be whole tokens to be split into quotas")
        load = self._run(counts, whole=True)
        structure = self.structure
        shares = np.floor(load[:, :, None] * structure.even + 1e-9)
        # Fixed experts: the remainder of an even split goes to the first replicas.
        over = load - shares.sum(axis=2)
        turn = np.arange(shares.shape[2])
        shares += (turn < over[:, :, None]) & (structure.even > 0)
        per_edge = self._flow[structure.entry_edge]
        copies = structure.copies[structure.entry_edge]
        nth = _nth_of_edge(structure.entry_edge)
        shares[self._entry_layer, self._entry_expert, structure.entry_at[:, 1]] = np.floor(
            (per_edge + copies - 1 - nth) / copies
        )
        return torch.from_numpy(shares.astype(np.int64)), torch.from_numpy(self._peak.copy())

    def _run(self, counts: Tensor, whole: bool) -> NDArray[np.float64]:
        """Solve one batch into the buffers; returns the counts as float64."""
        s = self.structure
        check_type(counts, self._shape, "counts")
        load: NDArray[np.float64] = counts.to(torch.float64).contiguous().numpy()
        solved = split_kernel(
            load, whole, s.hosts, s.fixed_rank, s.shared_from, s.expert, s.edge_from, s.edge_rank,
            s.edge_expert, s.rank_from, s.rank_edge, self._flow, self._used, self._peak,
        )  # fmt: skip
        if not solved:
            raise bad_values(counts.to(torch.float64), "counts")
        return load


def _nth_of_edge(entry_edge: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 for the first replica of an edge, 1 for the second, ..."""
    order = np.argsort(entry_edge, kind="stable")
    ordered = entry_edge[order]
    first = np.searchsorted(ordered, ordered)
    nth = np.empty_like(entry_edge)
    nth[order] = np.arange(len(entry_edge)) - first
    return nth


class LplbChoice:
    """LPLB as a replica choice: whole-token quotas from the exact split of the demand of the batch.

    The peak is exactly the optimum of the program rounded up; sampling would add noise.
    """

    needs = DemandNeeded.DEMAND

    def __init__(self, tables: DispatchTables) -> None:
        """Prepare the tables' placement for one layer at a time."""
        self._tables = tables
        placement = tables.placement
        self._solvers = [
            ExactSplit(
                Placement(
                    placement.phy2log[layer : layer + 1], placement.num_ranks, tables.num_experts
                )
            )
            for layer in range(placement.num_layers)
        ]

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`. On a GPU it copies counts to the CPU, which is a sync.

        `lplb_device.DeviceLplbChoice` does not.
        """
        check_experts(experts)
        if demand is None:
            raise InvalidInput("LPLB needs the demand of all ranks: all-gather the counts first")
        tables = self._tables
        check_counts(demand, (tables.num_ranks, tables.num_experts), "demand")
        counts = demand.sum(dim=0)
        found, _ = self._solvers[layer].quotas(counts.cpu().unsqueeze(0))
        quotas = torch.zeros(
            (tables.num_experts, tables.width), dtype=torch.int64, device=tables.device
        )
        quotas[:, : found.shape[2]] = found[0].to(tables.device)
        slots = tables.log2phy[layer]
        holder = torch.div(slots, tables.slots_per_rank, rounding_mode="floor")
        return assign_quotas(experts, slots, holder, quotas, demand.to(torch.int64), tables.ep_rank)
