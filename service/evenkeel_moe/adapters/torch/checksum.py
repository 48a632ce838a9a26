"""Checksums of expert weights, on the host or on the GPU that holds them.

The GPU's own checksum exists because hashing an expert on the host would first copy it there. It
mixes words of eight bytes with their positions and sums them modulo 2**64. A sum has no order, so a
device may add in any order. All operations wrap alike on CPU and GPU, so both give the same number
for the same bytes.
"""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

_WORDS = 1 << 22
"""Words mixed at once; limits the memory this takes to a few times 32 MiB."""
_SPREAD = -7046029254386353131
"""0x9E3779B97F4A7C15, 2**64 over the golden ratio, as a signed number."""
_MIX = -4658895280553007687
"""0xBF58476D1CE4E5B9, of the splitmix generator, as a signed number."""
_LOW = 0xFFFFFFFF
_WRAP = 2**64


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return 64 bits over the bytes of all tensors of an expert, in order.

    It is xxh3 on the host and `device_checksum` on a GPU. The ranks of a group compare their
    numbers, so all their weights must be on GPUs, or all on hosts.
    """
    if tensors and tensors[0].device.type == "cuda":
        return device_checksum(tensors)
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(flat_bytes(tensor).cpu().numpy().data)
    return int(digest.intdigest())


def device_checksum(tensors: Sequence[Tensor]) -> int:
    """Return 64 bits over the bytes of all tensors of an expert; copies only these to the host.

    Args:
        tensors: contiguous or not, of any dtype, on one device.
    """
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    lengths = 0
    position = 1
    for tensor in tensors:
        flat = flat_bytes(tensor.detach())
        # The length is part of the sum, so that bytes cannot move to the next tensor unnoticed.
        lengths += _mixed_number(flat.numel(), position)
        position += 1
        for first in range(0, flat.numel(), 8 * _WORDS):
            words = _words(flat[first : first + 8 * _WORDS])
            total += _mixed(words, position)
            position += words.numel()
    return (int(total.item()) + lengths) % _WRAP


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a flat byte view: backends differ in the dtypes they support, but all take bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _words(part: Tensor) -> Tensor:
    """Return the bytes as (n,) int64; zeros fill up the last word."""
    if part.numel() % 8 == 0 and part.data_ptr() % 8 == 0 and part.storage_offset() % 8 == 0:
        return part.view(torch.int64)
    padded = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
    padded[: part.numel()] = part
    return padded.view(torch.int64)


def _mixed_number(word: int, position: int) -> int:
    """Return what `_mixed` gives for one word, without launches on a device."""
    value = (word ^ (position * _SPREAD % _WRAP)) * _MIX % _WRAP
    value ^= value >> 32
    value = value * _SPREAD % _WRAP
    return value ^ (value >> 29)


def _mixed(words: Tensor, position: int) -> Tensor:
    """Return the sum of the words, each mixed with its position."""
    where = torch.arange(position, position + words.numel(), dtype=torch.int64, device=words.device)
    value = (words ^ (where * _SPREAD)) * _MIX
    value ^= (value >> 32) & _LOW
    value *= _SPREAD
    value ^= (value >> 29) & (2**35 - 1)
    return value.sum()
