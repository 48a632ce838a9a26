"""Asks one expert of a vLLM layer: by the kernel that serves, without routing and all-to-all."""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evenkeel_moe.agent.canary_runs import canary_token
from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.vllm.experts import expert_call

_NO_EXCHANGE = "vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep"


class VllmProbe:
    """`Probe` over the MoE layers of a model.

    A layer's kernel has a part that dispatches tokens to ranks and combines their outputs, and one
    that computes the experts. While an expert is asked, the first is replaced by the one that vLLM
    uses on a single rank, so no other rank takes part.

    Args:
        layers: the model's `moe_layers`.
        rank: in the EP group.
        slots_per_rank: slots of one rank and layer.
        device: of the weights.
    """

    def __init__(
        self, layers: Iterable[Any], rank: int, slots_per_rank: int, device: torch.device
    ) -> None:
        self._layers = list(layers)
        self._first = rank * slots_per_rank
        self._device = device
        self._inputs: tuple[Tensor, Tensor] | None = None
        """A token and the weight of its expert; None before the next question."""

    def forget(self) -> None:
        """Make the inputs anew at the next question: vLLM has discarded their memory."""
        self._inputs = None

    @torch.inference_mode()
    def __call__(self, layer: int, local_slot: int) -> Tensor:
        """Return the (hidden,) output of the expert in a slot.

        Raises:
            Unsupported: the layer's kernel cannot be asked without the other ranks.
        """
        expert_call(self._layers[layer])  # Refuses a kernel that communicates, also for one token.
        experts = self._layers[layer].routed_experts
        method = experts.quant_method
        kernel = method.moe_kernel
        if kernel is None or method.is_monolithic:
            raise Unsupported(
                f"{type(method).__name__} has no modular kernel, so no expert can be asked alone"
            )
        alone = importlib.import_module(_NO_EXCHANGE).MoEPrepareAndFinalizeNoDPEPModular()
        if kernel.fused_experts.activation_format() != alone.activation_format:
            raise Unsupported(
                f"{type(kernel.fused_experts).__name__} takes tokens only in batches that an"
                " all-to-all has made, so no expert can be asked alone"
            )
        if self._inputs is None:
            config = experts.moe_config
            token = canary_token(config.hidden_dim, config.in_dtype, self._device)[None]
            self._inputs = token, torch.ones((1, 1), dtype=torch.float32, device=self._device)
        slot = torch.tensor([[self._first + local_slot]], dtype=torch.int32, device=self._device)
        kernel.impl.prepare_finalize, exchange = alone, kernel.impl.prepare_finalize
        try:
            output: Tensor = experts.forward_modular(*self._inputs, slot)
        finally:
            kernel.impl.prepare_finalize = exchange
        return output[0]
