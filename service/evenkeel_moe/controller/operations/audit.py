"""Who asked for which change: the newest rows in memory, and those of each deployment in the store."""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import structlog

from evenkeel_moe.controller.deployment.action_executor import StoreHealth
from evenkeel_moe.controller.operations.stored_rows import Row, StoredRows
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports import AuditEntry, Clock, DeploymentStore

__all__ = ["AuditLog"]

_log = structlog.get_logger(__name__)
_IN_MEMORY = 1024
"""Rows of all deployments on this replica."""
_STORED = 256
"""Rows of one deployment: about 60 kB."""


class AuditLog:
    """Each row is also one log line, `audit`: where logs are collected nothing is lost beyond the bounds here."""

    def __init__(self, store: DeploymentStore, health: StoreHealth, clock: Clock) -> None:
        self._stored = StoredRows(store, health, "audit", _STORED)
        self._health = health
        self._clock = clock
        self._rows: deque[dict[str, Any]] = deque(maxlen=_IN_MEMORY)

    async def record(self, entry: AuditEntry, term: int | None) -> None:
        """Keep a row.

        Args:
            entry: what was asked and answered.
            term: to store it under; None where this replica does not lead the deployment, or there is none.
        """
        row = {"at": self._clock.unix(), "id": secrets.token_hex(8), **asdict(entry)}
        self._rows.append(row)
        _log.info("audit", **row)
        deployment = entry.deployment
        if term is None or deployment is None or self._health.resting:
            return
        await self._stored.change(
            deployment, lambda stored: self._with_ours(deployment, stored), term
        )

    async def rows(self, deployment: DeploymentId, limit: int) -> Sequence[Row]:
        """Rows of one deployment, newest first: the stored ones and those only in memory.

        Raises:
            Unavailable: the store is out of reach.
        """
        stored = await self._stored.fetch(deployment)
        return self._with_ours(deployment, stored)[: -limit - 1 : -1]

    def _with_ours(self, deployment: DeploymentId, stored: Sequence[Row]) -> Sequence[Row]:
        """Stored rows and those in memory, oldest first."""
        found = {str(row["id"]): row for row in stored}
        found |= {row["id"]: row for row in self._rows if row["deployment"] == deployment}
        return sorted(found.values(), key=lambda row: float(row["at"]))

    def here(self, deployment: DeploymentId | None, limit: int) -> Sequence[Row]:
        """Rows in memory, newest first; None: of all deployments."""
        chosen = (
            row
            for row in reversed(self._rows)
            if deployment is None or row["deployment"] == deployment
        )
        return [row for row, _ in zip(chosen, range(limit), strict=False)]
