"""Who asked for which change: the newest rows in memory, and those of each deployment in the store."""

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog

from evenkeel.controller.hands import StoreHealth
from evenkeel.errors import Conflict, Unavailable
from evenkeel.model.ids import DeploymentId
from evenkeel.ports import AuditEntry, Clock, DeploymentStore

__all__ = ["AuditLog"]

_log = structlog.get_logger(__name__)
_IN_MEMORY = 1024
"""Rows of all deployments on this replica."""
_STORED = 256
"""Rows of one deployment. They are one document, rewritten with every row: about 60 kB."""


class AuditLog:
    """Each row is also one log line, `audit`: where logs are collected nothing is lost beyond the bounds here."""

    def __init__(self, store: DeploymentStore, health: StoreHealth, clock: Clock) -> None:
        self._store = store
        self._health = health
        self._clock = clock
        self._rows: deque[dict[str, Any]] = deque(maxlen=_IN_MEMORY)
        self._writing = asyncio.Lock()

    async def record(self, entry: AuditEntry, term: int | None) -> None:
        """Keep a row.

        Args:
            entry: what was asked and answered.
            term: to store it under; None where this replica does not lead the deployment, or there is none.
        """
        row = {"at": self._clock.unix(), "id": secrets.token_hex(8), **asdict(entry)}
        self._rows.append(row)
        _log.info("audit", **row)
        if term is None or entry.deployment is None or self._health.resting:
            return
        try:
            async with self._writing:
                rows = list(reversed(await self.rows(entry.deployment, _STORED)))
                await self._store.store_document(entry.deployment, "audit", {"rows": rows}, term)
        except Unavailable as error:
            self._health.failed(error)
        except Conflict as error:
            _log.warning("audit_not_stored", deployment=entry.deployment, error=str(error))

    async def rows(self, deployment: DeploymentId, limit: int) -> Sequence[Mapping[str, Any]]:
        """Rows of one deployment, newest first: the stored ones and those only in memory.

        Raises:
            Unavailable: the store is out of reach.
        """
        document = await self._store.fetch_document(deployment, "audit") or {}
        found = {str(row["id"]): row for row in document.get("rows", ())}
        found |= {row["id"]: row for row in self._rows if row["deployment"] == deployment}
        return sorted(found.values(), key=lambda row: -float(row["at"]))[:limit]

    def here(self, deployment: DeploymentId | None, limit: int) -> Sequence[Mapping[str, Any]]:
        """Rows in memory, newest first; None: of all deployments."""
        chosen = (
            row for row in reversed(self._rows) if deployment is None or row["deployment"] == deployment
        )
        return [row for row, _ in zip(chosen, range(limit), strict=False)]
