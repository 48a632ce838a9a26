"""The planner that replaces vLLM's own: it does not plan, it returns the agreed map."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.vllm.guest import VllmGuest


def make_policy(original: Any, get_guest: Callable[[], VllmGuest | None]) -> Any:
    """Return a class for `EPLB_POLICIES["default"]`.

    Args:
        original: vLLM's planner. It still answers if the guest could not be started, or cannot
            tell where the experts go when vLLM wants another number of slots than it has.
        get_guest: returns the guest of the process; None before vLLM has made its `EplbState`.
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
            guest, old = get_guest(), old_global_expert_indices
            answer: NDArray[np.int64] | None = None
            if old is not None:
                current = np.array(old.cpu().numpy(), np.int64)
                if old.shape[1] != num_replicas:
                    answer = None if guest is None else guest.shrunk(current, num_ranks)
                elif guest is None:
                    answer = current
                elif guest.agent is not None:
                    concerned = guest.concerns(*current.shape)
                    answer = guest.plan(current) if concerned else current
            if answer is not None:
                return torch.from_numpy(np.ascontiguousarray(answer))
            planned: Tensor = original.rebalance_experts(
                weight, num_replicas, num_groups, num_nodes, num_ranks, old
            )
            return planned

    return ControllerPolicy
