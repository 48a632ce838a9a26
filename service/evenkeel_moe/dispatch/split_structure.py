"""What the per-batch split depends on beside the counts: built once per placement, never per batch.

Only experts with replicas on two ranks or more leave a choice. Every other expert adds a fixed load to
its rank. Copies of an expert on one rank count as one: the peak does not depend on how they share.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.model.placement import Placement

__all__ = ["SplitStructure"]


@dataclass(frozen=True, eq=False, slots=True)
class SplitStructure:
    """The bipartite graph of one placement, all layers one after the other.

    A *shared* expert here is one on several ranks; an *edge* joins it to one of them. Layer l owns the
    shared experts `shared_from[l]:shared_from[l + 1]`, within a layer those on the fewest ranks first:
    they have the least choice, so a greedy filling serves them first.
    """

    placement: Placement
    fixed_rank: NDArray[np.int64]
    """(L, E) the only rank of an expert, -1 for a shared one."""
    shared_from: NDArray[np.int64]
    """(L + 1,) where each layer's shared experts start."""
    expert: NDArray[np.int64]
    """(D,) logical expert of each shared expert."""
    edge_from: NDArray[np.int64]
    """(D + 1,) where each shared expert's edges start; edges are in slot order."""
    edge_rank: NDArray[np.int64]
    """(A,) rank of each edge."""
    edge_expert: NDArray[np.int64]
    """(A,) shared expert (index into `expert`) of each edge."""
    rank_from: NDArray[np.int64]
    """(L, R + 1) where each rank's edges start in `rank_edge`."""
    rank_edge: NDArray[np.int64]
    """(A,) the edges again, by layer and rank."""
    entry_edge: NDArray[np.int64]
    """(A', ) edge of each replica of each shared expert, in log2phy order."""
    entry_at: NDArray[np.int64]
    """(A', 2) its shared expert and its index in log2phy."""
    entry_from: NDArray[np.int64]
    """(L + 1,) where each layer's entries start."""
    copies: NDArray[np.int64]
    """(A,) replicas behind each edge, 1 unless a rank holds an expert twice."""
    even: NDArray[np.float64]
    """(L, E, X) the even split: the answer for experts without choice and without tokens."""
    hosts: NDArray[np.int64]
    """(L,) ranks with at least one expert."""

    @classmethod
    def of(cls, placement: Placement) -> "SplitStructure":
        """Prepare a placement.

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
        shared_from, edge_from, entry_from = [0], [0], [0]
        expert: list[int] = []
        edge_rank: list[int] = []
        edge_expert: list[int] = []
        copies: list[int] = []
        entry_edge: list[int] = []
        entry_at: list[tuple[int, int]] = []
        for layer in range(layers):
            chosen = np.flatnonzero(several[layer])
            spread = [len(set(rank_of[layer, e, : logcnt[layer, e]].tolist())) for e in chosen]
            for index in np.argsort(spread, kind="stable"):
                logical = int(chosen[index])
                edges: dict[int, int] = {}
                for replica, rank in enumerate(
                    rank_of[layer, logical, : logcnt[layer, logical]].tolist()
                ):
                    if rank not in edges:
                        edges[rank] = len(edge_rank)
                        edge_rank.append(rank)
                        edge_expert.append(len(expert))
                        copies.append(0)
                    copies[edges[rank]] += 1
                    entry_edge.append(edges[rank])
                    entry_at.append((len(expert), replica))
                expert.append(logical)
                edge_from.append(len(edge_rank))
            shared_from.append(len(expert))
            entry_from.append(len(entry_edge))
        rank_from, rank_edge = _edges_by_rank(shared_from, edge_from, edge_rank, ranks)
        hosts = (placement.phy2log.reshape(layers, ranks, -1) >= 0).any(axis=2).sum(axis=1)
        return cls(
            placement=placement,
            fixed_rank=np.where(several, -1, lowest),
            shared_from=np.array(shared_from, np.int64),
            expert=np.array(expert, np.int64),
            edge_from=np.array(edge_from, np.int64),
            edge_rank=np.array(edge_rank, np.int64),
            edge_expert=np.array(edge_expert, np.int64),
            rank_from=rank_from,
            rank_edge=rank_edge,
            entry_edge=np.array(entry_edge, np.int64),
            entry_at=np.array(entry_at, np.int64).reshape(-1, 2),
            entry_from=np.array(entry_from, np.int64),
            copies=np.array(copies, np.int64),
            even=np.where(held, 1.0 / logcnt[:, :, None], 0.0),
            hosts=hosts.astype(np.int64),
        )


def _edges_by_rank(
    shared_from: list[int], edge_from: list[int], edge_rank: list[int], ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The edges of each layer grouped by rank: (L, R + 1) starts and (A,) edges."""
    starts, order = [], []
    for first, last in zip(shared_from[:-1], shared_from[1:], strict=True):
        low, high = edge_from[first], edge_from[last]
        row = np.array(edge_rank[low:high], np.int64)
        starts.append(low + np.searchsorted(np.sort(row), np.arange(ranks + 1)))
        order.append(low + np.argsort(row, kind="stable"))
    return np.array(starts, np.int64), np.concatenate(order).astype(np.int64)
