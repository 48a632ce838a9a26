"""The expert weights of an engine in which every slot owns its memory; read only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SlotWeights:
    """`ExpertWeights` over tensors with one row per slot.

    Args:
        tensors_of: layer -> all tensors of its experts, scales included, each with the slots of
            this rank as its first dimension.
    """

    def __init__(self, tensors_of: Callable[[int], Sequence[Tensor]]) -> None:
        self._tensors_of = tensors_of

    def rows(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        """Return all tensors of the expert in a slot, in their own types."""
        return [tensor[local_slot] for tensor in self._tensors_of(layer)]

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        """Return the rows; one-byte types, such as float8, as uint8."""
        rows = self.rows(layer, local_slot)
        return [row.view(torch.uint8) if row.element_size() == 1 else row for row in rows]

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Return True: the memory of every slot is there."""
        del slots
        return True

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Do nothing: every slot keeps its memory."""
