"""The cost model derived from the shape of a model and the data sheet of a device.

The weights of an expert are read at the bandwidth of the memory, and a token takes two operations
a weight. What takes longer decides: a roofline for each replica.
"""

from dataclasses import replace

import numpy as np

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.devices import BYTES_PER_WEIGHT, find_device
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape

FLOPS_SHARE = 0.55
BANDWIDTH_SHARE = 0.72
"""Shares of the peaks that kernels reach, applied to every device.

Source: deepseek-ai/DeepGEMM README of 2025-03, FP8 at DeepSeek-V3's expert shapes on an H800:
masked groups of 1024 tokens compute at 925 and 1233 TFLOPS, 0.55 of the peak as the mean of the
two; 64 tokens read at 2320 and 2470 GB/s, 0.72 of the peak."""


def derived_cost(shape: ModelShape, device_name: str, weight_format: str) -> CostModel:
    """Return the cost model of a shape on one kind of device.

    Args:
        shape: bytes of an expert, ranks, and work of shared experts, 0 where it is not known.
        device_name: see `devices.find_device`.
        weight_format: number type of the weights, a key of `BYTES_PER_WEIGHT`. Weights of less
            than two bytes in a type that the device does not compute are taken to be expanded to
            bf16, as the engines' kernels do.

    Raises:
        InvalidInput: the device, its arithmetic in this type or the bytes of an expert are not
            known.
    """
    device = find_device(device_name)
    per_weight = BYTES_PER_WEIGHT.get(weight_format)
    if per_weight is None:
        raise InvalidInput(
            f"number type {weight_format!r} is not one of {', '.join(BYTES_PER_WEIGHT)}"
        )
    if shape.bytes_per_expert < 1:
        raise InvalidInput("the bytes of an expert are not known")
    expands = per_weight < 2 and weight_format not in device.flops
    computed = "bf16" if expands else weight_format
    if computed not in device.flops:
        raise InvalidInput(f"the arithmetic of {device.name} in {computed} is not known")
    weights = shape.bytes_per_expert / per_weight
    read_s = shape.bytes_per_expert / (device.bytes_per_s * BANDWIDTH_SHARE)
    s_per_token = 2.0 * weights / (device.flops[computed] * FLOPS_SHARE)
    return CostModel(
        CostCurves.linear(np.full(shape.num_ranks, s_per_token)),
        ReplicaWork(read_tokens=read_s / s_per_token, tile_tokens=float(device.tile_tokens)),
        shared_tokens=shared_tokens(shape),
        source=CostSource.DERIVED,
        detail=f"{shape.bytes_per_expert} bytes of {weight_format} per expert on {device.name}"
        + (f", computed in {computed}" if expands else ""),
    )


def tokens_cost(shape: ModelShape, dispatch: DispatchModel) -> CostModel:
    """Return the model of a deployment of whose time nothing is known.

    Under Waterfill it has the work of the shared experts, which is in tokens: without it nothing
    could be placed. Otherwise that work is left out, so that time balance is balancedness.
    """
    placed = dispatch is DispatchModel.WATERFILL
    return replace(TOKENS, shared_tokens=shared_tokens(shape) if placed else 0.0)


def shared_tokens(shape: ModelShape) -> float:
    """Return the work of shared experts for one routed token, in tokens; 0 if it is not known."""
    return (shape.shared_experts or 0.0) / shape.top_k
