"""`ports.DeploymentStore` on Redis or Valkey.

Every write but the decision log is one Lua script that compares the writer's term with the highest term
the store has seen: a leader that was paused while another took over cannot write any more. Nor does an earlier
write of one leader, late by a path that lost it, replace a later one.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

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

__all__ = ["RedisDeploymentStore"]

_LISTED_AGAIN = 100
"""Times within the age of records that a deployment is put on the list again while it is led."""

# KEYS: lease, term. ARGV: holder, ttl in ms, least term to be above, age of records in ms.
_ACQUIRE = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'term')
if held[1] and held[1] ~= ARGV[1] then return {held[1], held[2]} end
local term = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
local text = string.format('%.0f', term)
redis.call('SET', KEYS[2], text)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'term', text)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {ARGV[1], text}
"""

# KEYS: lease, then every record. ARGV: holder, term, ttl in ms, age of records in ms. Records live on while
# somebody leads, and are gone some time after the last one did.
_RENEW = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'term')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for record = 2, #KEYS do redis.call('PEXPIRE', KEYS[record], ARGV[4]) end
return 1
"""

# KEYS: deployments by when they were last seen. ARGV: deployment, age in s.
_SEE = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 1000)
return 1
"""

# KEYS: lease. ARGV: holder, term.
_RELEASE = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'term')
if held[1] == ARGV[1] and held[2] == ARGV[2] then redis.call('DEL', KEYS[1]) end
return 1
"""

# Every fenced write begins with this. KEYS: term, last writes. ARGV: the writer's term, record, writer, number of the write,
# and as the last one the age of records in ms.
# A flushed store knows no term and takes the writer's. A write that arrives after a later one of its own writer, by a
# connection that was given up, is outdated: the writer went on without it.
_FENCE = """
local known = tonumber(redis.call('GET', KEYS[1]) or '0')
if known > tonumber(ARGV[1]) then return known end
if known < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
local writer, number = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%S+) (%d+)$')
if writer == ARGV[3] and tonumber(number) > tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
"""

# And ends with this: what is written lives on from the first write, for a name may never be led long enough to be renewed.
_KEEP = """
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[#ARGV]) end
return 0
"""

# KEYS from 3: plans, order, open. ARGV from 5: plan id, created at, body, plans kept, whether it has not ended, what its
# record is called without the id.
_STORE_PLAN = (
    _FENCE
    + """
redis.call('HSET', KEYS[3], ARGV[5], ARGV[7])
redis.call('ZADD', KEYS[4], ARGV[6], ARGV[5])
if ARGV[9] == '1' then redis.call('HSET', KEYS[5], ARGV[5], 1) else redis.call('HDEL', KEYS[5], ARGV[5]) end
local excess = redis.call('ZCARD', KEYS[4]) - tonumber(ARGV[8])
if excess > 0 then
  for _, old in ipairs(redis.call('ZRANGE', KEYS[4], 0, excess - 1)) do
    redis.call('HDEL', KEYS[3], old)
    redis.call('ZREM', KEYS[4], old)
    redis.call('HDEL', KEYS[5], old)
    redis.call('HDEL', KEYS[2], ARGV[10] .. old)
  end
end
"""
    + _KEEP
)

# KEYS from 3: epochs. ARGV from 5: epoch, body, epochs kept. Epochs above the written one are of a history
# that did not happen.
_STORE_EPOCH = (
    _FENCE
    + """
local kept = tonumber(ARGV[5]) - tonumber(ARGV[7])
for _, epoch in ipairs(redis.call('HKEYS', KEYS[3])) do
  if tonumber(epoch) > tonumber(ARGV[5]) or tonumber(epoch) <= kept then redis.call('HDEL', KEYS[3], epoch) end
end
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
"""
    + _KEEP
)

# KEYS from 3: documents. ARGV from 5: name, body.
_STORE_DOCUMENT = (
    _FENCE
    + """
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
"""
    + _KEEP
)

# KEYS: a key that nobody reads. A store that takes no writes answers reads all the same, and WAIT counts the replicas that
# have what its connection wrote.
_PROBE = """
redis.call('SET', KEYS[1], 1, 'PX', 60000)
return 0
"""

# KEYS: decisions. ARGV: body, rows kept, age in ms.
_APPEND_DECISION = """
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'd', ARGV[1])
local now = redis.call('TIME')
local oldest = tonumber(now[1]) * 1000 - tonumber(ARGV[3])
if oldest > 0 then redis.call('XTRIM', KEYS[1], 'MINID', '~', string.format('%.0f', oldest)) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


