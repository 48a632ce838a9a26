"""Slows the ranks' reports down: for many ranks at once, and while this replica is behind."""

from dataclasses import replace

from evenkeel_moe.wire.link import FlowControl

_BEHIND_S = 0.25
"""Lag of the event loop that counts as behind. Ranks do not notice a few hundred milliseconds."""
_IDLE_S = 0.05
_SLOWER_AFTER = 4
"""Samples behind in a row: a single long garbage collection must not slow the ranks down."""
_FASTER_AFTER = 40
"""Samples idle in a row: speeding up too soon would make the pace swing."""
_INTERVAL_LEVELS = 3
"""Levels that only make reports rarer and larger, which costs nothing but delay. Levels above
leave steps out."""
_LEVELS = 7


class Pacer:
    """Chooses the pace of reports from the number of ranks and the lag of the event loop.

    Level 0 is the pace of the settings. Each level doubles the report interval, and from the fourth
    on the stride. Most of a message's cost does not depend on its length, so many ranks send longer
    messages from the start.

    Args:
        flow: the pace of the settings.
        max_reports_per_s: reports of all ranks above which they become rarer.
    """

    def __init__(self, flow: FlowControl, max_reports_per_s: float) -> None:
        self._base = flow
        self._max_reports_per_s = max_reports_per_s
        self._behind = 0
        self._idle = 0
        self.level = 0

    @property
    def flow(self) -> FlowControl:
        """The flow control of this level; each deployment sets `from_step` itself."""
        longer, sparser = min(self.level, _INTERVAL_LEVELS), max(0, self.level - _INTERVAL_LEVELS)
        return replace(
            self._base,
            report_interval_s=self._base.report_interval_s * 2**longer,
            stride=self._base.stride * 2**sparser,
        )

    def sample(self, lag_s: float, ranks: int) -> bool:
        """Take one measurement of the event loop's lag; return True if the level changed.

        Args:
            lag_s: time by which the event loop was late.
            ranks: number of ranks that report to this replica.
        """
        before = self.level
        self._follow_lag(lag_s, self._level_for(ranks))
        return self.level != before

    def _level_for(self, ranks: int) -> int:
        """Return the lowest level for so many ranks; none that leaves steps out."""
        per_s = ranks / self._base.report_interval_s
        levels = range(_INTERVAL_LEVELS)
        return next((n for n in levels if per_s <= self._max_reports_per_s * 2**n), len(levels))

    def _follow_lag(self, lag_s: float, lowest: int) -> None:
        if self.level < lowest:
            self.level = lowest
        self._behind = self._behind + 1 if lag_s >= _BEHIND_S else 0
        self._idle = self._idle + 1 if lag_s <= _IDLE_S else 0
        if self._behind >= _SLOWER_AFTER and self.level < _LEVELS - 1:
            self.level, self._behind = self.level + 1, 0
        elif self._idle >= _FASTER_AFTER and self.level > lowest:
            self.level, self._idle = self.level - 1, 0
