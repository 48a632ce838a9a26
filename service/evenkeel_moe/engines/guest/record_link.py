"""Records a rank's loads to files in a folder, in place of sending them to a controller."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_link import LinkListener
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats.recording import RecordedLoad, write_recorded
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.wire.link import (
    FlowControl,
    FromRankLink,
    Registration,
    RegistrationOutcome,
    ReportAck,
)

_log = structlog.get_logger(__name__)
_STREAM = 1
_REPORT_INTERVAL_S = 0.5
_FILE_STEPS = 512
"""Steps of a file."""
_FILE_S = 5.0
"""Seconds after which a file is written, also with fewer steps."""


class RecordLink:
    """A `RankLink` that writes the reports of its rank to files.

    Args:
        folder: made if it is missing.
        keep_steps: beyond this, the oldest files of this start are removed.
        clock: returns seconds.
        unix: returns the Unix time; None: the system's clock.
    """

    def __init__(
        self,
        folder: Path,
        keep_steps: int,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] | None = None,
    ) -> None:
        self._folder = folder
        self._keep_steps = keep_steps
        self._clock = clock
        self._start_unix = (unix or SystemClock().unix)()
        self._listener: LinkListener | None = None
        self._hello: Hello | None = None
        self._reports: list[LoadReport] = []
        """Those with steps that wait for the next file."""
        self._waiting = 0
        """Their steps."""
        self._began_s = 0.0
        self._files: deque[tuple[Path, int]] = deque()

    async def run(self, listener: LinkListener) -> None:
        """Accept the rank as a controller would; it gets no plans."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._listener, self._hello = listener, listener.hello()
        self._began_s = self._clock()
        flow = FlowControl(report_interval_s=_REPORT_INTERVAL_S)
        hour = 3600.0
        accepted = RegistrationOutcome.OBSERVE_ONLY
        listener.received(_STREAM, Registration(accepted, hour, hour, flow))
        _log.info("recording", folder=str(self._folder), keep_steps=self._keep_steps)
        await asyncio.Event().wait()

    def send(self, message: FromRankLink, stream: int | None = None) -> None:
        """Keep the steps of a report; other messages have no receiver."""
        del stream
        if not isinstance(message, LoadReport) or self._listener is None:
            return
        if len(message.steps):
            self._reports.append(message)
            self._waiting += len(message.steps)
        late = self._clock() - self._began_s >= _FILE_S
        if self._waiting >= _FILE_STEPS or late:
            self._write()
        self._listener.received(_STREAM, ReportAck(message.last_step))

    async def finish(self, message: FromRankLink) -> None:
        """Write the steps that wait: the rank stops."""
        del message
        self._write()

    def _write(self) -> None:
        """Write what waits to a file; what cannot be written is lost, and logged."""
        reports, self._reports, self._waiting = self._reports, [], 0
        if self._hello is None or not reports:
            return
        self._began_s = self._clock()
        steps = np.concatenate([report.steps["step"] for report in reports]).astype(np.int64)
        counts = np.concatenate([report.counts for report in reports]).astype(np.int64)
        shape, newest = self._hello.shape, reports[-1]
        rank, began = int(newest.rank), self._start_unix
        load = RecordedLoad(rank, shape.num_ranks, shape.top_k, steps, counts, began)
        try:
            path = write_recorded(self._folder, str(newest.generation), load)
        except InvalidInput as error:
            _log.error("recording_failed", steps=len(steps), detail=str(error))
            return
        self._files.append((path, len(steps)))
        while len(self._files) > 1 and sum(n for _, n in self._files) > self._keep_steps:
            self._files.popleft()[0].unlink(missing_ok=True)
