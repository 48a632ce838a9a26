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
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from evenkeel_moe.adapters.redis import scripts, stored_values
from evenkeel_moe.adapters.redis.client import Client, Timed, deployment_key, timed_call
from evenkeel_moe.adapters.redis.encoding import (
    Unreadable,
    UnreadableRecord,
    ignore_unreadable,
    pack_off_loop,
    pack_placement,
    pack_plan,
    unpack_placement,
    unpack_plan,
)
from evenkeel_moe.adapters.redis.wrong_types import WrongTypes
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.ports import Lease
from evenkeel_moe.wire.values import is_deployment_id

_LISTINGS_PER_AGE = 100
"""Times per record age that a deployment is listed again while it is led."""

_RECORDS = ("term", "written", "plans", "plan_order", "plans_open", "epochs", "documents")
_PLAN = "plan:"
_MAX_DIGITS = 18
"""Digits of an epoch: less than 2**63."""
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
        unreadable: told of each record that is skipped because it cannot be read.
        timed: told how long each call took.
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
        unreadable: UnreadableRecord = ignore_unreadable,
        timed: Timed | None = None,
    ) -> None:
        self._client: Any = client  # The clients share their commands but no typed base.
        self._unreadable = unreadable
        self._call = partial(timed_call, timed)
        self._types = WrongTypes(client, unreadable)
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
        client = self._client
        return await self._types.run(keys, lambda: client.eval(script, len(keys), *keys, *values))

    async def acquire_lease(
        self, deployment: DeploymentId, holder: str, ttl_s: float, at_least_term: int
    ) -> Lease:
        """Take the lease if it is free, expired or the same holder's; return the winner's lease."""
        keys = [self._key(deployment, name) for name in ("lease", "term")]
        values = (holder, _milliseconds(ttl_s), at_least_term, self._record_age_ms)
        with self._call("lease", "acquiring a lease"):
            await self._list(deployment)
            self._listed_at.pop(deployment, None)
            winner, term = await self._eval(scripts.ACQUIRE, keys, *values)
        return Lease(winner.decode(errors="replace"), int(term))

    async def _list(self, deployment: DeploymentId) -> None:
        """Add a deployment to those that `deployments` returns, for as long as records are kept."""
        await self._eval(scripts.SEE, [self._seen], deployment, round(self._record_age_s))

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease; return False when it is no longer ours."""
        keys = [self._key(deployment, name) for name in ("lease", *_RECORDS)]
        values = (lease.holder, lease.term, _milliseconds(ttl_s), self._record_age_ms)
        with self._call("lease", "renewing a lease"):
            now, listed_at = time.monotonic(), self._listed_at.get(deployment)
            if listed_at is None or now - listed_at >= self._record_age_s / _LISTINGS_PER_AGE:
                await self._list(deployment)
                self._listed_at[deployment] = now
            return bool(await self._eval(scripts.RENEW, keys, *values))

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        self._listed_at.pop(deployment, None)
        key = self._key(deployment, "lease")
        with self._call("lease", "releasing a lease"):
            await self._eval(scripts.RELEASE, [key], lease.holder, lease.term)

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Return the current leader's lease; None while nobody leads."""
        key = self._key(deployment, "lease")
        with self._call("lease", "reading a lease"):
            holder, term = await self._types.run(
                [key], lambda: self._client.hmget(key, ["holder", "term"])
            )
        if holder is None or term is None:
            return None
        try:
            return Lease(holder.decode(), int(term))
        except ValueError as error:
            self._unreadable("lease", key, str(error))
            return None

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Write one whole plan record."""
        plan = record.plan
        body = await pack_off_loop(pack_plan, record, plan.target)
        names, still_open = ("plans", "plan_order", "plans_open"), int(not record.phase.terminal)
        values = (plan.plan_id, repr(plan.created_at), body, self._plans_kept, still_open, _PLAN)
        write = _Write(plan.deployment, _PLAN + plan.plan_id, scripts.STORE_PLAN, names)
        await self._write(write, term, values, self._wait_replicas)

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """Return (id, created_at) of every stored plan, newest first."""
        key = self._key(deployment, "plan_order")
        with self._call("read", "reading the order of plans"):
            rows = await self._types.run(
                [key], lambda: self._client.zrevrange(key, 0, -1, withscores=True)
            )
        known = ((self._name("plan", key, name), created_at) for name, created_at in rows)
        return [(PlanId(name), created_at) for name, created_at in known if name is not None]

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Return the plans that had not ended when they were stored.

        Plans stored by versions that did not keep this list are missing.
        """
        key = self._key(deployment, "plans_open")
        with self._call("read", "reading which plans are open"):
            names = await self._types.run([key], lambda: self._client.hkeys(key))
        known = (self._name("plan", key, name) for name in names)
        return sorted(PlanId(name) for name in known if name is not None)

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        """Return these plans in this order, without those that are missing or unreadable."""
        if not plan_ids:
            return []
        key = self._key(deployment, "plans")
        with self._call("read", "reading plans"):
            found = await self._types.run([key], lambda: self._client.hmget(key, list(plan_ids)))
        stored = [
            (name, body) for name, body in zip(plan_ids, found, strict=True) if body is not None
        ]
        # In a thread, so that leases are renewed meanwhile: a large plan takes milliseconds.
        plans = await asyncio.to_thread(
            lambda: [_plan_or_fault(deployment, name, body) for name, body in stored]
        )
        for (name, _), plan in zip(stored, plans, strict=True):
            if isinstance(plan, Unreadable):
                self._unreadable("plan", f"{key} {name}", str(plan))
        return [plan for plan in plans if not isinstance(plan, Unreadable)]

    async def store_epoch(
        self, deployment: DeploymentId, epoch: Epoch, placement: Placement, term: int
    ) -> None:
        """Record a committed placement under its epoch; drop recorded epochs above it."""
        body = await pack_off_loop(pack_placement, placement, placement)
        values = (epoch, body, self._epochs_kept)
        write = _Write(deployment, "epochs", scripts.STORE_EPOCH, ("epochs",))
        await self._write(write, term, values, self._wait_replicas)

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Return the recorded placements by epoch, as many as are kept."""
        key = self._key(deployment, "epochs")
        with self._call("read", "reading epochs"):
            found = await self._types.run([key], lambda: self._client.hgetall(key))
        epochs: dict[Epoch, Placement] = {}
        for name, body in found.items():
            try:
                epochs[_epoch_of(name)] = unpack_placement(body)
            except Unreadable as error:
                self._unreadable("epoch", f"{key} {name!r:.80}", str(error))
        return dict(sorted(epochs.items()))

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
        key = self._key(deployment, "documents")
        with self._call("read", "reading a document"):
            body = await self._types.run([key], lambda: self._client.hget(key, name))
        return None if body is None else self._object("document", f"{key} {name}", body)

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Add a row to the decision log, which is bounded by count and age."""
        key, body = self._key(deployment, "decisions"), json.dumps(decision)
        bounds = (self._decisions_kept, _milliseconds(self._decision_age_s))
        with self._call("write", "appending a decision"):
            await self._eval(scripts.APPEND_DECISION, [key], body, *bounds)

    async def fetch_decisions(
        self, deployment: DeploymentId, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return the newest rows of the decision log, newest first."""
        if limit < 1:
            return []
        key = self._key(deployment, "decisions")
        with self._call("read", "reading decisions"):
            found = await self._types.run([key], lambda: self._client.xrevrange(key, count=limit))
        decisions = []
        for entry, fields in found:
            where = f"{key} {entry.decode(errors='replace')}"
            row = self._object("decision", where, fields.get(b"d", b""))
            try:
                stored_values.numbers({} if row is None else row.get("numbers", {}))
            except ValueError as error:
                self._unreadable("decision", where, str(error))
                continue
            if row is not None:
                decisions.append(row)
        return decisions

    async def unlist(self, deployment: DeploymentId) -> None:
        """Omit a deployment from `deployments` until it is led again; its records stay."""
        with self._call("write", "taking a deployment off the list"):
            await self._types.run([self._seen], lambda: self._client.zrem(self._seen, deployment))

    async def deployments(self) -> Sequence[DeploymentId]:
        """Return every deployment with a record here, without those that were unlisted."""
        with self._call("read", "listing deployments"):
            found = await self._types.run(
                [self._seen], lambda: self._client.zrange(self._seen, 0, -1)
            )
        names = [(self._name("deployment", self._seen, name) or "", name) for name in found]
        for name, raw in names:
            if name and not is_deployment_id(name):
                self._unreadable("deployment", f"{self._seen} {raw!r:.80}", "it is no name")
        return sorted(DeploymentId(name) for name, _ in names if is_deployment_id(name))

    async def ping(self) -> None:
        """Raise Unavailable unless the store takes a write, on as many replicas as a plan needs."""
        wanted, key = self._wait_replicas, f"{self._prefix}:probe"
        with self._call("ping", "ping"):
            if not wanted:
                await self._eval(scripts.PROBE, [key])
                return
            _, copies = await self._eval_and_wait(wanted, scripts.PROBE, [key])
        if copies < wanted:
            raise Unavailable(
                f"ping: {copies} of {wanted} replicas have a write after {self._wait_s:g} s"
            )

    def _name(self, kind: str, key: str, name: bytes) -> str | None:
        """Return a name of the store; None if it is not UTF-8."""
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            self._unreadable(kind, f"{key} {name!r:.80}", str(error))
            return None

    def _object(self, kind: str, where: str, body: bytes) -> dict[str, Any] | None:
        """Return a stored JSON object; None if it is unreadable."""
        try:
            return stored_values.mapping(stored_values.parse_json(body))
        except ValueError as error:
            self._unreadable(kind, where, str(error))
            return None

    async def _write(
        self, write: _Write, term: int, values: tuple[object, ...], replicas: int
    ) -> None:
        names = write.names
        keys = [self._key(write.deployment, name) for name in ("term", "written", *names)]
        number = next(self._numbers)
        values = (term, write.record, self._writer, number, *values, self._record_age_ms)
        with self._call("write", f"writing {names[0]}"):
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

        async def write() -> list[Any]:
            pipe = self._client.pipeline(transaction=False)
            pipe.eval(script, len(keys), *keys, *values)
            pipe.execute_command("WAIT", replicas, _milliseconds(self._wait_s))
            found: list[Any] = await pipe.execute()
            return found

        answer, copies = await self._types.run(keys, write)
        return int(answer), int(copies)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _plan_or_fault(
    deployment: DeploymentId, plan_id: PlanId, body: bytes
) -> PlanRecord | Unreadable:
    try:
        record = unpack_plan(body)
    except Unreadable as error:
        return error
    plan = record.plan
    if (plan.deployment, plan.plan_id) != (deployment, plan_id):
        return Unreadable(f"it is plan {plan.plan_id:.80} of {plan.deployment:.80}")
    return record


def _epoch_of(name: bytes) -> Epoch:
    if not name.isdigit() or len(name) > _MAX_DIGITS:
        raise Unreadable("the name is no epoch")
    return Epoch(int(name))
