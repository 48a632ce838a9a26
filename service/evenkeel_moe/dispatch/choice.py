"""Rules that choose the replica of an expert that serves a token.

Every rule maps (n, k) logical experts to (n, k) slots and keeps the -1 of padding. No rule loops
over tokens. Except for `LplbChoice`, `FewestChoice` and `LibraChoice`, which decide on a CPU
thread, no rule reads a value back to the host or allocates by data, so it can be captured in a CUDA
graph. A rule that depends on the batch needs the demand of all ranks first.

======================  ==========================================================================
`EvenChoice`            equal shares of all replicas, by a hash of the token's place in the batch
`NearestChoice`         own rank, else own node, else all; by the hash if there are several
`lplb.LplbChoice`       replicas by whole-token quotas from the exact split of the batch
`lplb.DeviceLplbChoice` the same by the interior point
`fewest.FewestChoice`   one replica per expert, so that few experts are active on the fullest rank
`libra.LibraChoice`     local tokens stay, the others are split over resident and transient replicas
======================  ==========================================================================
"""

from typing import Protocol

import torch
from torch import Tensor

from evenkeel_moe.dispatch.counts import check_counts, occurrence
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.errors import InvalidInput, ShapeMismatch


class ReplicaChoice(Protocol):
    """A rule that picks the replica of every routed choice."""

    needs_demand: bool
    """True if the ranks must first exchange their demand: one all-gather of (E,) int64, the number
    of choices of each source rank for each expert."""

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """Choose the slots that serve the choices of this rank.

        Args:
            layer: index of the MoE layer.
            experts: (n, k) int64 logical experts that this rank's tokens chose, -1 for padding.
            demand: (R, E) int64 [tokens] choices of every source rank, if the rule needs it.

        Returns:
            (n, k) int64 slots, -1 for padding.

        Raises:
            InvalidInput: demand is missing, of a type that cannot hold counts, or on the CPU not
                whole tokens.
            ShapeMismatch: demand of another deployment.
        """
        ...


def place_hash(experts: Tensor, salt: int) -> Tensor:
    """Return (n, k) int64 hashes of the places of the choices in the batch, in 0..2**31-1.

    Equal salts give equal values.
    """
    place = torch.arange(experts.numel(), device=experts.device).reshape(experts.shape)
    # Two rounds of multiply and fold. Products stay below 2**62, so integers do not overflow.
    mixed = (place + (salt * 2654435761 + 97) % 2**31) & 0x7FFFFFFF
    for factor in (0x45D9F3B, 0x3C6EF35F):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0x7FFFFFFF
    return mixed ^ (mixed >> 13)


def check_experts(experts: Tensor) -> None:
    """Check that a tensor can hold expert ids.

    Raises:
        InvalidInput: it is not of integers.
        ShapeMismatch: it is not (n, k).
    """
    if experts.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(
            f"experts must be int64 or int32, got {str(experts.dtype).removeprefix('torch.')}"
        )
    if experts.ndim != 2:
        raise ShapeMismatch(f"experts must be (n, k), got {tuple(experts.shape)}")


def check_demand(tables: DispatchTables, experts: Tensor, demand: Tensor | None) -> Tensor:
    """Return the demand, after a check of the arguments of a rule that needs it.

    Raises:
        InvalidInput, ShapeMismatch: as `ReplicaChoice.choose`.
    """
    check_experts(experts)
    if demand is None:
        raise InvalidInput("the rule needs the demand of all ranks: all-gather the counts first")
    _, _, ranks, num_experts = tables.placement.sizes
    check_counts(demand, (ranks, num_experts), "demand", whole=True)
    return demand


class EvenChoice:
    """Gives every replica the same share; on average this is the planner's EVEN split."""

    needs_demand = False

    def __init__(self, tables: DispatchTables) -> None:
        self._tables = tables
        self._slots, self._count = tables.log2phy, tables.logcnt

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`; demand is not used."""
        check_experts(experts)
        known = experts.clamp(min=0).to(torch.int64)
        # The salt is by rank and layer, so that rounding does not favour one replica.
        place = place_hash(known, self._tables.ep_rank * 8191 + layer)
        index = place % self._count[layer][known]
        slots = self._slots[layer][known].gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return torch.where(experts >= 0, slots, -1)


class NearestChoice(EvenChoice):
    """Chooses the own replica, else one on the node, else any: the planner's NEAREST split.

    It saves traffic between ranks but balances badly, because the tokens of a hot expert stay near
    their source.
    """

    def __init__(self, tables: DispatchTables) -> None:
        super().__init__(tables)
        self._slots, self._count = tables.nearest, tables.nearest_count


def assign_quotas(
    experts: Tensor, slots: Tensor, holder: Tensor, quotas: Tensor, demand: Tensor, ep_rank: int
) -> Tensor:
    """Assign a replica to each choice so that over all ranks every replica gets exactly its quota.

    Ranks do not communicate: all hold the same quotas and demand, and each determines which of an
    expert's tokens, counted over all ranks in rank order, are its own. A rank that holds a replica
    fills its quota with its own tokens first; this saves transfers and changes no rank load.

    Args:
        experts: (n, k) int64 choices of this rank, -1 for padding; must count to `demand[ep_rank]`.
        slots: (E, X) int64 replicas; beyond the last one of an expert, any slot with a quota of 0.
        holder: (E, X) int64 rank of each replica.
        quotas: (E, X) int64 [tokens] - row sums equal the column sums of demand.
        demand: (R, E) int64 [tokens].
        ep_rank: the rank of these choices.

    Returns:
        (n, k) int64 slots, -1 for padding.
    """
    num_experts, width = slots.shape
    # Of two replicas of an expert on one rank only the first serves the rank's own tokens.
    repeated = (holder.unsqueeze(2) == holder.unsqueeze(1)).tril(-1).any(dim=2)
    kept = torch.where(repeated, 0, torch.minimum(demand.t().gather(1, holder), quotas))
    kept_by_rank = torch.zeros_like(demand.t()).scatter_add_(1, holder, kept).t()
    travelling = demand - kept_by_rank
    bounds = (quotas - kept).cumsum(dim=1)
    start = travelling[:ep_rank].sum(dim=0)
    home_slot = torch.where((holder == ep_rank) & (kept > 0), slots, -1).amax(dim=1)

    known = experts.clamp(min=0).to(torch.int64)
    turn = occurrence(experts.to(torch.int64), num_experts)
    at_home = kept_by_rank[ep_rank][known]
    place = start[known] + turn - at_home
    index = (place.unsqueeze(-1) >= bounds[known]).sum(dim=-1).clamp(max=width - 1)
    away = slots[known].gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.where(experts >= 0, torch.where(turn < at_home, home_slot[known], away), -1)
