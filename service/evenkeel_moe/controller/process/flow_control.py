"""Slower reports while this replica cannot keep up, and the old pace again when it can."""

from dataclasses import replace

from evenkeel_moe.wire.link import FlowControl

__all__ = ["Pacer"]

_BEHIND_S = 0.25
"""Lag of the event loop from which it is behind; ranks notice nothing of a few hundred milliseconds."""
_IDLE_S = 0.05
_SLOWER_AFTER = 4
"""Samples behind in a row, so that one long garbage collection slows nobody down."""
_FASTER_AFTER = 40
"""Samples idle in a row: going back too soon would swing."""
_LONGER = 3
"""Levels that only make reports rarer and larger, which costs nothing but delay; those above leave steps out."""
_LEVELS = 7


class Pacer:
    """Level 0 is the pace of the settings; each level doubles the interval, from the fourth on the stride.

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
        """What ranks are told at this level; `from_step` is each deployment's own."""
        longer, sparser = min(self.level, _LONGER), max(0, self.level - _LONGER)
        return replace(
            self._base,
            report_interval_s=self._base.report_interval_s * 2**longer,
            stride=self._base.stride * 2**sparser,
        )

    def sample(self, lag_s: float) -> bool:
        """Take one measurement of how late the event loop is; whether the pace changed."""
        self._behind = self._behind + 1 if lag_s >= _BEHIND_S else 0
        self._idle = self._idle + 1 if lag_s <= _IDLE_S else 0
        if self._behind >= _SLOWER_AFTER and self.level < _LEVELS - 1:
            self.level, self._behind = self.level + 1, 0
            return True
        if self._idle >= _FASTER_AFTER and self.level > 0:
            self.level, self._idle = self.level - 1, 0
            return True
        return False
