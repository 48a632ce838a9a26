"""`ports.DeploymentStore` on Redis or Valkey.

Every write but the decision log is a Lua script that compares the writer's term with the highest
term the store has seen: a leader that was paused while another took over can no longer write. Nor
can an earlier write of a leader that arrives late replace a later one.
"""

import asyncio
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

from evenkeel_moe.adapters.redis import scripts
from evenkeel_moe.adapters.redis.client import Client, Timed
from evenkeel_moe.adapters.redis.encoding import (
    DECISION,
    Unreadable,
    UnreadableRecord,
    ignore_unreadable,
    pack_placement,
    pack_plan_maps,
    pack_plan_record,
    pack_story_row,
    unpack_object,
    unpack_placement,
    unpack_plan_id,
    unpack_plan_record,
)
from evenkeel_moe.adapters.redis.leases import RedisLeases
from evenkeel_moe.adapters.redis.records import milliseconds
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.ports.stores import Lease

_PLAN = "plan:"
_PLAN_PARTS = ("plans", "plan_maps", "plan_story")
"""The keys of plan records, of their maps and waves, and of their stories."""
_MAX_DIGITS = 18
"""Digits of an epoch: less than 2**63."""
_WRITTEN_BY_EACH_LEADER = ("leader", "shape")
"""Documents that every leader writes when it begins. Losing them costs nothing, so they wait for no
replica. Otherwise nobody could lead or collect loads while replicas are down."""


