"""Renews derived state and probes experts after a swap has written slots.

A probe is what an expert computes for one fixed token. It is registered at load and compared after
each move. Checksums cover the tensors that the engine declares. An expert can depend on a tensor
that nobody declared, such as a scale per slot: its declared bytes then arrive intact, and its
outputs are wrong all the same. A probe runs the engine's own computation, so it sees every tensor
that takes part.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.agent.checksums import agree_on_numbers
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


class WrittenSlots:
    """Calls the engine's hooks for written slots, and knows what every expert computes.

    Args:
        group: communicator on which nothing else is in flight during `register`.
        rank: this rank.
        slots_written: None if the engine derives nothing.
        probe: None probes nothing.
    """

    def __init__(
        self,
        group: Communicator,
        rank: int,
        slots_written: SlotsWritten | None,
        probe: Probe | None,
    ) -> None:
        self._group = group
        self._rank = rank
        self._slots_written = slots_written
        self._probe = probe
        self._numbers: tuple[int, ...] | None = None

    def register(self, placement: Placement) -> bool:
        """Probe every expert of this rank and gather the numbers of all ranks; collective.

        Returns:
            False if two replicas of an expert compute different outputs, or no rank has it.
        """
        if self._probe is None:
            return True
        self._numbers = agree_on_numbers(self._group, self._rank, placement, self._number, "probe")
        return self._numbers is not None

    def follow(self, placement: Placement, slots: Sequence[tuple[int, int]]) -> None:
        """Let the engine renew its derived state; then compare the probes of the written experts.

        Args:
            placement: the map after the wave.
            slots: (layer, local slot) pairs.

        Raises:
            InvalidInput: an expert computes something else in its new slot.
        """
        if self._slots_written is not None:
            self._slots_written(slots)
        if self._numbers is None:
            return
        for layer, local in slots:
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
