"""The modules by which SGLang computes the experts of a layer; SGLang itself is not imported."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
    found = _moe_modules(model, layer_ids)
    wrong = [layer for layer, modules in found.items() if len(modules) != 1]
    if wrong:
        have = len(found[wrong[0]])
        raise Unsupported(f"layer {wrong[0]} has {have} modules with {_CORE}, not one")
    return [ExpertCall(modules[0], _CORE) for modules in found.values()]


def left_behind(model: Any, weights: Mapping[int, Sequence[Tensor]]) -> str:
    """Return why experts would lose something by a move; empty if they would not.

    Some kernels read copies, which differ between experts, of tensors that SGLang moves.

    Args:
        model: SGLang's model.
        weights: the tensors that SGLang moves, by hidden layer, with a row per slot of this rank.
    """
    for layer, modules in _moe_modules(model, list(weights)).items():
        moved = {tensor.untyped_storage().data_ptr() for tensor in weights[layer]}
        slots = len(weights[layer][0])
        for name, tensor in (found for module in modules for found in _tensors(module)):
            has_rows = tensor.ndim > 0 and len(tensor) == slots
            if has_rows and tensor.untyped_storage().data_ptr() not in moved and _differs(tensor):
                return (
                    f"SGLang does not move {name} of layer {layer} with its {slots} experts, and"
                    " each expert has its own: choose another --moe-runner-backend or"
                    " --moe-a2a-backend"
                )
    return ""


def _moe_modules(model: Any, layer_ids: Sequence[int]) -> dict[int, list[Any]]:
    """Return the modules that compute experts, by hidden layer."""
    found: dict[int, list[Any]] = {layer: [] for layer in layer_ids}
    for module in model.modules():
        layer = getattr(module, "layer_id", None)
        if layer in found and callable(getattr(module, _CORE, None)):
            found[layer].append(module)
    return found


def _tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are attributes of a module, alone or in a tuple, with their names."""
    for name, value in vars(module).items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Tensor):
                yield name, each


def _differs(tensor: Tensor) -> bool:
    """Return True if the rows of a tensor are not all equal; a row of bytes for one-byte types."""
    rows = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return not all(torch.equal(row, rows[0]) for row in rows)
