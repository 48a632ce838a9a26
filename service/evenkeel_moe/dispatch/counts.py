"""Checks arrays of token counts, and counts choices."""

import torch
from torch import Tensor

from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch

_EXACT = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
)  # fmt: skip
MOST_TOKENS = 2.0**53
"""Up to this value float64 holds every whole number of tokens."""


def check_counts(
    counts: Tensor, shape: tuple[int, ...], what: str, *, whole: bool = False
) -> Tensor:
    """Check that a dispatcher can use token counts.

    Values are checked on the CPU only: on a GPU that would stop the stream, and the counts of
    `count_choices` are valid by construction.

    Args:
        counts: [tokens], any integer type, float32 or float64.
        shape: the shape wanted.
        what: the name used in messages.
        whole: True refuses parts of tokens.

    Returns:
        The counts as float64.

    Raises:
        ShapeMismatch: the shape differs.
        InvalidInput: half precision (float16 cannot hold 2049, bfloat16 not 257), or values that
            are negative, not finite, above 2^53 or, if asked, not whole.
    """
    check_type(counts, shape, what)
    values = counts.to(torch.float64)
    if values.device.type == "cpu" and values.numel():
        lowest, highest = values.aminmax()
        # NaN fails both comparisons.
        if not (float(lowest) >= 0.0 and float(highest) <= MOST_TOKENS):
            if not bool(torch.isfinite(values).all()):
                raise InvalidInput(f"{what} hold values that are not finite", Reason.NOT_FINITE)
            if lowest < 0:
                raise InvalidInput(f"{what} hold negative values", Reason.NEGATIVE_COUNT)
            raise InvalidInput(f"{what} hold up to {float(highest):g}, more than 2^53 tokens")
        if whole and counts.is_floating_point() and bool((values != values.floor()).any()):
            raise InvalidInput(f"{what} must be whole tokens")
    return values


def check_type(counts: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Check type and shape as `check_counts` does, but no values."""
    if counts.dtype not in _EXACT:
        kind = str(counts.dtype).removeprefix("torch.")
        raise InvalidInput(
            f"{what} are {kind}, which cannot hold every whole number; pass int64 or float32"
        )
    if tuple(counts.shape) != shape:
        raise ShapeMismatch(f"{what} must be {shape}, got {tuple(counts.shape)}")


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Count (n, k) chosen experts, -1 for padding -> (E,) int64 [tokens], without a host sync."""
    flat = experts.reshape(-1).to(torch.int64)
    bucket = torch.where(flat >= 0, flat, num_experts)
    out = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return out.scatter_add_(0, bucket, torch.ones_like(bucket))[:num_experts]


def occurrence(experts: Tensor, num_experts: int) -> Tensor:
    """Return, for each choice, the number of earlier choices of the same expert in the batch.

    Args:
        experts: (n, k) int64, -1 for padding.
        num_experts: E.

    Returns:
        (n, k) int64 - 0 for the first choice of an expert in row-major order, 1 for the second, ...
    """
    flat = experts.reshape(-1)
    bucket = torch.where(flat >= 0, flat, num_experts)
    order = torch.argsort(bucket, stable=True)
    ordered = bucket[order]
    first = torch.nn.functional.pad(count_choices(experts, num_experts).cumsum(0), (1, 0))
    index = torch.arange(flat.numel(), device=experts.device) - first[ordered]
    return torch.empty_like(bucket).scatter_(0, order, index).reshape(experts.shape)
