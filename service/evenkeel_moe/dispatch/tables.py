"""The maps of a placement as tensors that a rank looks up; built once per epoch."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology


@dataclass(frozen=True, eq=False, slots=True)
class DispatchTables:
    """The maps of one placement as one rank sees them.

    Example: expert 5 in slots 3 and 9 of 3 slots per rank is on ranks 1 and 3; rank 1 finds
    `nearest[layer, 5] == [3, ...]` with `nearest_count == 1`, rank 0 of another node both.
    """

    log2phy: Tensor
    """(L, E, X) int64 slots of each expert in slot order; beyond `logcnt` the first one is
    repeated."""
    logcnt: Tensor
    """(L, E) int64 replicas, at least 1."""
    nearest: Tensor
    """(L, E, X) int64 slots this rank prefers: its own, else those on its node, else all; filled up
    like log2phy."""
    nearest_count: Tensor
    """(L, E) int64 number of these slots."""
    ep_rank: int
    placement: Placement

    @classmethod
    def of(
        cls,
        placement: Placement,
        topology: Topology,
        ep_rank: int,
        device: torch.device | str = "cpu",
    ) -> "DispatchTables":
        """Build the maps of a placement for one rank.

        Raises:
            ShapeMismatch: topology and placement differ in ranks.
            InvalidInput: the rank does not exist.
            InfeasiblePlan: an expert has no replica.
        """
        if topology.num_ranks != placement.num_ranks:
            raise ShapeMismatch(
                f"topology has {topology.num_ranks} ranks, placement {placement.num_ranks}"
            )
        if not 0 <= ep_rank < placement.num_ranks:
            raise InvalidInput(f"rank {ep_rank} is outside 0..{placement.num_ranks - 1}")
        placement.check_placed()
        slots = placement.log2phy.astype(np.int64)
        rank = slots // placement.slots_per_rank
        held = slots >= 0
        node = np.array(topology.node_of_rank, np.int64)
        own = held & (rank == ep_rank)
        near = held & (node[np.where(held, rank, 0)] == node[ep_rank])
        preferred = np.where(
            own.any(axis=2, keepdims=True),
            own,
            np.where(near.any(axis=2, keepdims=True), near, held),
        )

        def on_device(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            log2phy=on_device(_filled(slots, held)),
            logcnt=on_device(held.sum(axis=2, dtype=np.int64)),
            nearest=on_device(_filled(slots, preferred)),
            nearest_count=on_device(preferred.sum(axis=2, dtype=np.int64)),
            ep_rank=ep_rank,
            placement=placement,
        )


def _filled(slots: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the wanted slots first, in order, followed by repetitions of the first."""
    order = np.argsort(~wanted, axis=2, kind="stable")
    front = np.take_along_axis(slots, order, axis=2)
    keep = np.take_along_axis(wanted, order, axis=2)
    return np.where(keep, front, front[:, :, :1])
