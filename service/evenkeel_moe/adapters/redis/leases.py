"""The leases of `RedisDeploymentStore`, and the list of deployments that were led.

A deployment is new until the ranks of its group were all here. The store keeps no records of it
then, is not asked to list it, and drops its leadership after a short time.
"""

import time
from collections.abc import Sequence
from typing import Any

from evenkeel_moe.adapters.redis import scripts
from evenkeel_moe.adapters.redis.client import Client, Timed
from evenkeel_moe.adapters.redis.encoding import UnreadableRecord, unpack_deployment_id
from evenkeel_moe.adapters.redis.records import RedisRecords, milliseconds
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.stores import Lease

NEW_AGE_S = 3600.0
"""Age at which the leadership of a deployment without records is dropped. Replicas that restart
while a group gathers must find it: ranks that know a term that no store knows look like ranks of a
store that lost its data."""
_UNDER_A_LEASE = ("term", "written", "documents")
"""The records of a deployment that is not lasting."""
_ASIDE = ":unreadable"
"""Appended to the key of a damaged lease that was set aside; the newest one stays."""
_ASIDE_S = 30 * 86_400.0
"""Age at which it is dropped."""
_LISTINGS_PER_AGE = 100
"""Times per record age that a deployment is listed again while it is led."""

_RECORDS = (
    "term",
    "written",
    "plans",
    "plan_maps",
    "plan_story",
    "plan_order",
    "plans_open",
    "epochs",
    "replaced_epochs",
    "documents",
)


class RedisLeases(RedisRecords):
    """Takes, renews and releases leases.

    Args:
        client, prefix, unreadable, timed: as in `RedisRecords`.
        leases: another client, for leases alone: a renewal waits for no other call.
    """

    record_age_s = 90 * 86_400.0
    """Records of a deployment that nobody has led for this long are dropped."""

    def __init__(
        self,
        client: Client,
        leases: Client,
        prefix: str,
        unreadable: UnreadableRecord,
        timed: Timed | None,
    ) -> None:
        super().__init__(client, prefix, unreadable, timed)
        self._leases: Any = leases
        self._listed_at: dict[DeploymentId, float] = {}
        """Time at which each deployment led through this store was last listed."""

    @property
    def _seen(self) -> str:
        return f"{self._prefix}:seen"

    def _age_ms(self, lasting: bool) -> int:
        return milliseconds(self.record_age_s if lasting else NEW_AGE_S)

    async def _eval(
        self, script: str, keys: Sequence[str], *values: object, client: Any = None
    ) -> Any:
        return await (client or self._client).eval(script, len(keys), *keys, *values)

    async def acquire_lease(
        self,
        deployment: DeploymentId,
        holder: str,
        ttl_s: float,
        at_least_term: int,
        lasting: bool = True,
    ) -> Lease:
        """Take the lease if it is free, expired or the same holder's; return the winner's lease."""
        names = ("lease", "term", "documents", "plans", "epochs")
        keys = [self._key(deployment, name) for name in names]
        values = (
            holder,
            milliseconds(ttl_s),
            at_least_term,
            *(self._age_ms(True), self._age_ms(False)),
            int(lasting),
            milliseconds(_ASIDE_S),
        )
        with self._call("lease", "acquiring a lease"):
            self._listed_at.pop(deployment, None)
            found = await self._eval(
                scripts.ACQUIRE, [*keys, keys[0] + _ASIDE], *values, client=self._leases
            )
            winner, term, kept, wrong = found
            if wrong:
                self._unreadable("lease", keys[0], wrong.decode(errors="replace"))
            if kept:
                await self._list(deployment)
        return Lease(winner.decode(errors="replace"), int(term), bool(kept))

    async def _list(self, deployment: DeploymentId) -> None:
        """Add a deployment to those that `deployments` returns, for as long as records are kept."""
        await self._eval(
            scripts.SEE,
            [self._seen],
            deployment,
            round(self.record_age_s),
            client=self._leases,
        )

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease; return False when it is no longer ours."""
        records = _RECORDS if lease.lasting else _UNDER_A_LEASE
        keys = [self._key(deployment, name) for name in ("lease", *records)]
        values = (lease.holder, lease.term, milliseconds(ttl_s), self._age_ms(lease.lasting))
        with self._call("lease", "renewing a lease"):
            now, listed_at = time.monotonic(), self._listed_at.get(deployment)
            due = listed_at is None or now - listed_at >= self.record_age_s / _LISTINGS_PER_AGE
            if due and lease.lasting:
                await self._list(deployment)
                self._listed_at[deployment] = now
            return bool(await self._eval(scripts.RENEW, keys, *values, client=self._leases))

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        await self._release(deployment, lease)

    async def drop_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Delete a lease that is not lasting, if it is still ours, and all written under it."""
        await self._release(deployment, lease, *_UNDER_A_LEASE)

    async def _release(self, deployment: DeploymentId, lease: Lease, *records: str) -> None:
        self._listed_at.pop(deployment, None)
        keys = [self._key(deployment, name) for name in ("lease", *records)]
        with self._call("lease", "releasing a lease"):
            values = (lease.holder, lease.term)
            await self._eval(scripts.RELEASE, keys, *values, client=self._leases)

    async def has_records(self, deployment: DeploymentId) -> bool:
        """Return True if the ranks of a deployment were ever all here: an epoch is recorded."""
        key = self._key(deployment, "epochs")
        with self._call("read", "looking for records"):
            return bool(await self._client.exists(key))

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Return the current leader's lease; None while nobody leads."""
        key = self._key(deployment, "lease")
        with self._call("lease", "reading a lease"):
            holder, term = await self._client.hmget(key, "holder", "term")
        if holder is None or term is None:
            return None
        try:
            return Lease(holder.decode(), int(term))
        except ValueError as error:
            self._unreadable("lease", key, str(error))
            return None

    async def unlist(self, deployment: DeploymentId) -> None:
        """Omit a deployment from `deployments` until it is led again; its records stay."""
        with self._call("write", "taking a deployment off the list"):
            await self._client.zrem(self._seen, deployment)

    async def deployments(self) -> Sequence[DeploymentId]:
        """Return every deployment with a record here, without those that were unlisted."""
        with self._call("read", "listing deployments"):
            names = await self._client.zrevrange(self._seen, 0, -1)
        rows = [(f"{self._seen} {name!r:.80}", name) for name in names]
        return sorted(await self._readable("deployment", rows, unpack_deployment_id))