class RedisDeploymentStore(RedisLeases):
    """Leases, plans, epochs, documents and decisions.

    Methods raise Unavailable when the store does not answer, and Conflict(LEASE_LOST) when a newer
    term fenced the write; nothing was then written.

    Args:
        client: returned by `adapters.redis.client.connect`.
        leases: another client, for leases alone; None uses the same.
        prefix: first part of every key.
        wait_replicas: replicas that must have a plan, an epoch or a document within `wait_s`. If
            fewer have it, the write raises Unavailable and must be repeated, though the primary
            has it.
        unreadable: told of each record that is skipped because it cannot be read.
        timed: told how long each call took.
    """

    plans_kept = 1000
    epochs_kept = 64
    decisions_kept = 10_000
    """The oldest beyond these numbers are dropped."""
    decision_age_s = 30 * 86_400.0
    """Decisions older than this are dropped."""

    def __init__(
        self,
        client: Client,
        *,
        leases: Client | None = None,
        prefix: str = "evenkeel",
        wait_replicas: int = 0,
        wait_s: float = 1.0,
        unreadable: UnreadableRecord = ignore_unreadable,
        timed: Timed | None = None,
    ) -> None:
        super().__init__(client, leases or client, prefix, unreadable, timed)
        self._wait_replicas = wait_replicas
        self._writer, self._numbers = secrets.token_hex(8), count(1)
        self._wait_s = wait_s
        self._last_plans: dict[DeploymentId, tuple[PlanRecord, list[int]]] = {}
        """The plan record of each deployment that this object wrote last, as far as it is known to
        be stored, and where the rows of its story begin there; none while one is written."""

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Write a plan record: its maps and waves once, and the rows of its story that are new.

        Maps and waves never change and may be large; a wave changes two or three rows.
        """
        plan = record.plan
        last, begins = self._last_plans.pop(plan.deployment, (None, [0]))
        known = None
        if last is not None and last.plan is plan:
            begins = begins[: _same_rows(last, record) + 1]
            known = await self._write_plan(record, term, b"", begins)
        if known is None:
            maps = await asyncio.to_thread(pack_plan_maps, plan)
            known = await self._write_plan(record, term, maps, [0])
        if known is not None and not record.phase.terminal:
            self._last_plans[plan.deployment] = record, known

    async def _write_plan(
        self, record: PlanRecord, term: int, maps: bytes, begins: list[int]
    ) -> list[int] | None:
        """Write a plan record with the end of its story, and its maps if given.

        Args:
            record: of the plan.
            term: of the writer's lease.
            maps: of the plan; empty if the store has them.
            begins: where each row begins in the stored story, up to the first row to write.

        Returns:
            The same for all rows and their end; None if the store lacks maps or rows that it should
            have, and nothing was written.
        """
        plan, still_open = record.plan, int(not record.phase.terminal)
        rows = [*map(pack_story_row, record.story[len(begins) - 1 :])]
        written = await self._write(
            plan.deployment,
            (*_PLAN_PARTS, "plan_order", "plans_open"),
            scripts.STORE_PLAN,
            term,
            _PLAN + plan.plan_id,
            *(plan.plan_id, repr(plan.created_at), pack_plan_record(record)),
            *(self.plans_kept, still_open, _PLAN, maps, begins[-1], b"".join(rows)),
        )
        return [*begins[:-1], *accumulate(map(len, rows), initial=begins[-1])] if written else None

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        self._last_plans.pop(deployment, None)
        await super().release_lease(deployment, lease)

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """Return (id, created_at) of the stored plans, newest first, as many as are read."""
        key = self._key(deployment, "plan_order")
        with self._call("read", "reading the order of plans"):
            found = await self._client.zrevrange(key, 0, -1, withscores=True)
        rows = [(f"{key} {name!r:.80}", (name, created_at)) for name, created_at in found]
        return await self._readable("plan", rows, unpack_plan_id)

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Return the plans that had not ended when they were stored.

        Plans stored by versions that did not keep this list are missing.
        """
        key = self._key(deployment, "plans_open")
        with self._call("read", "reading which plans are open"):
            names = await self._client.hkeys(key)
        rows = [(f"{key} {name!r:.80}", (name, 0.0)) for name in names]
        return sorted(name for name, _ in await self._readable("plan", rows, unpack_plan_id))

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        """Return these plans in this order, without those that are missing or unreadable."""
        if not plan_ids:
            return []
        keys = [self._key(deployment, name) for name in _PLAN_PARTS]
        with self._call("read", "reading plans"):
            found = await self._eval(scripts.READ_PLANS, keys, *plan_ids)
        stored = [
            (f"{keys[0]} {name}", (name, *parts))
            for name, parts in zip(plan_ids, found, strict=True)
            if parts[0] is not None
        ]
        return await self._readable("plan", stored, partial(_plan_of, deployment))

    async def store_epoch(
        self,
        deployment: DeploymentId,
        epoch: Epoch,
        placement: Placement,
        term: int,
        begins_history: bool = False,
    ) -> None:
        """Record a committed placement under its epoch; set aside epochs of another history."""
        body = await asyncio.to_thread(pack_placement, placement)
        values = ("epochs", epoch, body, self.epochs_kept, int(begins_history))
        names = ("epochs", "replaced_epochs")
        await self._write(deployment, names, scripts.STORE_EPOCH, term, *values)

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Return the recorded placements by epoch."""
        key = self._key(deployment, "epochs")
        with self._call("read", "reading epochs"):
            rows = await self._client.hgetall(key)
        return dict(sorted(await self._epochs_of(key, rows.items())))

    async def fetch_replaced_epochs(
        self, deployment: DeploymentId
    ) -> Sequence[tuple[Epoch, Placement]]:
        """Return the epochs that another history replaced, the last replaced first."""
        key = self._key(deployment, "replaced_epochs")
        with self._call("read", "reading replaced epochs"):
            rows = await self._client.lrange(key, 0, -1)
        return await self._epochs_of(key, [row.partition(b" ")[::2] for row in rows])

    async def _epochs_of(
        self, key: str, rows: Iterable[tuple[bytes, bytes]]
    ) -> list[tuple[Epoch, Placement]]:
        """Return the epochs and placements that can be read."""
        stored = [(f"{key} {row[0]!r:.80}", row) for row in rows]
        return await self._readable("epoch", stored, _epoch_of)

    async def store_document(
        self,
        deployment: DeploymentId,
        name: str,
        body: Mapping[str, Any],
        term: int,
        lasting: bool = True,
    ) -> None:
        """Write a small named JSON document."""
        replicas = 0 if name in _WRITTEN_BY_EACH_LEADER else self._wait_replicas
        await self._write(
            deployment,
            ("documents",),
            scripts.STORE_DOCUMENT,
            term,
            *(f"document:{name}", name, json.dumps(body)),
            replicas=replicas,
            lasting=lasting,
        )

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        """Return a named document; None when it is missing or unreadable."""
        key = self._key(deployment, "documents")
        with self._call("read", "reading a document"):
            body = await self._client.hget(key, name)
        stored = [] if body is None else [(f"{key} {name}", body)]
        return next(iter(await self._readable("document", stored, unpack_object)), None)

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Add a row to the decision log, which is bounded by count and age."""
        key, body = self._key(deployment, "decisions"), json.dumps(decision)
        bounds = (self.decisions_kept, milliseconds(self.decision_age_s))
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
            found = await self._client.xrevrange(key, count=limit)
        rows = [(f"{key} {entry.decode(errors='replace')}", fields) for entry, fields in found]
        return await self._readable("decision", rows, _decision_of)

    async def unix(self) -> float:
        """Return Unix seconds by the server's clock; in a Cluster, by that of one primary."""
        with self._call("read", "reading the time"):
            seconds, microseconds = await self._eval(scripts.TIME, [f"{self._prefix}:probe"])
        return float(int(seconds) + int(microseconds) / 1e6)

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

    async def _write(
        self,
        deployment: DeploymentId,
        names: tuple[str, ...],
        script: str,
        term: int,
        record: str,
        *values: object,
        replicas: int | None = None,
        lasting: bool = True,
    ) -> bool:
        """Run a fenced write; return False if the script found that something it needs is missing.

        Args:
            deployment: its owner.
            names: the keys of the script after the first two.
            script: one that begins with the fence.
            term: of the writer's lease.
            record: the name under which the store keeps the number of the last write.
            values: of the script.
            replicas: that must have it; None is the number for all that must not be lost.
            lasting: as in the writer's lease.

        Raises:
            Conflict: a newer term fenced it.
            Unavailable: it is unknown if anything was written, or too few replicas have it.
        """
        replicas = self._wait_replicas if replicas is None else replicas
        keys = [self._key(deployment, name) for name in ("term", "written", *names)]
        values = (term, record, self._writer, next(self._numbers), *values, self._age_ms(lasting))
        with self._call("write", f"writing {names[0]}"):
            if replicas:
                newer, copies = await self._eval_and_wait(replicas, script, keys, *values)
            else:
                newer, copies = await self._eval(script, keys, *values), 0
        if newer > 0:
            raise Conflict(
                f"{deployment}: term {newer} has taken over from term {term}",
                Reason.LEASE_LOST,
            )
        if copies < replicas:
            raise Unavailable(
                f"writing {names[0]}: {copies} of {replicas} replicas have it after"
                f" {self._wait_s:g} s"
            )
        return newer == 0

    async def _eval_and_wait(
        self, replicas: int, script: str, keys: list[str], *values: object
    ) -> tuple[int, int]:
        """Return the script's answer and the number of replicas that have what it wrote.

        Both commands use one connection, because WAIT counts only what its own connection wrote.
        """

        pipe = self._client.pipeline(transaction=False)
        pipe.eval(script, len(keys), *keys, *values)
        pipe.execute_command("WAIT", replicas, milliseconds(self._wait_s))
        answer, copies = await pipe.execute()
        return int(answer), int(copies)


def _same_rows(one: PlanRecord, other: PlanRecord) -> int:
    """Return how many rows the stories of two records have in common at their begin."""
    pairs = enumerate(zip(one.story, other.story, strict=False))
    differs = (number for number, (row, its) in pairs if row is not its)
    return next(differs, min(len(one.story), len(other.story)))


def _plan_of(
    deployment: DeploymentId,
    stored: tuple[PlanId, bytes, bytes | None, bytes | None],
) -> PlanRecord:
    plan_id, small, maps, story = stored
    if maps is None or story is None:
        raise Unreadable("its maps or its story are missing")
    record = unpack_plan_record(small, maps, story)
    plan = record.plan
    if (plan.deployment, plan.plan_id) != (deployment, plan_id):
        raise Unreadable(f"it is plan {plan.plan_id:.80} of {plan.deployment:.80}")
    return record


def _epoch_of(stored: tuple[bytes, bytes]) -> tuple[Epoch, Placement]:
    name, body = stored
    if not (name.isdigit() and len(name) <= _MAX_DIGITS):
        raise Unreadable("the name is no epoch")
    return Epoch(int(name)), unpack_placement(body)


def _decision_of(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    return unpack_object(fields.get(b"d", b""), DECISION)
