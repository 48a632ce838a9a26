"""Deployments that this replica does not lead: who does, as the store has it."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from evenkeel_moe.controller.deployment.action_executor import StoreHealth
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports import DeploymentStore, LedElsewhere

__all__ = ["Elsewhere"]

_T = TypeVar("_T")
_AT_ONCE = 16
"""Names looked up at a time."""


class Elsewhere:
    """Where to send who asks for what only a leader knows.

    Args:
        replica_id: this replica; a lease it has while it reads the records is nobody's yet.
    """

    def __init__(self, store: DeploymentStore, health: StoreHealth, replica_id: str) -> None:
        self._store = store
        self._health = health
        self._replica_id = replica_id

    async def leader(self, deployment: DeploymentId) -> LedElsewhere | None:
        """Who leads; None for a deployment that nobody led, or that the last leader let go of.

        Raises:
            Unavailable: the store is out of reach.
        """
        return await self._asked(lambda: self._fetch(deployment))

    async def _fetch(self, deployment: DeploymentId) -> LedElsewhere | None:
        last = await self._store.fetch_document(deployment, "leader") or {}
        lease = await self._store.fetch_lease(deployment)
        if lease is None and not last.get("replica_id"):
            return None
        if lease is None or lease.holder == self._replica_id:
            return LedElsewhere(deployment, None, None)
        address = str(last["address"]) if last.get("replica_id") == lease.holder else None
        return LedElsewhere(deployment, lease.holder, address)

    async def all(
        self, led_here: Collection[DeploymentId], known_here: Collection[DeploymentId]
    ) -> Sequence[LedElsewhere]:
        """Those that others lead or whose records are out of reach, and of those known here those that nobody leads; all
        known here while the store is away."""
        here = {*known_here} - {*led_here}
        try:
            names = {*await self._asked(self._store.deployments), *here} - {*led_here}
        except Unavailable:
            return [LedElsewhere(name, None, None) for name in sorted(here)]
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def look(name: DeploymentId) -> LedElsewhere | None:
            nobody = LedElsewhere(name, None, None)
            async with at_once:
                try:
                    led = await self._fetch(name)
                except Unavailable:  # Its shard alone may be away.
                    return nobody
            return None if led == nobody and name not in here else led

        return [led for led in await asyncio.gather(*map(look, sorted(names))) if led is not None]

    async def _asked(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """What the store answers, unless it failed a moment ago."""
        if self._health.resting:
            raise Unavailable(f"the store is out of reach: {self._health.fault}")
        try:
            return await ask()
        except Unavailable as error:
            self._health.failed(error)
            raise
