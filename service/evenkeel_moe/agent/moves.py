"""Moves the experts of a rank once the ranks agreed: the agent copies them, or the engine does."""

from collections.abc import Callable, Sequence
from typing import Protocol

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.agent.checksums import agree_on_checksums
from evenkeel_moe.agent.ports import ExpertWeights
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.model.placement import Placement

SlotsWritten = Callable[[Sequence[tuple[int, int]]], None]
"""Called with the (layer, local slot) pairs that a swap has written, after the tables were switched
and before the next step. The engine renews what it derived from the tensors of these slots, such as
fused scales, on the stream that computes its steps. It must not fail."""


class ExpertMoves(Protocol):
    """The half of a move that follows the agreement of the ranks, on one rank."""

    outlives_gate: bool
    """True if the engine serves on without the gate, after a failure that cannot have passed a
    wave."""
    meeting: Communicator
    """Communicator on which nothing else is in flight during a registration."""

    @property
    def moved_to(self) -> Placement | None:
        """The map to which the engine went by itself and that the protocol does not know yet."""
        ...

    def register(self, placement: Placement) -> tuple[int, ...] | None:
        """Hash the experts in this rank's slots and gather the numbers of all ranks; collective.

        Returns:
            As `agree_on_checksums`.
        """
        ...

    def is_moving(self) -> bool:
        """Return True if experts move at this step boundary, so that no rank polls."""
        ...

    def carry_out(self, ready: ReadyWave, placement: Placement, layers: tuple[int, ...]) -> bool:
        """Do what is left of a swap once the agent has carried out `ready`.

        Args:
            ready: the staged wave.
            placement: the map after the wave.
            layers: the layers that change.

        Returns:
            True if the rank is at the new map now; False if the engine begins to move there.
        """
        ...


class OwnMoves:
    """Moves by the agent's copies: lets the engine renew what it derived from written slots.

    Args:
        group: communicator on which nothing else is in flight during `register`.
        rank: this rank.
        weights: the engine's expert slots.
        slots_written: None if the engine derives nothing.
    """

    outlives_gate = False
    moved_to = None

    def __init__(
        self,
        group: Communicator,
        rank: int,
        weights: ExpertWeights,
        slots_written: SlotsWritten | None,
    ) -> None:
        self.meeting = group
        self._rank = rank
        self._weights = weights
        self._slots_written = slots_written

    def register(self, placement: Placement) -> tuple[int, ...] | None:
        """Hash every expert of this rank; see `ExpertMoves`."""
        return agree_on_checksums(self.meeting, self._rank, placement, self._weights)

    def is_moving(self) -> bool:
        """Return False: a swap is over before the next step."""
        return False

    def carry_out(self, ready: ReadyWave, placement: Placement, layers: tuple[int, ...]) -> bool:
        """Let the engine renew its derived state."""
        if self._slots_written is not None:
            self._slots_written(tuple(ready.staged))
        return True
