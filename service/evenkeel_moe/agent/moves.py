"""Moves the experts of a rank once the ranks agreed: the agent copies them, or the engine does."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.agent.checksums import agree_on_checksums, agree_on_numbers
from evenkeel_moe.agent.ports import ExpertWeights
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.placement import Placement

SlotsWritten = Callable[[Sequence[tuple[int, int]]], None]
"""Called with the (layer, local slot) pairs that a swap has written, after the tables were switched
and before the next step. The engine renews what it derived from the tensors of these slots, such as
fused scales, on the stream that computes its steps. It must not fail."""
Probe = Callable[[int, int], Tensor]
"""(layer, local slot) -> the output of the expert in that slot for one token, the same token on
every rank and in every call. The bits must not depend on the slot or the rank: use one kernel
configuration, and round the output where devices of a group differ."""


class ExpertMoves(Protocol):
    """The half of a move that follows the agreement of the ranks, on one rank."""

    outlives_gate: bool
    """True if the engine serves on without the gate, after a failure that cannot have passed a
    wave."""

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
    """Moves by the agent's copies: renews derived state and probes experts in written slots.

    A probe is what an expert computes for one fixed token. It is registered at load and compared
    after each move. Checksums cover the tensors that the engine declares. An expert can depend on a
    tensor that nobody declared, such as a scale per slot: its declared bytes then arrive intact,
    and its outputs are wrong all the same. A probe runs the engine's own computation, so it sees
    every tensor that takes part.

    Args:
        group: communicator on which nothing else is in flight during `register`.
        rank: this rank.
        weights: the engine's expert slots.
        slots_written: None if the engine derives nothing.
        probe: None probes nothing.
    """

    outlives_gate = False
    moved_to = None

    def __init__(
        self,
        group: Communicator,
        rank: int,
        weights: ExpertWeights,
        slots_written: SlotsWritten | None,
        probe: Probe | None,
    ) -> None:
        self._group = group
        self._rank = rank
        self._weights = weights
        self._slots_written = slots_written
        self._probe = probe
        self._numbers: tuple[int, ...] | None = None

    def register(self, placement: Placement) -> tuple[int, ...] | None:
        """Hash and probe every expert of this rank; see `ExpertMoves`."""
        checksums = agree_on_checksums(self._group, self._rank, placement, self._weights)
        if self._probe is None:
            return checksums
        self._numbers = agree_on_numbers(self._group, self._rank, placement, self._number, "probe")
        return checksums if self._numbers is not None else None

    def is_moving(self) -> bool:
        """Return False: a swap is over before the next step."""
        return False

    def carry_out(self, ready: ReadyWave, placement: Placement, layers: tuple[int, ...]) -> bool:
        """Let the engine renew its derived state; then compare the probes of the written experts.

        Raises:
            InvalidInput: an expert computes something else in its new slot.
        """
        if self._slots_written is not None:
            self._slots_written(tuple(ready.staged))
        for layer, local in ready.staged if self._numbers is not None else ():
            self._compare(layer, local, placement)
        return True

    def _compare(self, layer: int, local: int, placement: Placement) -> None:
        assert self._numbers is not None
        slot = self._rank * placement.slots_per_rank + local
        expert = int(placement.phy2log[layer, slot])
        expected = self._numbers[layer * placement.num_logical_experts + expert]
        found = self._number(layer, local)
        if found != expected:
            raise InvalidInput(
                f"layer {layer} expert {expert} computes {found:016x} for the probe in slot"
                f" {slot}, and computed {expected:016x} when it was registered. Its declared"
                " tensors arrived intact: a tensor that also belongs to the expert is missing"
                " in ExpertWeights.tensors, or slots_written did not renew a derived one",
                Reason.CHECKSUM_MISMATCH,
            )

    def _number(self, layer: int, local_slot: int) -> int:
        assert self._probe is not None
        return checksum([self._probe(layer, local_slot).detach()])
