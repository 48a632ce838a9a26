"""The MoE layer that a profile measures.

One batched call computes all active replicas, as an engine's grouped kernel does; a loop over
replicas would time its launches instead. Replicas take turns, so that weights come from memory and
not from a cache. Weights are random. An engine's fused kernel has other stairs, so what carries
over is the comparison of devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from evenkeel_moe.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The part of a MoE layer that one rank computes."""

    d_model: int
    d_ffn: int
    experts: int
    """Slots of this rank in one layer."""
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ffn", "experts"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be at least 1")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise InvalidInput(f"torch has no number type {self.dtype}")


class Point(NamedTuple):
    """One point of the grid."""

    tokens: int
    """Each active replica has this many."""
    active: int


def grouped_layer(shape: ExpertShape, device: torch.device) -> Callable[[Point], None]:
    """Return a MoE layer that computes the active replicas in one batched call per matrix.

    Raises:
        InvalidInput: torch cannot multiply matrices of this number type on the device.
    """
    dtype: torch.dtype = getattr(torch, shape.dtype)
    generator = torch.Generator(device="cpu").manual_seed(0)

    def weights(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).to(device=device, dtype=dtype)

    try:
        up = weights(shape.experts, shape.d_model, 2 * shape.d_ffn)
        down = weights(shape.experts, shape.d_ffn, shape.d_model)
        torch.bmm(weights(1, 1, shape.d_model), up[:1])
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidInput(f"no layer of {shape.dtype} on {device}: {str(error)[:200]}") from error
    inputs: dict[Point, Tensor] = {}
    first = 0

    def run(point: Point) -> None:
        nonlocal first
        rows = inputs.get(point)
        if rows is None:
            rows = inputs[point] = weights(point.active, point.tokens, shape.d_model)
        if first + point.active > shape.experts:
            first = 0
        chosen = slice(first, first + point.active)
        first += point.active
        with torch.no_grad():
            gate, value = torch.bmm(rows, up[chosen]).chunk(2, dim=-1)
            torch.bmm(torch.nn.functional.silu(gate).mul_(value), down[chosen])

    return run


def waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the computation that was started on a device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return wait
