"""The staging parts of an agent whose engine copies weights and writes its tables itself."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.transport import Progress, StageOutcome
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.ports.threads import Event
from evenkeel_moe.protocol.messages import Prepare

Refusal = Callable[[Prepare, Placement], tuple[Reason, str] | None]
"""(prepare, new map) -> why the engine cannot move to it; None if it can."""


class NoMaps:
    """A MapInstaller that installs nothing: the engine updates its own tables."""

    def build(self, layers: Sequence[int], rows: NDArray[np.int32], epoch: int) -> None:
        """Build nothing."""
        del layers, rows, epoch

    def install(self, built: None) -> None:
        """Install nothing."""
        del built


class NoCopies:
    """A WeightTransport that copies nothing: staging asks the engine whether it can move."""

    serial = 0
    broken = False

    def __init__(self, refusal: Refusal, wanted: Callable[[], Placement | None]) -> None:
        self._refusal = refusal
        self._wanted = wanted

    @property
    def staged(self) -> Mapping[tuple[int, int], tuple[torch.Tensor, ...]]:
        """Nothing is staged."""
        return {}

    def stage(self, prepare: Prepare, cancel: Event, progress: Progress) -> StageOutcome:
        """Ask the engine whether it can move."""
        del progress
        new = self._wanted()
        if new is None or cancel.is_set():
            return StageOutcome(Reason.CANCELLED, "the wave was cancelled")
        refusal = self._refusal(prepare, new)
        return StageOutcome() if refusal is None else StageOutcome(*refusal)

    def rebuild(self, serial: int) -> None:
        """Note the number of a communicator that does not exist here."""
        self.serial = serial

    def abort(self) -> None:
        """Nothing is in flight."""

    def fence(self) -> None:
        """Nothing to order: the agent copies nothing."""

    def clear(self) -> None:
        """Nothing is staged."""
