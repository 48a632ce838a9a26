"""The clock of the store, by which all replicas keep the times that outlast their leadership."""

import structlog

from evenkeel_moe.ports.stores import Clock, DeploymentStore

_log = structlog.get_logger(__name__)
_STEP_S = 1.0
"""Smaller differences are not told from the time that an answer takes."""
_SLOW_S = 0.5
"""An answer that took longer says too little about the time."""


class StoreClock:
    """`ports.Clock` whose Unix time is that of the store.

    Freezes, cooldowns and expiries are stored as Unix times. A replica that takes over may have
    another clock than the one that stored them.

    Args:
        clock: of this machine. Its Unix time is used until `follow` finds that the store's differs.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = 0.0
        """Seconds by which the store's clock is ahead of this machine's."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start. They never decrease."""
        return self._clock.monotonic()

    def unix(self) -> float:
        """Return Unix seconds by the clock of the store."""
        return self._clock.unix() + self._ahead_s

    async def follow(self, store: DeploymentStore) -> None:
        """Ask the store for its time.

        Raises:
            Unavailable: it did not answer; the last known difference stays in force.
        """
        began = self.monotonic()
        unix = await store.unix()
        took_s = self.monotonic() - began
        ahead_s = unix + took_s / 2 - self._clock.unix()
        if took_s > _SLOW_S or abs(ahead_s - self._ahead_s) <= _STEP_S:
            return
        self._ahead_s = ahead_s
        _log.warning("store_clock_differs", ahead_s=round(ahead_s, 3))
