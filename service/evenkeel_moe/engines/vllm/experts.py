"""The function by which vLLM computes the experts of a layer; vLLM itself is not imported."""

from collections.abc import Iterable
from typing import Any

from evenkeel_moe.engines.guest.expert_times import ExpertCall
from evenkeel_moe.engines.guest.guards import Unsupported

_COMMUNICATES = ("PassThroughPrepareAndFinalize", "MoonEPPrepareAndFinalize")
"""Ways to prepare a layer whose experts dispatch and combine by themselves (FlashInfer MoE-EP), or
compute experts of other ranks too (MoonEP)."""


def refuse_adapters(layers: Iterable[Any]) -> None:
    """Refuse experts with LoRA adapters, which vLLM gives to slots and does not move.

    Args:
        layers: the model's `moe_layers`, once vLLM has made room for adapters.

    Raises:
        Unsupported: a layer's experts take adapters.
    """
    experts = (getattr(layer, "routed_experts", None) for layer in layers)
    if any(getattr(each, "lora_base_layer_prefix", "") for each in experts):
        raise Unsupported(
            "LoRA adapters of experts do not follow moves: leave the experts out with"
            " --lora-target-modules"
        )


def expert_call(layer: Any) -> ExpertCall:
    """Return the call of a layer: after the dispatch and before the combine.

    Modular kernels call the experts in `_fused_experts`, which also covers a step in which no token
    reached this rank. Monolithic kernels route inside the experts, so the choice of the experts
    counts too. Methods without a kernel object dispatch and combine outside.

    Args:
        layer: an element of the model's `moe_layers`.

    Raises:
        Unsupported: the call also communicates, or the layer is of another kind.
    """
    method = getattr(getattr(layer, "routed_experts", None), "quant_method", None)
    if method is None:
        raise Unsupported(f"{type(layer).__name__} computes its experts in a way not known here")
    kernel = method.moe_kernel
    if kernel is None:
        return ExpertCall(method, "apply_monolithic" if method.is_monolithic else "apply")
    prepare = type(kernel.prepare_finalize).__name__
    if prepare in _COMMUNICATES:
        experts = type(kernel.fused_experts).__name__
        raise Unsupported(f"{experts} computes and communicates in one kernel ({prepare})")
    if kernel.is_monolithic:
        return ExpertCall(kernel.fused_experts, "apply")
    return ExpertCall(kernel.impl, "_fused_experts")
