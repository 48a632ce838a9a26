"""Whether the store may drop records by itself when its memory is short: said in the log and as a metric."""

import asyncio

import structlog

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.adapters.redis.client import Client, eviction_policies
from evenkeel_moe.errors import Unavailable

__all__ = ["EvictionWatch"]

_log = structlog.get_logger(__name__)
_SAFE = "noeviction"
_EVERY_S = 300.0
"""A failover may lead to a server with another policy."""
_RETRY_S = 1.0


class EvictionWatch:
    """Looks at the start and now and then; warns when what it sees is new and not safe.

    All our records carry a time to live, so `volatile-...` policies drop them as readily as `allkeys-...` do: terms, plans
    and windows would be gone one by one, which looks like a store that was never written.
    """

    def __init__(self, client: Client, metrics: ControllerMetrics) -> None:
        self._client = client
        self._metrics = metrics
        self._told: object = ()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self.look()
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(_EVERY_S)

    async def look(self) -> None:
        """Ask once.

        Raises:
            Unavailable: no answer; nothing is said.
        """
        found = await eviction_policies(self._client)
        self._metrics.store_policies(found or ())
        if found == self._told:
            return
        self._told = found
        if found is None:
            _log.warning(
                "store_eviction_unknown",
                detail="the store does not tell its maxmemory-policy; grant +info, and see that it is noeviction",
            )
        elif found != {_SAFE}:
            _log.warning(
                "store_may_evict",
                maxmemory_policy=sorted(found - {_SAFE}),
                detail="short of memory the store would drop plans, terms and windows; set maxmemory-policy noeviction",
            )
