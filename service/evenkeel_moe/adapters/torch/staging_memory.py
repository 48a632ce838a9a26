"""The staging memory of one rank: one allocation, divided among the experts of a wave."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 256
"""Staged tensors begin at multiples of this many bytes, as an allocator's do."""


class StagingMemory:
    """Memory for received experts, which no router reaches (R11).

    Args:
        nbytes: room for experts, allocated once.
        sample: tensors of one expert. Others have as many, and are not smaller; that bounds the
            padding for alignment, which comes on top of `nbytes`.
        device: device to allocate on.
    """

    def __init__(self, nbytes: int, sample: Sequence[Tensor], device: torch.device) -> None:
        experts = -(-nbytes // max(1, sum(tensor.nbytes for tensor in sample)))
        padding = experts * len(sample) * _ALIGN
        self._arena = torch.zeros(nbytes + padding, dtype=torch.uint8, device=device)
        self._used = 0
        self.staged: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """(layer, local slot) -> tensors staged for it."""

    def allocate(self, layer: int, local_slot: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return room for an expert whose tensors have the dtypes and shapes of `like`."""
        room = []
        for tensor in like:
            piece = self._arena[self._used : self._used + tensor.nbytes]
            self._used += -(-tensor.nbytes // _ALIGN) * _ALIGN
            room.append(piece.view(tensor.dtype).view(tensor.shape))
        self.staged[layer, local_slot] = tuple(room)
        return self.staged[layer, local_slot]

    def clear(self) -> None:
        """Free everything; the memory serves the next wave."""
        self.staged = {}
        self._used = 0
