"""The planner vLLM is given in place of its own: it plans nothing, it hands on what was agreed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from evenkeel_moe.engines.vllm.guest import VllmGuest

__all__ = ["make_policy"]


def make_policy(original: Any, guests: "Mapping[Any, VllmGuest]") -> Any:
    """A class to stand in `EPLB_POLICIES["default"]`.

    Args:
        original: vLLM's planner; asked where vLLM wants another number of slots than it has, as when ranks come
            or go, and where no guest could be started.
        guests: one per `EplbState` of the process.
    """

    class ControllerPolicy(original):  # type: ignore[misc]
        """The controller's plan, the same on every rank, or the map as it is."""

        @classmethod
        def rebalance_experts(
            cls,
            weight: Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Tensor | None = None,
        ) -> Tensor:
            old = old_global_expert_indices
            watched = list(guests.values())
            alone = bool(watched) and all(guest.agent is None for guest in watched)
            if old is None or old.shape[1] != num_replicas or alone:
                answer: Tensor = original.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old
                )
                return answer
            current = np.asarray(old.cpu().numpy(), np.int64)
            for guest in watched:
                if guest.concerns(*current.shape):
                    return torch.from_numpy(np.ascontiguousarray(guest.plan(current)))
            return old.cpu().clone()

    return ControllerPolicy
