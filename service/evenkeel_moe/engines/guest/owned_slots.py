"""The memory half of `ExpertWeights` for engines in which every slot owns its memory."""

from collections.abc import Sequence


class OwnedSlots:
    """Nothing has to be reserved or released."""

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Return True: the memory of every slot is there."""
        del slots
        return True

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Do nothing: every slot keeps its memory."""
