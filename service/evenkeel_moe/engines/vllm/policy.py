"""The planner that replaces vLLM's own: it does not plan, it returns the agreed map."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenkeel_moe.engines.vllm.guest import VllmGuest


def make_policy(original: Any, guests: Mapping[Any, VllmGuest]) -> Any:
    """Return a class for `EPLB_POLICIES["default"]`.

    Args:
        original: vLLM's planner. It still answers if no guest could be started, and if vLLM wants
            another number of slots than it has and no guest can tell where the experts go.
        guests: one per `EplbState` of the process.
    """

    class ControllerPolicy(original):  # type: ignore[misc]
        """Returns the controller's plan, the same on every rank, or the current map."""

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
            running = list(guests.values())
            no_agent = bool(running) and all(guest.agent is None for guest in running)
            if old is not None and old.shape[1] != num_replicas:
                current = np.asarray(old.cpu().numpy(), np.int64)
                for guest in running:
                    found = guest.shrunk(current, num_ranks)
                    if found is not None:
                        return torch.from_numpy(np.ascontiguousarray(found))
            if old is None or old.shape[1] != num_replicas or no_agent:
                answer: Tensor = original.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old
                )
                return answer
            current = np.asarray(old.cpu().numpy(), np.int64)
            for guest in running:
                if guest.concerns(*current.shape):
                    return torch.from_numpy(np.ascontiguousarray(guest.plan(current)))
            return old.cpu().clone()

    return ControllerPolicy
