"""Reports the progress of staging, a few times a second."""

from collections.abc import Callable

from evenkeel_moe.model.plan import WaveKey

_INTERVAL_S = 0.2


class StagingReports:
    """Passes on the first and the last progress of a wave, and some between.

    Args:
        now: reads the monotonic clock [s].
        receivers: each is called with (wave, bytes staged, bytes to stage), on the transfer thread.
    """

    def __init__(
        self, now: Callable[[], float], *receivers: Callable[[WaveKey, int, int], None] | None
    ) -> None:
        self._now = now
        self._receivers = [one for one in receivers if one is not None]
        self._due: dict[WaveKey, float] = {}
        """The time [s] of the next report between the first and the last of the newest wave."""
        self._told: tuple[WaveKey, int, int] | None = None
        """The newest report."""

    def report(self, wave: WaveKey, done: int, total: int) -> None:
        """Report the bytes staged so far."""
        if self._told == (wave, done, total):
            return  # A rank that receives nothing more goes through the other batches all the same.
        now = self._now()
        if done < total and now < self._due.get(wave, now):
            return
        self._due, self._told = {wave: now + _INTERVAL_S}, (wave, done, total)
        for receive in self._receivers:
            receive(wave, done, total)
