"""Slows the ranks' reports down while this replica cannot keep up with them."""

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
    """Chooses the pace of reports from the lag of the event loop.

    Level 0 is the pace of the settings. Each level doubles the report interval, and from the fourth
    on the stride.

    Args:
        flow: the pace of the settings.
    """

    def __init__(self, flow: FlowControl) -> None:
        self._base = flow
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

    def sample(self, lag_s: float) -> bool:
        """Take one measurement of the event loop's lag; return True if the level changed."""
        self._behind = self._behind + 1 if lag_s >= _BEHIND_S else 0
        self._idle = self._idle + 1 if lag_s <= _IDLE_S else 0
        if self._behind >= _SLOWER_AFTER and self.level < _LEVELS - 1:
            self.level, self._behind = self.level + 1, 0
            return True
        if self._idle >= _FASTER_AFTER and self.level > 0:
            self.level, self._idle = self.level - 1, 0
            return True
        return False
