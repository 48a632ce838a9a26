"""Load reports from the ring to the controller, kept until they are acknowledged."""

import asyncio
from collections import deque

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.model.load import CountingSide, LoadReport
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import FlowControl

__all__ = ["Reporter"]

_MAX_UNACKNOWLEDGED = 16
"""Reports sent and not acknowledged; beyond, steps wait in the ring and the oldest are dropped there."""


class Reporter:
    """Takes recorded steps at the pace the controller asks for; lives on the link's event loop."""

    def __init__(
        self, recorder: Recorder, identity: RankIdentity, side: CountingSide, link: RankLink
    ) -> None:
        self._recorder = recorder
        self._identity = identity
        self._side = side
        self._link = link
        self._flow = FlowControl(report_interval_s=0.5)
        self._unacknowledged: deque[LoadReport] = deque()
        self._registered = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self.report()
            self._wake.clear()
            try:
                # Not `wait_for`: before Python 3.12 it forgets a cancellation that comes together with the wake.
                async with asyncio.timeout(self._flow.report_interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def report(self) -> None:
        """Send what waits in the ring, as far as the controller keeps up."""
        while self._registered and len(self._unacknowledged) < _MAX_UNACKNOWLEDGED:
            flow = self._flow
            taken = self._recorder.take(flow.max_steps_per_report, flow.stride, flow.from_step)
            if taken is None:
                return
            report = LoadReport(
                self._identity.deployment,
                self._identity.generation,
                self._identity.rank,
                self._identity.incarnation,
                self._side,
                taken.steps,
                taken.counts,
                taken.dropped_steps,
            )
            if len(taken.steps):
                self._unacknowledged.append(report)
            self._link.send(report)

    def registered(self, flow: FlowControl, highest_step: int | None) -> None:
        """A stream is open: send again what the controller does not have."""
        self._flow = flow
        self._registered = True
        self.acknowledged(highest_step)
        for report in self._unacknowledged:
            self._link.send(report)
        self._wake.set()

    def lost(self) -> None:
        """No stream: steps wait in the ring."""
        self._registered = False

    def acknowledged(self, highest_step: int | None) -> None:
        """The controller has every step up to `highest_step`; None says nothing."""
        if highest_step is None:
            return
        while self._unacknowledged and self._unacknowledged[0].steps["step"][-1] <= highest_step:
            self._unacknowledged.popleft()

    def paced(self, flow: FlowControl) -> None:
        """The controller wants another rate or stride."""
        self._flow = flow
        self._wake.set()
