"""Reports that wait until the placement they were counted under is known."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.wire.link import ReportAck

_MAX_REPORTS = 64
"""Most reports that wait for one rank."""
_MAX_BYTES = 256 << 20
"""Most bytes that wait for all ranks together, whatever their shape. After an outage every rank
sends its whole ring before the last rank is back."""

ReportAnswer = Callable[[ReportAck], None]


class WaitingReport(NamedTuple):
    """A report and the function that answers its rank."""

    report: LoadReport
    answer: ReportAnswer


class WaitingReports:
    """A bounded queue of reports for each rank."""

    def __init__(self) -> None:
        self.most_bytes = _MAX_BYTES
        """Most bytes that wait for all ranks together; at most `_MAX_BYTES` are used."""
        self._queues: dict[EpRank, deque[WaitingReport]] = {}
        self._bytes: Counter[EpRank] = Counter()

    def add(self, report: LoadReport, answer: ReportAnswer) -> Iterator[tuple[WaitingReport, str]]:
        """Add a report; yield each report that gave way to it, with an explanation."""
        queue = self._queues.setdefault(report.rank, deque())
        queue.append(WaitingReport(report, answer))
        self._bytes[report.rank] += report.counts.nbytes
        if len(queue) > _MAX_REPORTS:
            yield self._drop_oldest(report.rank)
        most = min(self.most_bytes, _MAX_BYTES)
        # The rank with the most bytes gives way, so that large reports of one rank cost the others
        # nothing. A single report always stays.
        while self._bytes.total() > most and sum(map(len, self._queues.values())) > 1:
            yield self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def take_all(self) -> Iterator[WaitingReport]:
        """Empty all queues; yield their reports, rank by rank."""
        queues, self._queues = self._queues, {}
        self._bytes.clear()
        for queue in queues.values():
            yield from queue

    def _drop_oldest(self, rank: EpRank) -> tuple[WaitingReport, str]:
        queue = self._queues[rank]
        detail = (
            f"rank {rank}: no placement known for {len(queue)} reports of {self._bytes[rank]} bytes"
        )
        dropped = queue.popleft()
        self._bytes[rank] -= dropped.report.counts.nbytes
        return dropped, detail
