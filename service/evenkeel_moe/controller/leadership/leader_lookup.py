"""Finds the leaders of the deployments that this replica does not lead."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import LedElsewhere
from evenkeel_moe.ports.stores import DeploymentStore

_CONCURRENT = 16
"""Deployments looked up at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class LeaderLookup:
    """Tells which replica leads a deployment, as far as the store knows.

    Args:
        replica_id: this replica. A lease it holds while it still reads the records counts as
            nobody's.
    """

    store: DeploymentStore
    health: StoreHealth
    replica_id: str

    async def leader(self, deployment: DeploymentId) -> LedElsewhere | None:
        """Return who leads; None if nobody ever led the deployment or its leader let it go.

        Raises:
            Unavailable: the store is out of reach.
        """
        return await self.health.ask(lambda: self._fetch(deployment))

    async def _fetch(self, deployment: DeploymentId) -> LedElsewhere | None:
        last = await self.store.fetch_document(deployment, "leader") or {}
        lease = await self.store.fetch_lease(deployment)
        if lease is None and not last.get("replica_id"):
            return None
        if lease is None or lease.holder == self.replica_id:
            return LedElsewhere(deployment, None, None)
        address = str(last.get("address", "")) if last.get("replica_id") == lease.holder else None
        return LedElsewhere(deployment, lease.holder, address)

    async def all(
        self, led_here: Collection[DeploymentId], known_here: Collection[DeploymentId]
    ) -> Sequence[LedElsewhere]:
        """Return the deployments that this replica does not lead.

        These are the ones that other replicas lead, those whose records are out of reach, and those
        known here that nobody leads. While the store is away, all that are known here.
        """
        here = {*known_here} - {*led_here}
        try:
            names = {*await self.health.ask(self.store.deployments), *here} - {*led_here}
        except Unavailable:
            return [LedElsewhere(name, None, None) for name in sorted(here)]
        slots = asyncio.Semaphore(_CONCURRENT)

        async def look(name: DeploymentId) -> LedElsewhere | None:
            nobody = LedElsewhere(name, None, None)
            async with slots:
                try:
                    led = await self._fetch(name)
                except Unavailable:  # Perhaps only the shard of this deployment is away.
                    return nobody
            return None if led == nobody and name not in here else led

        return [led for led in await asyncio.gather(*map(look, sorted(names))) if led is not None]