_RECORDS = ("term", "written", "plans", "plan_order", "plans_open", "epochs", "documents")
_PLAN = "plan:"
_WRITTEN_ANEW = ("leader", "shape")
"""Documents that every leader writes when it begins: nothing is lost with them, so they wait for no replica. Otherwise
nobody could lead, or count, where replicas are away."""


class RedisDeploymentStore:
    """Leases, plans, epochs, documents and decisions.

    Methods raise Unavailable when the store does not answer, and Conflict(LEASE_LOST) when a newer term
    fenced the write; nothing was then written.

    Args:
        client: connected by `redis_client.connect`.
        prefix: first part of every key.
        plans_kept, epochs_kept, decisions_kept: the oldest give way beyond these.
        decision_age_s: decisions older than this are dropped.
        record_age_s: records of a deployment nobody has led for this long are dropped.
        wait_replicas: replicas that must have a plan, an epoch or a document within `wait_s`; else the write raises
            Unavailable, though the primary has it, and is to be tried again.
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
        self._wait_replicas = wait_replicas
        self._writer, self._numbers = secrets.token_hex(8), count(1)
        self._wait_s = wait_s
        self._listed_at: dict[DeploymentId, float] = {}
        """When those led through this store were last named in the list."""

    @property
    def _seen(self) -> str:
        return f"{self._prefix}:seen"

    def _key(self, deployment: DeploymentId, name: str) -> str:
        return deployment_key(self._prefix, deployment, name)

    async def acquire_lease(
        self, deployment: DeploymentId, holder: str, ttl_s: float, at_least_term: int
    ) -> Lease:
        """Take the lease if it is free, expired or the same holder's; the reply is the winner."""
        with store_errors("acquiring a lease"):
            await self._list(deployment)
            self._listed_at.pop(deployment, None)
            keys = (self._key(deployment, "lease"), self._key(deployment, "term"))
            winner, term = await self._client.eval(
                _ACQUIRE,
                2,
                *keys,
                holder,
                _milliseconds(ttl_s),
                at_least_term,
                _milliseconds(self._record_age_s),
            )
        return Lease(winner.decode(), int(term))

    async def _list(self, deployment: DeploymentId) -> None:
        """Have `deployments` name it, for as long as records are kept."""
        await self._client.eval(_SEE, 1, self._seen, deployment, round(self._record_age_s))

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease; False when it is no longer ours."""
        with store_errors("renewing a lease"):
            now = time.monotonic()
            if (
                now - self._listed_at.get(deployment, float("-inf"))
                >= self._record_age_s / _LISTED_AGAIN
            ):
                await self._list(deployment)
                self._listed_at[deployment] = now
            keys = [self._key(deployment, name) for name in ("lease", *_RECORDS)]
            answer = await self._client.eval(
                _RENEW,
                len(keys),
                *keys,
                lease.holder,
                lease.term,
                _milliseconds(ttl_s),
                _milliseconds(self._record_age_s),
            )
        return bool(answer)

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        self._listed_at.pop(deployment, None)
        with store_errors("releasing a lease"):
            await self._client.eval(
                _RELEASE, 1, self._key(deployment, "lease"), lease.holder, lease.term
            )

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Who leads; None while nobody does."""
        with store_errors("reading a lease"):
            holder, term = await self._client.hmget(
                self._key(deployment, "lease"), ["holder", "term"]
            )
        return None if holder is None or term is None else Lease(holder.decode(), int(term))

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Write one plan record whole."""
        plan = record.plan
        names, still_open = ("plans", "plan_order", "plans_open"), int(not record.phase.terminal)
        body = pack_plan(record)
        values = (plan.plan_id, repr(plan.created_at), body, self._plans_kept, still_open, _PLAN)
        record_name, replicas = _PLAN + plan.plan_id, self._wait_replicas
        await self._write(plan.deployment, record_name, _STORE_PLAN, names, term, values, replicas)

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """(id, created_at) of every stored plan, newest first."""
        with store_errors("reading the order of plans"):
            rows = await self._client.zrevrange(
                self._key(deployment, "plan_order"), 0, -1, withscores=True
            )
        return [(PlanId(name.decode()), float(created_at)) for name, created_at in rows]

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Plans that had not ended when they were stored; those stored before this was noted are missing."""
        with store_errors("reading which plans are open"):
            names = await self._client.hkeys(self._key(deployment, "plans_open"))
        return sorted(PlanId(name.decode()) for name in names)

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        """Those plans in that order, without those that are not stored or cannot be read."""
        if not plan_ids:
            return []
        with store_errors("reading plans"):
            found = await self._client.hmget(self._key(deployment, "plans"), list(plan_ids))
        # Milliseconds each for a large model: leases are renewed meanwhile.
        plans = await asyncio.to_thread(lambda: [_readable_plan(body) for body in found])
        return [record for record in plans if record is not None]

    async def store_epoch(
        self, deployment: DeploymentId, epoch: Epoch, placement: Placement, term: int
    ) -> None:
        """Record a committed placement under its epoch; recorded epochs above it are dropped."""
        values = (epoch, pack_placement(placement), self._epochs_kept)
        replicas = self._wait_replicas
        await self._write(deployment, "epochs", _STORE_EPOCH, ("epochs",), term, values, replicas)

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Recorded placements by epoch, as many as are kept."""
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
        replicas = 0 if name in _WRITTEN_ANEW else self._wait_replicas
        record_name = f"document:{name}"
        await self._write(
            deployment, record_name, _STORE_DOCUMENT, ("documents",), term, values, replicas
        )

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        """Read a named document."""
        with store_errors("reading a document"):
            body = await self._client.hget(self._key(deployment, "documents"), name)
        document = None if body is None else _readable_json(body)
        return document if isinstance(document, dict) else None

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Add a row to the decision log, bounded by count and age."""
        with store_errors("appending a decision"):
            await self._client.eval(
                _APPEND_DECISION,
                1,
                self._key(deployment, "decisions"),
                json.dumps(decision),
                self._decisions_kept,
                _milliseconds(self._decision_age_s),
            )

    async def fetch_decisions(
        self, deployment: DeploymentId, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Decision rows, newest first."""
        if limit < 1:
            return []
        with store_errors("reading decisions"):
            rows = await self._client.xrevrange(self._key(deployment, "decisions"), count=limit)
        decisions = (_readable_json(fields.get(b"d", b"")) for _, fields in rows)
        return [row for row in decisions if isinstance(row, dict)]

    async def unlist(self, deployment: DeploymentId) -> None:
        """Leave a deployment out of `deployments` until it is led again; its records stay."""
        with store_errors("taking a deployment off the list"):
            await self._client.zrem(self._seen, deployment)

    async def deployments(self) -> Sequence[DeploymentId]:
        """Every deployment with a record here, but those taken off the list."""
        with store_errors("listing deployments"):
            names = await self._client.zrange(self._seen, 0, -1)
        return sorted(DeploymentId(name.decode()) for name in names)

    async def ping(self) -> None:
        """Raise Unavailable unless the store takes a write, on as many replicas as a plan needs."""
        wanted, key = self._wait_replicas, f"{self._prefix}:probe"
        with store_errors("ping"):
            if not wanted:
                await self._client.eval(_PROBE, 1, key)
                return
            _, copies = await self._eval_and_wait(wanted, _PROBE, [key])
        if copies < wanted:
            raise Unavailable(
                f"ping: {copies} of {wanted} replicas have a write after {self._wait_s:g} s"
            )

    async def _write(
        self,
        deployment: DeploymentId,
        record: str,
        script: str,
        names: tuple[str, ...],
        term: int,
        values: tuple[object, ...],
        replicas: int,
    ) -> None:
        keys = [self._key(deployment, name) for name in ("term", "written", *names)]
        age_ms = _milliseconds(self._record_age_s)
        values = (term, record, self._writer, next(self._numbers), *values, age_ms)
        with store_errors(f"writing {names[0]}"):
            if replicas:
                newer, copies = await self._eval_and_wait(replicas, script, keys, *values)
            else:
                newer, copies = await self._client.eval(script, len(keys), *keys, *values), 0
        if newer:
            raise Conflict(
                f"{deployment}: term {newer} has taken over from term {term}", Reason.LEASE_LOST
            )
        if copies < replicas:
            raise Unavailable(
                f"writing {names[0]}: {copies} of {replicas} replicas have it after {self._wait_s:g} s"
            )

    async def _eval_and_wait(
        self, replicas: int, script: str, keys: list[str], *values: object
    ) -> tuple[int, int]:
        """What the script answers, and how many replicas have what it wrote. WAIT speaks of its own connection only."""
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
