"""Sends load reports from the recorder to the controller, and keeps them until acknowledged."""

import asyncio
from collections import deque

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.model.load import CountingSide, LoadReport
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import FlowControl

_MIN_INTERVAL_S = 0.01
"""Least time between reports, whatever the controller asks for."""
_MAX_REPORT_BYTES = 16 << 20
"""Bytes of the counts of a report, 4 for each on the wire. The link carries at most 64 MiB, and a
report that it cannot carry would end every stream on which it is sent."""
_MAX_UNACKNOWLEDGED = 16
"""Reports sent and not acknowledged. Beyond this, steps wait in the recorder, which drops the
oldest."""


class Reporter:
    """Sends recorded steps at the pace the controller asks for; runs on the link's event loop."""

    def __init__(
        self, recorder: Recorder, identity: RankIdentity, side: CountingSide, link: RankLink
    ) -> None:
        self._recorder = recorder
        self._identity = identity
        self._side = side
        self._link = link
        self._most_steps = max(1, _MAX_REPORT_BYTES // (4 * recorder.counts_per_step))
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
                # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives together
                # with the event.
                async with asyncio.timeout(max(self._flow.report_interval_s, _MIN_INTERVAL_S)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def report(self) -> None:
        """Send the steps that wait in the recorder, as far as the controller keeps up."""
        while (
            self._registered
            and self._recorder.waiting
            and len(self._unacknowledged) < _MAX_UNACKNOWLEDGED
        ):
            flow = self._flow
            most = min(flow.max_steps_per_report, self._most_steps)
            taken = self._recorder.take(most, flow.stride, flow.from_step)
            if taken is None:  # The stride leaves all of them out.
                continue
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
        """Start reporting on a new stream; send again what the controller does not have."""
        self._flow = flow
        self._registered = True
        self.acknowledged(highest_step)
        for report in self._unacknowledged:
            self._link.send(report)
        self._wake.set()

    def lost(self) -> None:
        """Stop reporting: there is no stream, and steps wait in the recorder."""
        self._registered = False

    def acknowledged(self, highest_step: int | None) -> None:
        """Forget the reports up to `highest_step`; None acknowledges nothing."""
        if highest_step is None:
            return
        while self._unacknowledged and self._unacknowledged[0].steps["step"][-1] <= highest_step:
            self._unacknowledged.popleft()

    def paced(self, flow: FlowControl) -> None:
        """Take over the report interval and stride the controller asks for."""
        self._flow = flow
        self._wake.set()
