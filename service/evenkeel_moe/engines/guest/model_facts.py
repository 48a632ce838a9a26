"""Facts about an engine's model that a cost model is derived from; None or empty if unknown."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evenkeel_moe.errors import InvalidInput

_FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}
"""Types that hold packed numbers, such as uint8 and int32, can mean several formats."""


def weight_format(tensors: Iterable[Tensor]) -> str:
    """Return the number type of an expert's two matrices; empty if it is ambiguous.

    An int8 may hold two numbers. Then the rows of the one matrix are shorter than the other is
    high.
    """
    matrices = sorted(tensors, key=lambda tensor: tensor.nbytes)[-2:]
    if not matrices:
        return ""
    narrow, wide = matrices[0], matrices[-1]
    if wide.dtype is torch.int8 and wide.shape[-1] != narrow.shape[0]:
        return ""
    return _FORMATS.get(wide.dtype, "")


def shared_experts(config: Any) -> float | None:
    """Return the work of the shared experts for one token, in routed experts.

    Args:
        config: the model's Hugging Face configuration.

    Returns:
        None if the configuration does not tell it.
    """
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count >= 0:
            return float(count)
    wide = getattr(config, "shared_expert_intermediate_size", None)
    routed = getattr(config, "moe_intermediate_size", None)
    if isinstance(wide, int) and isinstance(routed, int) and wide >= 0 and routed > 0:
        return wide / routed
    return None


def top_k(owners: Iterable[Any], names: Iterable[str]) -> int:
    """Return how many experts a token uses: the first of the names that an owner has.

    Raises:
        InvalidInput: none of them has a number.
    """
    owners, names = list(owners), list(names)
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise InvalidInput(f"{type(owners[0]).__name__} does not tell how many experts a token uses")


def widest_expert(layers: Iterable[Iterable[Tensor]]) -> int:
    """Return the bytes of the largest expert; each layer has tensors with one row per slot."""
    return max(sum(tensor[0].nbytes for tensor in layer) for layer in layers)
