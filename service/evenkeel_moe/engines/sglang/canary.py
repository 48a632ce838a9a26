"""Asks one expert of an SGLang layer: by the runner that serves, without routing and dispatch."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenkeel_moe.agent.canary_runs import canary_token
from evenkeel_moe.engines.guest.expert_times import ExpertCall

_STANDARD = "sglang.srt.layers.moe.token_dispatcher.standard"
_TOP_K = "sglang.srt.layers.moe.topk"


class SglangProbe:
    """`Probe` over the MoE layers of a model.

    A layer runs its experts on what its dispatcher returns. Here this is one token for one slot, in
    the form of the dispatcher without all-to-all.

    Args:
        find_calls: returns the `run_moe_core` of each MoE layer; it raises Unsupported if that also
            communicates, which one rank must not do alone.
        rank: in the EP group.
        slots_per_rank: slots of one rank and layer.
        device: of the weights.
    """

    def __init__(
        self,
        find_calls: Callable[[], Sequence[ExpertCall]],
        rank: int,
        slots_per_rank: int,
        device: torch.device,
    ) -> None:
        self._find_calls = find_calls
        self._layers: list[Any] = []
        self._first = rank * slots_per_rank
        self._device = device
        self._weights = torch.ones((1, 1), dtype=torch.float32, device=device)

    @torch.inference_mode()
    def __call__(self, layer: int, local_slot: int) -> Tensor:
        """Return the (hidden,) output of the expert in a slot.

        Raises:
            Unsupported: the layer cannot be asked without the other ranks.
        """
        if not self._layers:
            self._layers = [call.owner for call in self._find_calls()]
        module = self._layers[layer]
        standard, top_k = (importlib.import_module(name) for name in (_STANDARD, _TOP_K))
        # Some runners take the numbers of slots over all ranks.
        is_global = getattr(module.dispatcher, "skip_local_expert_mapping", False)
        slot = self._first + local_slot if is_global else local_slot
        ids = torch.tensor([[slot]], dtype=torch.int32, device=self._device)
        # New for each answer: a runner may write its result over its input.
        token = canary_token(module.hidden_size, module.params_dtype, self._device)[None]
        chosen = top_k.StandardTopKOutput(self._weights, ids, None)
        combined = module.run_moe_core(standard.StandardDispatchOutput(token, None, chosen))
        output: Tensor = combined.hidden_states
        return output[0]
