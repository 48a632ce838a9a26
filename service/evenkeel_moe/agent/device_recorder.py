"""Token counts of each step, brought from the device to the recorder without waiting.

An engine counts on its device. Copying the counts to the host at the end of a step would make the
step wait for the device, so the copy is collected some steps later, once its event has passed.
Which expert a slot held is certain only while the step's own map is in use. So sums by logical
expert are computed at once, on the engine's stream, before the map can change.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.model.load import Phase

_log = structlog.get_logger(__name__)
_MAX_IN_FLIGHT = 8

Deliver = Callable[[NDArray[np.int64]], None]
"""Takes the (L, W) int64 counts of a step."""


class StepCounts:
    """Counts of one rank on their way to the host.

    Args:
        num_logical_experts: E.
    """

    def __init__(self, num_logical_experts: int) -> None:
        self._experts = num_logical_experts
        self._in_flight: deque[tuple[Deliver, Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        self._failures = 0

    def take(self, counts: Tensor, phy2log: Tensor | None, deliver: Deliver) -> None:
        """Take the counts of one step, in the stream that computed them.

        Args:
            counts: (L, W) integer [tokens] - by slot, or by whatever the recorder wants.
            phy2log: (L, W) map of the step, -1 for an empty slot: sums by expert are delivered.
                None delivers the counts as they are.
            deliver: called with the counts once they are on the host, on the engine's thread and in
                the order of the steps.
        """
        if phy2log is None:
            # A copy, because the engine fills its own tensor again in the next step.
            wanted = counts.to(torch.int64, copy=True)
        else:
            wanted = self._sum_by_expert(counts, phy2log)
        if wanted.device.type == "cpu":
            deliver(wanted.numpy())
            return
        if self._free:
            host = self._free.pop()
        else:
            host = torch.empty(wanted.shape, dtype=wanted.dtype, pin_memory=True)
        host.copy_(wanted, non_blocking=True)
        event: Any = torch.Event()
        event.record()
        self._in_flight.append((deliver, host, event))
        self.pick_up(wait=len(self._in_flight) > _MAX_IN_FLIGHT)

    def pick_up(self, *, wait: bool = False) -> None:
        """Deliver the copies that have arrived; with `wait`, wait for the oldest one."""
        while self._in_flight:
            deliver, host, event = self._in_flight[0]
            if wait:
                event.synchronize()
                wait = False
            elif not event.query():
                return
            self._in_flight.popleft()
            deliver(host.numpy().copy())
            self._free.append(host)

    def drain(self) -> None:
        """Wait for every copy in flight and deliver it."""
        while self._in_flight:
            self.pick_up(wait=True)

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


class DeviceRecorder:
    """`Agent.record` for counts on the device: no step waits for them.

    A step is passed on once its copy has arrived, at one of the next calls. At most eight copies
    are pending; only a step beyond them waits, for the oldest. On the host nothing is pending.
    Everything runs on the engine's thread.

    Args:
        record: `record` of the agent.
        num_logical_experts: E.
    """

    def __init__(self, record: Callable[..., None], num_logical_experts: int) -> None:
        self._record = record
        self._counts = StepCounts(num_logical_experts)

    def record(
        self,
        step: int,
        counts: Tensor,
        *,
        epoch: int,
        tokens: int,
        phase: Phase,
        dummy: bool = False,
        compute_s: float | None = None,
        phy2log: Tensor | None = None,
    ) -> None:
        """Record the load of one step; never raises.

        Call it in the stream that computes the step, and before `Agent.step_boundary`. A failure is
        logged as `counting_failed`, and the step is lost.

        Args:
            step, epoch, tokens, phase, dummy, compute_s: see `Agent.record`.
            counts: (L, W) integer tensor [tokens]. The engine may write to it again at once.
            phy2log: (L, W) integer tensor, the map that the step used, -1 for an empty slot. With
                it, `counts` are by slot and become (L, E) counts by logical expert, the shape of
                `CountingSide.SOURCE`. None records the counts as they are.
        """

        def deliver(arrived: NDArray[np.int64]) -> None:
            self._record(
                step,
                arrived,
                epoch=epoch,
                tokens=tokens,
                phase=phase,
                dummy=dummy,
                compute_s=compute_s,
            )

        try:
            self._counts.take(counts, phy2log, deliver)
        except Exception:  # Statistics must not end a step.
            self._counts.failed(step)

    def finish(self) -> None:
        """Wait for the copies in flight and record them, for example before an engine pauses."""
        self._counts.drain()
