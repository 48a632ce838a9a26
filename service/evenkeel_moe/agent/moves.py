"""Moves the experts of a rank once the ranks agreed: the agent copies them, or the engine does."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evenkeel_moe.adapters.torch.groups import TRANSFER, Communicator
from evenkeel_moe.agent.build import AgentParts, Connect, own_name
from evenkeel_moe.agent.checksums import agree_on_checksums
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.declared_tensors import agree_on_tensors, check_size
from evenkeel_moe.agent.ports import ExpertWeights, WeightTransport
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.agent.trouble import Trouble
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.rank.participant import Participant

SlotsWritten = Callable[[Sequence[tuple[int, int]]], None]
"""Called with the (layer, local slot) pairs that a swap has written, after the tables were switched
and before the next step. The engine renews what it derived from the tensors of these slots, such as
fused scales, on the stream that computes its steps. It must not fail."""


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """One swap, as measured on this rank."""

    wave: WaveKey
    epoch: int
    """The new epoch."""
    step: int
    """The last step recorded before the swap; -1 before the first."""
    layers: tuple[int, ...]
    seconds: float
    """Time for which the swap delayed the step."""
    received_bytes: int


class ExpertMoves(ABC):
    """The half of a move that follows the agreement of the ranks, on one rank."""

    outlives_gate: bool
    """True if the engine serves on without the gate, after a failure that cannot have passed a
    wave."""
    meeting: Communicator
    """Communicator on which nothing else is in flight during a registration."""
    moved_to: Placement | None = None
    """The map to which the engine went by itself and that the protocol does not know yet."""

    def attach(
        self,
        agent: Any,
        config: AgentConfig,
        weights: ExpertWeights,
        connect: Connect,
        device: torch.device,
    ) -> None:
        """Take the agent, which is an `Agent`, and the slots, before anything else; collective."""
        del agent
        self._config, self._weights = config, weights
        self._connect, self._device = connect, device

    def register(self, placement: Placement) -> tuple[int, ...]:
        """Hash the experts in this rank's slots and gather the numbers of all ranks; collective.

        Returns, raises:
            As `agree_on_checksums`.
        """
        rank = self._config.identity.rank
        return agree_on_checksums(self.meeting, rank, placement, self._weights)

    @abstractmethod
    def make_transport(
        self, parts: AgentParts, participant: Participant, faults: Trouble
    ) -> WeightTransport:
        """Return a transport that is not connected yet.

        Args:
            parts: of the agent.
            participant: of the agent; only read here.
            faults: the faults of the agent.

        Raises:
            InvalidInput: the tensors of an expert are not as large as the deployment's shape says.
        """

    @abstractmethod
    def is_moving(self) -> bool:
        """Return True if experts move at this step boundary, so that no rank polls."""

    @abstractmethod
    def carry_out(self, ready: ReadyWave, placement: Placement, layers: tuple[int, ...]) -> bool:
        """Do what is left of a swap once the agent has carried out `ready`.

        Args:
            ready: the staged wave.
            placement: the map after the wave.
            layers: the layers that change.

        Returns:
            True if the rank is at the new map now; False if the engine begins to move there.
        """


class OwnMoves(ExpertMoves):
    """Moves by the agent's copies: lets the engine renew what it derived from written slots.

    Args:
        group: communicator on which nothing else is in flight during `register`.
        slots_written: None if the engine derives nothing.
    """

    outlives_gate = False

    def __init__(self, group: Communicator, slots_written: SlotsWritten | None) -> None:
        self.meeting = group
        self._slots_written = slots_written

    def register(self, placement: Placement) -> tuple[int, ...]:
        """Check the tensors first: see `agree_on_tensors`."""
        rank, nbytes = self._config.identity.rank, self._config.shape.bytes_per_expert
        agree_on_tensors(self.meeting, rank, placement, self._weights, nbytes)
        return super().register(placement)

    def make_transport(
        self, parts: AgentParts, participant: Participant, faults: Trouble
    ) -> WeightTransport:
        """Allocate the staging memory; see `ExpertMoves`."""
        config, weights, placement = self._config, self._weights, participant.placement
        rank, per_rank = config.identity.rank, placement.slots_per_rank
        held = np.argwhere(placement.phy2log[:, rank * per_rank : (rank + 1) * per_rank] >= 0)
        layer, local = held[0].tolist() if len(held) else (0, 0)
        if not len(held):  # A rank that has joined a group is empty: no slot may have memory yet.
            weights.reserve(((layer, local),))
        sample = weights.tensors(layer, local)
        if not len(held):
            weights.release(((layer, local),))
        check_size(sample, config.shape.bytes_per_expert)
        return parts.transport(
            rank=rank,
            slots_per_rank=per_rank,
            staging_bytes=config.staging_bytes,
            tensors_of=weights.tensors,
            sample=sample,
            connect=lambda serial: self._connect(
                own_name(f"{TRANSFER}{serial}", config), self._device
            ),
            device=self._device,
            threads=parts.threads,
        )

    def is_moving(self) -> bool:
        """Return False: a swap is over before the next step."""
        return False

    def carry_out(self, ready: ReadyWave, placement: Placement, layers: tuple[int, ...]) -> bool:
        """Let the engine renew its derived state."""
        if self._slots_written is not None:
            self._slots_written(tuple(ready.staged))
        return True
