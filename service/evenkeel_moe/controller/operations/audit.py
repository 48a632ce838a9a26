"""Records who asked for which change, in memory and in the store."""

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import structlog
from pydantic import Field, ValidationError

from evenkeel_moe.api.schemas import AuditRow
from evenkeel_moe.controller.logs import audit_line
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import AuditEntry
from evenkeel_moe.ports.stores import Clock, DeploymentStore

_log = structlog.get_logger(__name__)

Row = Mapping[str, Any]
_DOCUMENT = "audit"
"""Each change writes the whole document, so it is kept small."""
_IN_MEMORY = 1024
"""Changes of all deployments on this replica."""
_STORED = 256
"""Changes of one deployment: about 60 kB, and 120 kB if all of them change the policy."""
_REFUSED_PART = 4
"""One refused request is kept for so many changes."""
_REFUSED = 400
"""The lowest status of a request that changed nothing."""
_MOST = 2.0**63
"""Times are below it: no float holds every integer of JSON."""


class _StoredRow(AuditRow):
    at: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-_MOST, lt=_MOST)]
    status: Annotated[int, Field(strict=True, ge=0, lt=1000)]
    idempotency_key: str | None = None
    """A row of an older version may lack it, as the last two."""


class AuditLog:
    """The newest audit rows.

    Each row is also a log line `audit`: where logs are collected, rows outlive the limits here.
    """

    def __init__(self, store: DeploymentStore, health: StoreHealth, clock: Clock) -> None:
        self._store = store
        self._health = health
        self._clock = clock
        self._writing = asyncio.Lock()
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
        try:
            async with self._writing:
                if self._health.resting:  # The row before this one had no answer.
                    return
                rows = self._merged(deployment, await self._fetch(deployment))
                body = {"rows": [dict(row) for row in rows]}
                await self._store.store_document(deployment, _DOCUMENT, body, term)
        except (Unavailable, Conflict) as error:
            # Only logged: what the rows report was done, whether they are stored or not.
            if isinstance(error, Unavailable):
                self._health.failed(error)
            _log.warning("audit_not_stored", deployment=deployment, error=str(error))

    async def rows(self, deployment: DeploymentId, limit: int) -> Sequence[Row]:
        """Return the rows of one deployment, newest first: those stored and those in memory.

        Raises:
            Unavailable: the store is out of reach.
        """
        return self._merged(deployment, await self._fetch(deployment))[: -limit - 1 : -1]

    def in_memory(self, deployment: DeploymentId | None, limit: int) -> Sequence[Row]:
        """Return the rows in memory, newest first, of one deployment or, with None, of all."""
        chosen = (
            row
            for row in reversed(self._all())
            if deployment is None or row["deployment"] == deployment
        )
        return [row for row, _ in zip(chosen, range(limit), strict=False)]

    async def _fetch(self, deployment: DeploymentId) -> Sequence[Row]:
        document = await self._store.fetch_document(deployment, _DOCUMENT) or {}
        rows = document.get("rows", [])
        found = rows if isinstance(rows, list) else [rows]
        sound = [row for row in map(_read, found) if row is not None]
        if len(sound) < len(found):
            why = f"{len(found) - len(sound)} of {len(found)} rows have another form"
            self._health.unreadable("row", f"{deployment} {_DOCUMENT}", why)
        return sound

    def _merged(self, deployment: DeploymentId, stored: Sequence[Row]) -> Sequence[Row]:
        """Return the stored rows and those in memory, oldest first, each once."""
        found: dict[str, Row] = {row["id"]: row for row in stored}
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


def _read(row: Any) -> Row | None:
    """Return a stored row with every field; None if it has another form."""
    try:
        return _StoredRow.model_validate(row).model_dump()
    except ValidationError:
        return None
