"""The structure of the per-batch split, which depends on the placement alone and is built once.

Only experts with replicas on two or more ranks can be split. Every other expert adds a fixed load
to its rank. Copies of an expert on one rank count as one, because the peak does not depend on how
they share the load.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.model.placement import Placement


@dataclass(frozen=True, eq=False, slots=True)
class SplitStructure:
    """The bipartite graph of one placement, with the arrays of all layers concatenated.

    A *shared* expert here is one on several ranks; an *edge* joins it to one of these ranks. Layer
    l owns the shared experts `shared_from[l]:shared_from[l + 1]`. Within a layer those on the
    fewest ranks come first: they have the least choice, so greedy filling places them first.
    """

    placement: Placement
    fixed_rank: NDArray[np.int64]
    """(L, E) the only rank of an expert, -1 for a shared expert."""
    shared_from: NDArray[np.int64]
    """(L + 1,) start of the shared experts of each layer."""
    expert: NDArray[np.int64]
    """(D,) logical expert of each shared expert."""
    edge_from: NDArray[np.int64]
    """(D + 1,) start of the edges of each shared expert; edges are in slot order."""
    edge_rank: NDArray[np.int64]
    """(A,) rank of each edge."""
    edge_expert: NDArray[np.int64]
    """(A,) shared expert of each edge, an index into `expert`."""
    rank_from: NDArray[np.int64]
    """(L, R + 1) start of the edges of each rank in `rank_edge`."""
    rank_edge: NDArray[np.int64]
    """(A,) the edges by layer and rank."""
    entry_edge: NDArray[np.int64]
    """(A',) edge of each replica of each shared expert, in log2phy order."""
    entry_at: NDArray[np.int64]
    """(A', 2) its shared expert and its index in log2phy."""
    entry_from: NDArray[np.int64]
    """(L + 1,) start of the entries of each layer."""
    copies: NDArray[np.int64]
    """(A,) replicas of each edge, 1 unless a rank holds an expert twice."""
    even: NDArray[np.float64]
    """(L, E, X) the even split, which applies to experts on one rank and experts without tokens."""
    hosts: NDArray[np.int64]
    """(L,) ranks with at least one expert."""

    @classmethod
    def of(cls, placement: Placement) -> "SplitStructure":
        """Build the structure of a placement.

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
        layers, ranks = placement.num_layers, placement.num_ranks
        log2phy, logcnt = placement.log2phy, placement.logcnt
        held = log2phy >= 0
        rank_of = np.where(held, log2phy // placement.slots_per_rank, -1).astype(np.int64)
        lowest = np.where(held, rank_of, ranks).min(axis=2)
        several = rank_of.max(axis=2) != lowest
        edges = _EdgeLists()
        for layer in range(layers):
            edges.add_layer(rank_of[layer], logcnt[layer], np.flatnonzero(several[layer]))
        rank_from, rank_edge = _edges_by_rank(edges, ranks)
        hosts = (placement.phy2log.reshape(layers, ranks, -1) >= 0).any(axis=2).sum(axis=1)
        return cls(
            placement=placement,
            fixed_rank=np.where(several, -1, lowest),
            shared_from=np.array(edges.shared_from, np.int64),
            expert=np.array(edges.expert, np.int64),
            edge_from=np.array(edges.edge_from, np.int64),
            edge_rank=np.array(edges.edge_rank, np.int64),
            edge_expert=np.array(edges.edge_expert, np.int64),
            rank_from=rank_from,
            rank_edge=rank_edge,
            entry_edge=np.array(edges.entry_edge, np.int64),
            entry_at=np.array(edges.entry_at, np.int64).reshape(-1, 2),
            entry_from=np.array(edges.entry_from, np.int64),
            copies=np.array(edges.copies, np.int64),
            even=np.where(held, 1.0 / logcnt[:, :, None], 0.0),
            hosts=hosts.astype(np.int64),
        )


@dataclass(slots=True)
class _EdgeLists:
    """The arrays of a `SplitStructure` as lists that grow layer by layer."""

    shared_from: list[int] = field(default_factory=lambda: [0])
    expert: list[int] = field(default_factory=list)
    edge_from: list[int] = field(default_factory=lambda: [0])
    edge_rank: list[int] = field(default_factory=list)
    edge_expert: list[int] = field(default_factory=list)
    entry_edge: list[int] = field(default_factory=list)
    entry_at: list[tuple[int, int]] = field(default_factory=list)
    entry_from: list[int] = field(default_factory=lambda: [0])
    copies: list[int] = field(default_factory=list)

    def add_layer(
        self, rank_of: NDArray[np.int64], logcnt: NDArray[np.int64], shared: NDArray[np.int64]
    ) -> None:
        """Add the edges of one layer.

        Args:
            rank_of: (E, X) rank of each replica.
            logcnt: (E,) number of replicas.
            shared: logical experts on several ranks.
        """
        ranks_of = [rank_of[expert, : logcnt[expert]].tolist() for expert in shared]
        fewest_first = np.argsort([len(set(ranks)) for ranks in ranks_of], kind="stable")
        for index in fewest_first:
            edges: dict[int, int] = {}
            for replica, rank in enumerate(ranks_of[index]):
                if rank not in edges:
                    edges[rank] = len(self.edge_rank)
                    self.edge_rank.append(rank)
                    self.edge_expert.append(len(self.expert))
                    self.copies.append(0)
                self.copies[edges[rank]] += 1
                self.entry_edge.append(edges[rank])
                self.entry_at.append((len(self.expert), replica))
            self.expert.append(int(shared[index]))
            self.edge_from.append(len(self.edge_rank))
        self.shared_from.append(len(self.expert))
        self.entry_from.append(len(self.entry_edge))


def _edges_by_rank(edges: _EdgeLists, ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group the edges of each layer by rank: (L, R + 1) starts and (A,) edges."""
    starts, order = [], []
    for first, last in pairwise(edges.shared_from):
        low, high = edges.edge_from[first], edges.edge_from[last]
        row = np.array(edges.edge_rank[low:high], np.int64)
        starts.append(low + np.searchsorted(np.sort(row), np.arange(ranks + 1)))
        order.append(low + np.argsort(row, kind="stable"))
    return np.array(starts, np.int64), np.concatenate(order).astype(np.int64)
