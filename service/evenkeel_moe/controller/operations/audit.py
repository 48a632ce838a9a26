"""Records who asked for which change, in memory and in the store."""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from evenkeel_moe.controller.logs import audit_line
from evenkeel_moe.controller.operations.stored_rows import Row, StoredRows
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import AuditEntry
from evenkeel_moe.ports.stores import Clock, DeploymentStore

_IN_MEMORY = 1024
"""Changes of all deployments on this replica."""
_STORED = 256
"""Changes of one deployment: about 60 kB, and 120 kB if all of them change the policy."""
_REFUSED_PART = 4
"""One refused request is kept for so many changes."""
_REFUSED = 400
"""The lowest status of a request that changed nothing."""

_FORM = {
    "at": float | int,
    "id": str,
    "deployment": str | None,
    "by": str,
    "role": str,
    "method": str,
    "path": str,
    "status": int,
    "idempotency_key": str | None,
    "trace_id": str | None,
    "change": str | None,
}
"""The type of each field of a row; a row of an older version may lack the last three."""


class AuditLog:
    """The newest audit rows.

    Each row is also a log line `audit`: where logs are collected, rows outlive the limits here.
    """

    def __init__(self, store: DeploymentStore, health: StoreHealth, clock: Clock) -> None:
        self._stored = StoredRows(store, health, "audit", _STORED + _STORED // _REFUSED_PART, _FORM)
        self._health = health
        self._clock = clock
        self._changes: deque[Row] = deque(maxlen=_IN_MEMORY)
        self._refused: deque[Row] = deque(maxlen=_IN_MEMORY // _REFUSED_PART)

    async def record(self, entry: AuditEntry, term: int | None) -> None:
        """Keep a row.

        Args:
            entry: the request and its answer.
            term: the term to store the row under; None keeps it only in memory, because the request
                named no deployment, or one that this replica does not lead.
        """
        row = {"at": self._clock.unix(), "id": secrets.token_hex(8), **asdict(entry)}
        (self._refused if entry.status >= _REFUSED else self._changes).append(row)
        audit_line(**row)
        deployment = entry.deployment
        if term is None or deployment is None or self._health.resting:
            return
        await self._stored.change(deployment, lambda stored: self._merged(deployment, stored), term)

    async def rows(self, deployment: DeploymentId, limit: int) -> Sequence[Row]:
        """Return the rows of one deployment, newest first: those stored and those in memory.

        Raises:
            Unavailable: the store is out of reach.
        """
        stored = await self._stored.fetch(deployment)
        return self._merged(deployment, stored)[: -limit - 1 : -1]

    def in_memory(self, deployment: DeploymentId | None, limit: int) -> Sequence[Row]:
        """Return the rows in memory, newest first, of one deployment or, with None, of all."""
        chosen = (
            row
            for row in reversed(self._all())
            if deployment is None or row["deployment"] == deployment
        )
        return [row for row, _ in zip(chosen, range(limit), strict=False)]

    def _merged(self, deployment: DeploymentId, stored: Sequence[Row]) -> Sequence[Row]:
        """Return the stored rows and those in memory, oldest first, each once."""
        found: dict[str, Row] = {row["id"]: {n: row.get(n) for n in _FORM} for row in stored}
        found |= {row["id"]: row for row in self._all() if row["deployment"] == deployment}
        rows = sorted(found.values(), key=_time)
        # Apart: otherwise a flood of refused requests would push out what was changed.
        changes = [row for row in rows if row["status"] < _REFUSED][-_STORED:]
        refused = [row for row in rows if row["status"] >= _REFUSED]
        return sorted(changes + refused[-(_STORED // _REFUSED_PART) :], key=_time)

    def _all(self) -> list[Row]:
        return sorted([*self._changes, *self._refused], key=_time)


def _time(row: Row) -> float:
    return float(row["at"])
