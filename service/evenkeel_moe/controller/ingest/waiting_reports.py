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
"""Most bytes that wait for all ranks of a group, and in all incomplete groups together. After an
outage every rank sends its whole ring before the last rank is back."""

ReportAnswer = Callable[[ReportAck], None]


class WaitingReport(NamedTuple):
    """A report and the function that answers its rank."""

    report: LoadReport
    answer: ReportAnswer

    @property
    def num_bytes(self) -> int:
        """Bytes of its counts and its table of steps."""
        return self.report.counts.nbytes + self.report.steps.nbytes


class IncompleteGroups:
    """Bounds the reports that wait in all groups of which some ranks are missing.

    The memory of such a group is not counted by its shape, because any client can declare one.
    """

    def __init__(self) -> None:
        self.groups: set[WaitingReports] = set()
        """Those whose reports count."""

    def make_room(self) -> None:
        """Drop reports of the group with the most bytes while there are too many.

        So a group that floods costs the others nothing.
        """
        while sum(group.num_bytes for group in self.groups) > _MAX_BYTES:
            max(self.groups, key=lambda group: group.num_bytes).drop_one()


class WaitingReports:
    """A bounded queue of reports for each rank.

    Args:
        dropped: called with each report that gives way to another one, and with an explanation.
        incomplete: bounds the group together with others while some of its ranks are missing.
    """

    def __init__(
        self, dropped: Callable[[WaitingReport, str], None], incomplete: IncompleteGroups
    ) -> None:
        self._dropped = dropped
        self._incomplete = incomplete
        self._queues: dict[EpRank, deque[WaitingReport]] = {}
        self._bytes: Counter[EpRank] = Counter()
        self.begin_incomplete()

    def begin_incomplete(self) -> None:
        """Bound the reports together with those of other groups: some ranks are not known."""
        self._most_bytes = _MAX_BYTES
        self._incomplete.groups.add(self)

    def begin_complete(self, most_bytes: int) -> None:
        """Bound the reports by what the group's shape can need: all ranks are known."""
        self._most_bytes = min(most_bytes, _MAX_BYTES)
        self._incomplete.groups.discard(self)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait for all ranks."""
        return self._bytes.total()

    def close(self) -> None:
        """Drop all reports without an answer: the deployment ends."""
        self._incomplete.groups.discard(self)
        self._queues.clear()
        self._bytes.clear()

    def add(self, report: LoadReport, answer: ReportAnswer) -> None:
        """Add a report; others may give way to it."""
        queue = self._queues.setdefault(report.rank, deque())
        queue.append(waiting := WaitingReport(report, answer))
        self._bytes[report.rank] += waiting.num_bytes
        if len(queue) > _MAX_REPORTS:
            self._drop_oldest(report.rank)
        # A single report of a group always stays.
        while self.num_bytes > self._most_bytes and sum(map(len, self._queues.values())) > 1:
            self.drop_one()
        self._incomplete.make_room()

    def take_all(self) -> Iterator[WaitingReport]:
        """Empty all queues; yield their reports, rank by rank."""
        queues, self._queues = self._queues, {}
        self._bytes.clear()
        for queue in queues.values():
            yield from queue

    def drop_one(self) -> None:
        """Drop the oldest report of the rank with the most bytes.

        So large reports of one rank cost the others nothing.
        """
        self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def _drop_oldest(self, rank: EpRank) -> None:
        queue = self._queues[rank]
        detail = (
            f"rank {rank}: no placement known for {len(queue)} reports of {self._bytes[rank]} bytes"
        )
        dropped = queue.popleft()
        self._bytes[rank] -= dropped.num_bytes
        self._dropped(dropped, detail)
