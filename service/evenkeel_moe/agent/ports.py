"""What an engine gives the agent, and what the agent asks of its stream: the smallest Protocols."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.adapters.torch.transport import Progress, StageOutcome
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.protocol.messages import Hello, Prepare
from evenkeel_moe.wire.link import FromRankLink, Heartbeat, ToRankLink

__all__ = [
    "ExpertWeights",
    "GateFailed",
    "LinkListener",
    "MapInstaller",
    "RankLink",
    "WeightTransport",
]


class GateFailed(Unavailable):
    """The gate's answer is unknown: this process must leave the EP group and be started again (R8)."""

    default_reason = Reason.GATE_FAILED


class ExpertWeights(Protocol):
    """Where the engine keeps the experts of this rank."""

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        """Every tensor of the expert in a slot, scales too, always in the same order.

        The agent reads filled slots while steps run, and writes them inside `step_boundary` only.
        Reserved slots must answer as well.
        """
        ...

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Set memory aside for (layer, local slot) pairs that are empty now and filled by a wave; all or none.

        Called from the agent's transfer thread before the rank votes. False when the memory is not
        there; the rank then votes no. Engines whose slots own their memory return True.
        """
        ...

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Take back the memory of pairs that no map reaches any more, or of a reservation given up.

        It may serve a later `reserve` only: nothing reserved for the wave that emptied them is in it (R11).
        """
        ...


class MapInstaller(Protocol):
    """The engine's routing tables."""

    def build(self, layers: Sequence[int], rows: NDArray[np.int32], epoch: int) -> Any:
        """Make what `install` needs, on the agent's transfer thread; may allocate, may fail.

        Args:
            layers: layers that change.
            rows: (len(layers), S) their new phy2log rows.
            epoch: the epoch they belong to.
        """
        ...

    def install(self, built: Any) -> None:
        """Switch to the built tables at once, inside `step_boundary`; must not fail."""
        ...


class WeightTransport(Protocol):
    """Moves experts into staging memory. `stage`, `rebuild` and `clear` are called by one thread."""

    @property
    def serial(self) -> int:
        """Number of the communicator in use, or of the one that broke."""
        ...

    @property
    def broken(self) -> bool:
        """Nothing can be staged until `rebuild`."""
        ...

    @property
    def staged(self) -> Mapping[tuple[int, int], tuple[Tensor, ...]]:
        """(layer, local slot) -> tensors staged for this rank's slots; valid until `clear` or the next `stage`."""
        ...

    def stage(self, prepare: Prepare, cancel: threading.Event, progress: Progress) -> StageOutcome:
        """Run every batch of a wave; on return none of its operations is in flight at this rank.

        What arrives is compared with the checksums of the Prepare. A cancellation never leaves a peer
        waiting for its half of a batch. A batch past its deadline breaks the communicator.
        """
        ...

    def rebuild(self, serial: int) -> None:
        """Connect all ranks anew; collective.

        Raises:
            Unavailable: not all ranks came; `broken` stays true.
        """
        ...

    def abort(self) -> None:
        """Break the communicator, from any thread: operations in flight end with an error, at their deadline at the latest."""
        ...

    def fence(self) -> None:
        """Engine's thread: what it gave its device so far comes before the next wave's copies."""
        ...

    def clear(self) -> None:
        """Forget what is staged."""
        ...


class LinkListener(Protocol):
    """What a link needs of the agent; called on the link's event loop."""

    def hello(self) -> Hello:
        """The first message of every stream."""
        ...

    def heartbeat(self) -> Heartbeat:
        """What to say when it is time to be heard."""
        ...

    def received(self, stream: int, message: ToRankLink) -> None:
        """A message came on a stream."""
        ...

    def lost(self, stream: int) -> None:
        """A stream ended."""
        ...


class RankLink(Protocol):
    """The rank's stream to the controller: one at a time, numbered, opened again when it ends."""

    async def run(self, listener: LinkListener) -> None:
        """Keep a stream open until cancelled."""
        ...

    def send(self, message: FromRankLink, stream: int | None = None) -> None:
        """Queue a message, from the event loop; dropped unless `stream` (None: any) is the open one."""
        ...
