"""Warns if the store may drop records when its memory is short."""

import asyncio

import structlog

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.adapters.redis.client import Client, eviction_policies
from evenkeel_moe.errors import Unavailable

_log = structlog.get_logger(__name__)
_SAFE = "noeviction"
_EVERY_S = 300.0
"""A failover may lead to a server with another policy."""
_RETRY_S = 1.0


class EvictionWatch:
    """Checks the store's eviction policy at the start and now and then; logs each new finding.

    All our records have a time to live, so `volatile-...` policies drop them just as `allkeys-...`
    do. Terms, plans and windows would vanish one by one, as if they had never been written.
    """

    def __init__(self, client: Client, metrics: ControllerMetrics) -> None:
        self._client = client
        self._metrics = metrics
        self._reported: object = ()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            try:
                await self.check()
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(_EVERY_S)

    async def check(self) -> None:
        """Check once.

        Raises:
            Unavailable: the store did not answer; nothing is logged.
        """
        found = await eviction_policies(self._client)
        self._metrics.store_policies(found or ())
        if found == self._reported:
            return
        self._reported = found
        if found is None:
            _log.warning(
                "store_eviction_unknown",
                detail="the store does not tell its maxmemory-policy; grant +info, and see that it"
                " is noeviction",
            )
        elif found != {_SAFE}:
            _log.warning(
                "store_may_evict",
                maxmemory_policy=sorted(found - {_SAFE}),
                detail="short of memory the store would drop plans, terms and windows; set"
                " maxmemory-policy noeviction",
            )
