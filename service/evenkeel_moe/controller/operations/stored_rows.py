"""Keeps a few rows about each deployment as one document in the store."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports import DeploymentStore

__all__ = ["Row", "StoredRows"]

_log = structlog.get_logger(__name__)

Row = Mapping[str, Any]


class StoredRows:
    """The newest rows of each deployment. Each change writes the whole document: keep it small.

    Args:
        name: name of the document.
        most: rows kept for each deployment.
    """

    def __init__(self, store: DeploymentStore, health: StoreHealth, name: str, most: int) -> None:
        self._store = store
        self._health = health
        self._name = name
        self._most = most
        self._writing = asyncio.Lock()

    async def fetch(self, deployment: DeploymentId) -> Sequence[Row]:
        """Return the stored rows, oldest first.

        Raises:
            Unavailable: the store is out of reach.
        """
        document = await self._store.fetch_document(deployment, self._name) or {}
        return list(document.get("rows", ()))

    async def change(
        self, deployment: DeploymentId, edit: Callable[[Sequence[Row]], Sequence[Row]], term: int
    ) -> None:
        """Replace the rows by those that `edit` returns.

        A failure is only logged: what the rows report was done, whether they are stored or not.
        """
        try:
            async with self._writing:
                rows = edit(await self.fetch(deployment))[-self._most :]
                body = {"rows": [dict(row) for row in rows]}
                await self._store.store_document(deployment, self._name, body, term)
        except (Unavailable, Conflict) as error:
            if isinstance(error, Unavailable):
                self._health.failed(error)
            _log.warning(
                "rows_not_stored", document=self._name, deployment=deployment, error=str(error)
            )
