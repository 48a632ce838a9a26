"""A checksum that runs where the weights lie: hashing an expert on the host first would copy it there.

Words of eight bytes are mixed with their position, one by one, and summed modulo 2**64: a sum has no order, so a device may
take it in any. Every operation wraps alike on CPU and GPU, so both give the same number for the same bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["device_checksum"]

_WORDS = 1 << 22
"""Mixed at once: bounds the memory this takes to a few times 32 MiB."""
_SPREAD = (
    -7046029254386353131
)  # 0x9E3779B97F4A7C15, 2**64 over the golden ratio, as a signed number
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9, of the splitmix generator
_LOW = 0xFFFFFFFF


def device_checksum(tensors: Sequence[Tensor]) -> int:
    """Unsigned 64 bits over the bytes of all tensors of an expert, in order; one small copy to the host.

    Args:
        tensors: contiguous or not, of any number type, on one device.
    """
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    position = 1
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        # The length closes each tensor, so that bytes cannot move from one to the next unnoticed.
        total += _mixed(torch.full((1,), flat.numel(), dtype=torch.int64, device=device), position)
        position += 1
        for first in range(0, flat.numel(), 8 * _WORDS):
            words = _words(flat[first : first + 8 * _WORDS])
            total += _mixed(words, position)
            position += words.numel()
    return int(total.item()) % 2**64


def _words(part: Tensor) -> Tensor:
    """(n,) int64 of the bytes, the last word filled up with zeros."""
    padded = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
    padded[: part.numel()] = part
    return padded.view(torch.int64)


def _mixed(words: Tensor, position: int) -> Tensor:
    """Sum of the words, each mixed with its position."""
    where = torch.arange(position, position + words.numel(), dtype=torch.int64, device=words.device)
    value = (words ^ (where * _SPREAD)) * _MIX
    value ^= (value >> 32) & _LOW
    value *= _SPREAD
    value ^= (value >> 29) & (2**35 - 1)
    return value.sum()
