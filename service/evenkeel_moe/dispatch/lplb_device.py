"""LPLB as a replica choice that never leaves the device: the interior point, then whole tokens."""

import torch
from torch import Tensor

from evenkeel_moe.dispatch.choice import DemandNeeded, assign_quotas, check_experts
from evenkeel_moe.dispatch.counts import check_counts
from evenkeel_moe.dispatch.interior import BatchedSplit
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.placement import Placement


def whole_quotas(shares: Tensor, counts: Tensor) -> Tensor:
    """Round the tokens of each replica so that those of an expert sum to its count.

    Each quota is within one token of its share, because the sums over the first replicas are
    rounded, not the quotas. Nothing is read back to the host.

    Args:
        shares: (E, X) float64 - share of each replica; rows sum to 1 up to rounding.
        counts: (E,) int64 [tokens], below 2**52.

    Returns:
        (E, X) int64 [tokens], not negative; rows sum to `counts`.
    """
    reached = (shares.cumsum(dim=1) * counts.unsqueeze(1)).round().to(torch.int64)
    reached = torch.minimum(reached, counts.unsqueeze(1))
    reached[:, -1] = counts
    return reached.diff(dim=1, prepend=torch.zeros_like(reached[:, :1]))


class DeviceLplbChoice:
    """LPLB by `BatchedSplit`: it can be captured in a CUDA graph, unlike `LplbChoice`.

    The peak is that of the program plus at most one token for each replica of a shared expert on
    the rank. All ranks compute the same quotas from the same demand on devices of one kind; on
    devices that round differently a quota can be missed by a token, and no token is lost.
    """

    needs = DemandNeeded.DEMAND

    def __init__(self, tables: DispatchTables, *, iterations: int = 16) -> None:
        """Prepare the tables' placement for one layer at a time, on the tables' device.

        Args:
            tables: of one epoch.
            iterations: see `BatchedSplit`.
        """
        self._tables = tables
        placement = tables.placement
        self._solvers = [
            BatchedSplit(
                Placement(
                    placement.phy2log[layer : layer + 1], placement.num_ranks, tables.num_experts
                ),
                tables.device,
                iterations=iterations,
            )
            for layer in range(placement.num_layers)
        ]

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`."""
        check_experts(experts)
        if demand is None:
            raise InvalidInput("LPLB needs the demand of all ranks: all-gather the counts first")
        tables = self._tables
        check_counts(demand, (tables.num_ranks, tables.num_experts), "demand")
        counts = demand.sum(dim=0).to(torch.int64)
        split = self._solvers[layer].solve(counts.unsqueeze(0))
        found = whole_quotas(split.probabilities[0], counts)
        quotas = torch.nn.functional.pad(found, (0, tables.width - found.shape[1]))
        slots = tables.log2phy[layer]
        holder = torch.div(slots, tables.slots_per_rank, rounding_mode="floor")
        return assign_quotas(experts, slots, holder, quotas, demand.to(torch.int64), tables.ep_rank)
