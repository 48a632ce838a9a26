"""`ports.DeploymentStore` on Redis or Valkey.

Every write but the decision log is a Lua script that compares the writer's term with the highest
term the store has seen: a leader that was paused while another took over can no longer write. Nor
can an earlier write of a leader that arrives late replace a later one.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from evenkeel_moe.adapters.redis import scripts
from evenkeel_moe.adapters.redis.client import Client, deployment_key, store_errors
from evenkeel_moe.adapters.redis.encoding import (
    Unreadable,
    pack_placement,
    pack_plan,
    unpack_placement,
    unpack_plan,
)
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.ports import Lease

_LISTINGS_PER_AGE = 100
"""Times per record age that a deployment is listed again while it is led."""

_RECORDS = ("term", "written", "plans", "plan_order", "plans_open", "epochs", "documents")
_PLAN = "plan:"
_WRITTEN_BY_EACH_LEADER = ("leader", "shape")
"""Documents that every leader writes when it begins. Losing them costs nothing, so they wait for no
replica. Otherwise nobody could lead or collect loads while replicas are down."""


class _Write(NamedTuple):
    """A fenced write."""

    deployment: DeploymentId
    record: str
    """The name under which the store keeps the number of the last write."""
    script: str
    names: tuple[str, ...]
    """The keys of the script after the first two."""


class RedisDeploymentStore:
    """Leases, plans, epochs, documents and decisions.

    Methods raise Unavailable when the store does not answer, and Conflict(LEASE_LOST) when a newer
    term fenced the write; nothing was then written.

    Args:
        client: returned by `adapters.redis.client.connect`.
        prefix: first part of every key.
        plans_kept, epochs_kept, decisions_kept: the oldest beyond these numbers are dropped.
        decision_age_s: decisions older than this are dropped.
        record_age_s: records of a deployment that nobody has led for this long are dropped.
        wait_replicas: replicas that must have a plan, an epoch or a document within `wait_s`. If
            fewer have it, the write raises Unavailable and must be repeated, though the primary
            has it.
    """

    def __init__(
        self,
        client: Client,
        *,
        prefix: str = "evenkeel",
        plans_kept: int = 1000,
        epochs_kept: int = 64,
        decisions_kept: int = 10_000,
        decision_age_s: float = 30 * 86_400.0,
        record_age_s: float = 90 * 86_400.0,
        wait_replicas: int = 0,
        wait_s: float = 1.0,
    ) -> None:
        self._client: Any = client  # The clients share their commands but no typed base.
        self._prefix = prefix
        self._plans_kept = plans_kept
        self._epochs_kept = epochs_kept
        self._decisions_kept = decisions_kept
        self._decision_age_s = decision_age_s
        self._record_age_s = record_age_s
        self._record_age_ms = _milliseconds(record_age_s)
        self._wait_replicas = wait_replicas
        self._writer, self._numbers = secrets.token_hex(8), count(1)
        self._wait_s = wait_s
        self._listed_at: dict[DeploymentId, float] = {}
        """Time at which each deployment led through this store was last listed."""

    @property
    def _seen(self) -> str:
        return f"{self._prefix}:seen"

    def _key(self, deployment: DeploymentId, name: str) -> str:
        return deployment_key(self._prefix, deployment, name)

    async def _eval(self, script: str, keys: Sequence[str], *values: object) -> Any:
        return await self._client.eval(script, len(keys), *keys, *values)

    async def acquire_lease(
        self, deployment: DeploymentId, holder: str, ttl_s: float, at_least_term: int
    ) -> Lease:
        """Take the lease if it is free, expired or the same holder's; return the winner's lease."""
        keys = [self._key(deployment, name) for name in ("lease", "term")]
        values = (holder, _milliseconds(ttl_s), at_least_term, self._record_age_ms)
        with store_errors("acquiring a lease"):
            await self._list(deployment)
            self._listed_at.pop(deployment, None)
            winner, term = await self._eval(scripts.ACQUIRE, keys, *values)
        return Lease(winner.decode(), int(term))

    async def _list(self, deployment: DeploymentId) -> None:
        """Add a deployment to those that `deployments` returns, for as long as records are kept."""
        await self._eval(scripts.SEE, [self._seen], deployment, round(self._record_age_s))

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease; return False when it is no longer ours."""
        keys = [self._key(deployment, name) for name in ("lease", *_RECORDS)]
        values = (lease.holder, lease.term, _milliseconds(ttl_s), self._record_age_ms)
        with store_errors("renewing a lease"):
            now, listed_at = time.monotonic(), self._listed_at.get(deployment)
            if listed_at is None or now - listed_at >= self._record_age_s / _LISTINGS_PER_AGE:
                await self._list(deployment)
                self._listed_at[deployment] = now
            return bool(await self._eval(scripts.RENEW, keys, *values))

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        self._listed_at.pop(deployment, None)
        key = self._key(deployment, "lease")
        with store_errors("releasing a lease"):
            await self._eval(scripts.RELEASE, [key], lease.holder, lease.term)

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Return the current leader's lease; None while nobody leads."""
        key = self._key(deployment, "lease")
        with store_errors("reading a lease"):
            holder, term = await self._client.hmget(key, ["holder", "term"])
        return None if holder is None or term is None else Lease(holder.decode(), int(term))

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Write one whole plan record."""
        plan, body = record.plan, pack_plan(record)
        names, still_open = ("plans", "plan_order", "plans_open"), int(not record.phase.terminal)
        values = (plan.plan_id, repr(plan.created_at), body, self._plans_kept, still_open, _PLAN)
        write = _Write(plan.deployment, _PLAN + plan.plan_id, scripts.STORE_PLAN, names)
        await self._write(write, term, values, self._wait_replicas)

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """Return (id, created_at) of every stored plan, newest first."""
        key = self._key(deployment, "plan_order")
        with store_errors("reading the order of plans"):
            rows = await self._client.zrevrange(key, 0, -1, withscores=True)
        return [(PlanId(name.decode()), float(created_at)) for name, created_at in rows]

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Return the plans that had not ended when they were stored.

        Plans stored by versions that did not keep this list are missing.
        """
        with store_errors("reading which plans are open"):
            names = await self._client.hkeys(self._key(deployment, "plans_open"))
        return sorted(PlanId(name.decode()) for name in names)

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        """Return these plans in this order, without those that are missing or unreadable."""
        if not plan_ids:
            return []
        with store_errors("reading plans"):
            found = await self._client.hmget(self._key(deployment, "plans"), list(plan_ids))
        # In a thread, so that leases are renewed meanwhile: a large plan takes milliseconds.
        plans = await asyncio.to_thread(lambda: [_readable_plan(body) for body in found])
        return [record for record in plans if record is not None]

    async def store_epoch(
        self, deployment: DeploymentId, epoch: Epoch, placement: Placement, term: int
    ) -> None:
        """Record a committed placement under its epoch; drop recorded epochs above it."""
        values = (epoch, pack_placement(placement), self._epochs_kept)
        write = _Write(deployment, "epochs", scripts.STORE_EPOCH, ("epochs",))
        await self._write(write, term, values, self._wait_replicas)

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Return the recorded placements by epoch, as many as are kept."""
        with store_errors("reading epochs"):
            found = await self._client.hgetall(self._key(deployment, "epochs"))
        epochs: dict[Epoch, Placement] = {}
        for epoch, body in sorted(found.items(), key=lambda item: int(item[0])):
            try:
                epochs[Epoch(int(epoch))] = unpack_placement(body)
            except Unreadable:
                continue
        return epochs

    async def store_document(
        self, deployment: DeploymentId, name: str, body: Mapping[str, Any], term: int
    ) -> None:
        """Write a small named JSON document."""
        values = (name, json.dumps(body))
        replicas = 0 if name in _WRITTEN_BY_EACH_LEADER else self._wait_replicas
        write = _Write(deployment, f"document:{name}", scripts.STORE_DOCUMENT, ("documents",))
        await self._write(write, term, values, replicas)

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        """Return a named document; None when it is missing or unreadable."""
        with store_errors("reading a document"):
            body = await self._client.hget(self._key(deployment, "documents"), name)
        document = None if body is None else _readable_json(body)
        return document if isinstance(document, dict) else None

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Add a row to the decision log, which is bounded by count and age."""
        key, body = self._key(deployment, "decisions"), json.dumps(decision)
        bounds = (self._decisions_kept, _milliseconds(self._decision_age_s))
        with store_errors("appending a decision"):
            await self._eval(scripts.APPEND_DECISION, [key], body, *bounds)

    async def fetch_decisions(
        self, deployment: DeploymentId, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return the newest rows of the decision log, newest first."""
        if limit < 1:
            return []
        with store_errors("reading decisions"):
            rows = await self._client.xrevrange(self._key(deployment, "decisions"), count=limit)
        decisions = (_readable_json(fields.get(b"d", b"")) for _, fields in rows)
        return [row for row in decisions if isinstance(row, dict)]

    async def unlist(self, deployment: DeploymentId) -> None:
        """Omit a deployment from `deployments` until it is led again; its records stay."""
        with store_errors("taking a deployment off the list"):
            await self._client.zrem(self._seen, deployment)

    async def deployments(self) -> Sequence[DeploymentId]:
        """Return every deployment with a record here, without those that were unlisted."""
        with store_errors("listing deployments"):
            names = await self._client.zrange(self._seen, 0, -1)
        return sorted(DeploymentId(name.decode()) for name in names)

    async def ping(self) -> None:
        """Raise Unavailable unless the store takes a write, on as many replicas as a plan needs."""
        wanted, key = self._wait_replicas, f"{self._prefix}:probe"
        with store_errors("ping"):
            if not wanted:
                await self._eval(scripts.PROBE, [key])
                return
            _, copies = await self._eval_and_wait(wanted, scripts.PROBE, [key])
        if copies < wanted:
            raise Unavailable(
                f"ping: {copies} of {wanted} replicas have a write after {self._wait_s:g} s"
            )

    async def _write(
        self, write: _Write, term: int, values: tuple[object, ...], replicas: int
    ) -> None:
        names = write.names
        keys = [self._key(write.deployment, name) for name in ("term", "written", *names)]
        number = next(self._numbers)
        values = (term, write.record, self._writer, number, *values, self._record_age_ms)
        with store_errors(f"writing {names[0]}"):
            if replicas:
                newer, copies = await self._eval_and_wait(replicas, write.script, keys, *values)
            else:
                newer, copies = await self._eval(write.script, keys, *values), 0
        if newer:
            raise Conflict(
                f"{write.deployment}: term {newer} has taken over from term {term}",
                Reason.LEASE_LOST,
            )
        if copies < replicas:
            raise Unavailable(
                f"writing {names[0]}: {copies} of {replicas} replicas have it after"
                f" {self._wait_s:g} s"
            )

    async def _eval_and_wait(
        self, replicas: int, script: str, keys: list[str], *values: object
    ) -> tuple[int, int]:
        """Return the script's answer and the number of replicas that have what it wrote.

        Both commands use one connection, because WAIT counts only what its own connection wrote.
        """
        pipe = self._client.pipeline(transaction=False)
        pipe.eval(script, len(keys), *keys, *values)
        pipe.execute_command("WAIT", replicas, _milliseconds(self._wait_s))
        answer, copies = await pipe.execute()
        return int(answer), int(copies)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _readable_plan(body: bytes | None) -> PlanRecord | None:
    try:
        return None if body is None else unpack_plan(body)
    except Unreadable:
        return None


def _readable_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
