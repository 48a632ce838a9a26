"""Protocols of what the agent works with: the engine, the weight transport, the rank link."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.adapters.grpc.rank_link import LinkListener
from evenkeel_moe.adapters.torch.transport import Progress, StageOutcome
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.ports.threads import Event
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.wire.link import DeviceClock, FromRankLink


class GateFailed(Unavailable):
    """The result of the gate is unknown: leave the EP group and restart this process (R8)."""

    default_reason = Reason.GATE_FAILED


class ExpertWeights(Protocol):
    """The engine's memory for the experts of this rank."""

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        """Return all tensors of the expert in a slot, scales included, always in the same order.

        The agent reads filled slots while steps run, and writes them only inside `step_boundary`.
        Reserved slots must have tensors as well.
        """
        ...

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Reserve memory for empty (layer, local slot) pairs that a wave will fill: all or none.

        Called on the agent's transfer thread before the rank votes. Return False when there is not
        enough memory; the rank then votes no. Engines whose slots own their memory return True.
        """
        ...

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Free the memory of pairs that no map refers to any more, or of a cancelled reservation.

        Only a later `reserve` may use it: the wave that emptied the pairs reserved other memory
        (R11).
        """
        ...


class MapInstaller(Protocol):
    """The engine's routing tables."""

    def build(self, layers: Sequence[int], rows: NDArray[np.int32], epoch: int) -> Any:
        """Build the tables that `install` needs; may allocate and may fail.

        Called on the agent's transfer thread.

        Args:
            layers: the layers that change.
            rows: (len(layers), S) - their new phy2log rows.
            epoch: the epoch of these rows.
        """
        ...

    def install(self, built: Any) -> None:
        """Switch to the built tables, inside `step_boundary`; must not fail.

        Write into the tensors that the forward pass reads, for example with `copy_`. A captured
        CUDA graph keeps their addresses: new tensors would leave it with the old tables, while
        the weights have moved.
        """
        ...


class ClockReader(Protocol):
    """Reads the clock of the device. An engine that measures its compute time needs none."""

    def read(self) -> DeviceClock | None:
        """Return the present clock; None while the device is idle, or if the clock is unknown.

        Called on a thread of its own; may take milliseconds.
        """
        ...


class WeightTransport(Protocol):
    """Copies experts into staging memory. One thread calls `stage`, `rebuild` and `clear`."""

    @property
    def serial(self) -> int:
        """The number of the communicator in use, or of the one that broke."""
        ...

    @property
    def broken(self) -> bool:
        """True if nothing can be staged until `rebuild`."""
        ...

    @property
    def staged(self) -> Mapping[tuple[int, int], tuple[Tensor, ...]]:
        """(layer, local slot) -> tensors staged for it; valid until `clear` or the next `stage`."""
        ...

    def stage(self, prepare: Prepare, cancel: Event, progress: Progress) -> StageOutcome:
        """Run all batches of a wave; on return none of its operations is in flight on this rank.

        Received experts are compared with the checksums of the Prepare. A cancellation never leaves
        a peer waiting for its half of a batch. A batch past its deadline breaks the communicator.
        """
        ...

    def rebuild(self, serial: int) -> None:
        """Connect all ranks again; collective.

        Raises:
            Unavailable: not all ranks connected; `broken` stays true.
        """
        ...

    def abort(self) -> None:
        """Abort the communicator, from any thread.

        Operations in flight end with an error, at their deadline at the latest.
        """
        ...

    def fence(self) -> None:
        """Order the next wave's copies after the work the engine's thread has queued so far.

        Called on the engine's thread.
        """
        ...

    def clear(self) -> None:
        """Drop the staged tensors."""
        ...


class RankLink(Protocol):
    """The rank's stream to the controller: one at a time, numbered, reopened when it ends."""

    async def run(self, listener: LinkListener) -> None:
        """Keep a stream open until cancelled."""
        ...

    def send(self, message: FromRankLink, stream: int | None = None) -> None:
        """Queue a message, on the event loop; drop it unless `stream` (None: any) is open."""
        ...

    async def finish(self, message: FromRankLink) -> None:
        """Send a last message on the open stream and return once the stream has ended."""
        ...
