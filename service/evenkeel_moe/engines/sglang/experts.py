"""The function by which SGLang computes the experts of a layer; SGLang itself is not imported."""

from collections.abc import Sequence
from typing import Any

from evenkeel_moe.engines.guest.expert_times import ExpertCall
from evenkeel_moe.engines.guest.guards import Unsupported

_CORE = "run_moe_core"
"""The method of `FusedMoE` that runs the experts, between the dispatcher's dispatch and combine."""
_COMMUNICATES = ("megamoe", "flashinfer_megamoe", "ascend_fuseep")
"""Values of `--moe-a2a-backend` whose kernels dispatch and combine by themselves."""


def expert_calls(model: Any, layer_ids: Sequence[int], a2a_backend: str) -> list[ExpertCall]:
    """Return the call of each MoE layer.

    Args:
        model: SGLang's model.
        layer_ids: hidden layers whose experts SGLang moves.
        a2a_backend: as configured.

    Raises:
        Unsupported: the call also communicates, or a layer has none.
    """
    if a2a_backend in _COMMUNICATES:
        raise Unsupported(
            f"--moe-a2a-backend {a2a_backend} computes and communicates in one kernel"
        )
    found: dict[int, list[Any]] = {layer: [] for layer in layer_ids}
    for module in model.modules():
        layer = getattr(module, "layer_id", None)
        if layer in found and callable(getattr(module, _CORE, None)):
            found[layer].append(module)
    wrong = [layer for layer, modules in found.items() if len(modules) != 1]
    if wrong:
        have = len(found[wrong[0]])
        raise Unsupported(f"layer {wrong[0]} has {have} modules with {_CORE}, not one")
    return [ExpertCall(modules[0], _CORE) for modules in found.values()]
