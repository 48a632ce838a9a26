"""Per-step counts out of an engine: physical to logical on the device, then to the recorder without waiting.

The engine counts by slot. What a slot held is known exactly only while the step's own map is in force, so the sums
by logical expert are taken there, on the engine's stream, before any switch. The copy to the host is picked up some
steps later, when its event has passed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.agent.guest import GuestAgent
from evenkeel_moe.model.load import Phase

__all__ = ["StepCounts", "StepNote", "record_step"]

_log = structlog.get_logger(__name__)
_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class StepNote:
    """What the host knows of a step when it ends."""

    step: int
    epoch: int
    dummy: bool
    prepared_tokens: int | None
    """Real tokens the engine said it prepared; None where it does not say."""


Deliver = Callable[[StepNote, NDArray[np.int64]], None]
"""(note, (L, E) int64 counts by logical expert), in step order."""


class StepCounts:
    """Counts of one rank on their way to the host.

    Args:
        num_logical_experts: E.
        deliver: takes every step, in order, on the engine's thread.
    """

    def __init__(self, num_logical_experts: int, deliver: Deliver) -> None:
        self._experts = num_logical_experts
        self._deliver = deliver
        self._flying: deque[tuple[StepNote, Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        self._failures = 0

    def take(self, note: StepNote, by_slot: Tensor, phy2log: Tensor | None) -> None:
        """Note one step.

        Args:
            note: what the host knows of it.
            by_slot: (L, S) integer, tokens this rank routed to each slot in this step.
            phy2log: (L, S) the map the step ran under, -1 where a slot is empty; None delivers (L, S) as it is.
        """
        # What is delivered is kept: never the engine's own tensor, which it fills again in the next step.
        logical = (
            by_slot.to(torch.int64, copy=True)
            if phy2log is None
            else self._logical(by_slot, phy2log)
        )
        if logical.device.type == "cpu":
            self._deliver(note, logical.numpy())
            return
        host = (
            self._free.pop()
            if self._free
            else torch.empty(logical.shape, dtype=logical.dtype, pin_memory=True)
        )
        host.copy_(logical, non_blocking=True)
        event: Any = torch.Event()
        event.record()
        self._flying.append((note, host, event))
        self.pick_up(wait=len(self._flying) > _IN_FLIGHT)

    def pick_up(self, *, wait: bool = False) -> None:
        """Deliver what has arrived; `wait` for the oldest one."""
        while self._flying:
            note, host, event = self._flying[0]
            if wait:
                event.synchronize()
                wait = False
            elif not event.query():
                return
            self._flying.popleft()
            self._deliver(note, host.numpy().copy())
            self._free.append(host)

    def failed(self, step: int) -> None:
        """A step could not be counted, for the error being handled: said the 1st, 2nd, 4th, 8th, ... time."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            _log.exception("counting_failed", step=step, times=self._failures)

    def _logical(self, by_slot: Tensor, phy2log: Tensor) -> Tensor:
        """(L, E) int64 sums; what fell on an empty slot goes to a column that is cut off."""
        where = phy2log.long()
        where = torch.where(where < 0, torch.full_like(where, self._experts), where)
        sums = torch.zeros(
            (by_slot.shape[0], self._experts + 1), dtype=torch.int64, device=by_slot.device
        )
        sums.scatter_add_(1, where, by_slot.long())
        return sums[:, :-1].contiguous()


def record_step(
    agent: GuestAgent, note: StepNote, counts: NDArray[np.int64], tokens: int, phase: Phase
) -> None:
    """Hand one step to the agent's recorder; a dummy step counts nothing.

    Args:
        counts: (L, E) or (L, slots_per_rank) int64, as the side asks.
        tokens: real tokens this rank routed.
    """
    if note.dummy:
        counts, tokens = np.zeros_like(counts), 0
    agent.record(note.step, counts, epoch=note.epoch, tokens=tokens, phase=phase, dummy=note.dummy)
