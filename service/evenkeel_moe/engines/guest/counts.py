"""Token counts of each step, brought from the device to the recorder without waiting.

The engine counts by slot. Which expert a slot held is certain only while the step's own map is in
use. So the sums by logical expert are computed then, on the engine's stream, before the map can
change. The copy to the host is collected some steps later, once its event has passed.
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

_log = structlog.get_logger(__name__)
_MAX_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class StepNote:
    """The facts about a step that the host knows when the step ends."""

    step: int
    epoch: int
    dummy: bool
    prepared_tokens: int | None
    """Real tokens that the engine prepared; None if the engine does not report them."""


Deliver = Callable[[StepNote, NDArray[np.int64]], None]
"""(note, (L, E) int64 counts by logical expert), in step order."""


class StepCounts:
    """Counts of one rank on their way to the host.

    Args:
        num_logical_experts: E.
        deliver: receives every step, in order, on the engine's thread.
    """

    def __init__(self, num_logical_experts: int, deliver: Deliver) -> None:
        self._experts = num_logical_experts
        self._deliver = deliver
        self._in_flight: deque[tuple[StepNote, Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        self._failures = 0

    def take(self, note: StepNote, by_slot: Tensor, phy2log: Tensor | None) -> None:
        """Count one step.

        Args:
            note: the facts about the step.
            by_slot: (L, S) integer, tokens this rank routed to each slot in this step.
            phy2log: (L, S) map of the step, -1 for an empty slot; None delivers `by_slot` as it is.
        """
        if phy2log is None:
            # A copy, because the engine fills its own tensor again in the next step.
            logical = by_slot.to(torch.int64, copy=True)
        else:
            logical = self._sum_by_expert(by_slot, phy2log)
        if logical.device.type == "cpu":
            self._deliver(note, logical.numpy())
            return
        if self._free:
            host = self._free.pop()
        else:
            host = torch.empty(logical.shape, dtype=logical.dtype, pin_memory=True)
        host.copy_(logical, non_blocking=True)
        event: Any = torch.Event()
        event.record()
        self._in_flight.append((note, host, event))
        self.pick_up(wait=len(self._in_flight) > _MAX_IN_FLIGHT)

    def pick_up(self, *, wait: bool = False) -> None:
        """Deliver the copies that have arrived; with `wait`, wait for the oldest one."""
        while self._in_flight:
            note, host, event = self._in_flight[0]
            if wait:
                event.synchronize()
                wait = False
            elif not event.query():
                return
            self._in_flight.popleft()
            self._deliver(note, host.numpy().copy())
            self._free.append(host)

    def failed(self, step: int) -> None:
        """Log the current exception, which kept a step from being counted.

        Only the 1st, 2nd, 4th, 8th, ... failure is logged.
        """
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            _log.exception("counting_failed", step=step, times=self._failures)

    def _sum_by_expert(self, by_slot: Tensor, phy2log: Tensor) -> Tensor:
        """Return (L, E) int64 sums; tokens of empty slots go to an extra column that is cut off."""
        where = phy2log.long()
        where = torch.where(where < 0, torch.full_like(where, self._experts), where)
        shape = (by_slot.shape[0], self._experts + 1)
        sums = torch.zeros(shape, dtype=torch.int64, device=by_slot.device)
        sums.scatter_add_(1, where, by_slot.long())
        return sums[:, :-1].contiguous()


def count_once(
    counts: NDArray[np.int64], counted: int, batch: int, place: int
) -> tuple[NDArray[np.int64], int]:
    """Return this rank's part of a batch that several ranks got, such as a tensor-parallel group.

    Either every rank routes the whole batch, or each routes one of equal parts, in the order of the
    ranks; the rows that pad the last parts are then counted too. In both cases this rank's part
    begins at `place * counted`, so the parts of all ranks add up to the batch.

    Args:
        counts: (L, E) int64 of this rank.
        counted: tokens that this rank counted.
        batch: real tokens of the batch.
        place: position of this rank among the ranks that got the batch.

    Returns:
        (L, E) int64 counts scaled to the part, and its tokens. Each layer's counts sum to tokens x
        top_k if they did before.
    """
    part = min(max(batch - place * counted, 0), counted)
    if part == counted:
        return counts, counted
    return np.diff(counts.cumsum(axis=1) * part // counted, axis=1, prepend=0), part


def record_step(
    agent: GuestAgent, note: StepNote, counts: NDArray[np.int64], tokens: int, phase: Phase
) -> None:
    """Pass one step to the agent's recorder; a dummy step counts no tokens.

    Args:
        agent: the rank's agent.
        note: the facts about the step.
        counts: (L, E) or (L, slots_per_rank) int64, depending on the counting side.
        tokens: real tokens this rank routed.
        phase: the phase the engine serves.
    """
    if note.dummy:
        counts, tokens = np.zeros_like(counts), 0
    agent.record(note.step, counts, epoch=note.epoch, tokens=tokens, phase=phase, dummy=note.dummy)
