"""Keeps track of whether the store answers, so that callers need not wait for one timeout each."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.ports.stores import Clock

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)
_RETRY_S = 1.0
_MOST_UNREADABLE = 10_000
"""Unreadable records that are remembered, so that each is told of once."""


class StoreHealth:
    """The state of the store as its callers last saw it."""

    def __init__(self, clock: Clock, metrics: ControllerMetrics) -> None:
        self.fault = ""
        """The last error; empty while the store works."""
        self.has_answered = False
        """True once the store answered a call: its address and credentials are right."""
        self._clock = clock
        self._metrics = metrics
        self._failed_at = float("-inf")
        self._unreadable: set[str] = set()
        metrics.store_degraded(False)

    @property
    def resting(self) -> bool:
        """True shortly after a failure, when another call would only wait for the next timeout."""
        return bool(self.fault) and self._clock.monotonic() - self._failed_at < _RETRY_S

    def failed(self, error: Unavailable) -> None:
        """Note a call that the store did not answer."""
        if not self.fault:
            _log.error("store_lost", error=str(error))
            self._metrics.store_degraded(True)
        self.fault = str(error)
        self._failed_at = self._clock.monotonic()

    def answered(self) -> None:
        """Note an answered call.

        This does not end a fault: a store may answer reads and refuse writes that need replicas.
        """
        self.has_answered = True
        self._metrics.store_answered(self._clock.unix())

    def unreadable(self, kind: str, where: str, why: str) -> None:
        """Note a record that cannot be read: it stays in the store and is not used."""
        if where in self._unreadable or len(self._unreadable) >= _MOST_UNREADABLE:
            return
        self._unreadable.add(where)
        self._metrics.record_unreadable(kind)
        _log.error("record_unreadable", kind=kind, record=where, detail=why[:300])

    def recovered(self) -> None:
        """End the fault: the store's own check passed."""
        if self.fault:
            _log.info("store_back")
            self._metrics.store_degraded(False)
        self.fault = ""
        self.answered()

    def check(self) -> None:
        """Refuse a call that the store would not answer now.

        Raises:
            Unavailable: the store failed a moment ago.
        """
        if self.resting:
            raise self.unreachable()

    def unreachable(self) -> Unavailable:
        """Return the error for a caller who needs the store while it does not answer."""
        return Unavailable(f"the store is out of reach: {self.fault}")

    async def ask(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the store's answer to a call, and note whether there was one.

        Raises:
            Unavailable: the store did not answer, or failed a moment ago and was not asked.
        """
        self.check()
        try:
            answer = await call()
        except Unavailable as error:
            self.failed(error)
            raise
        self.answered()
        return answer
