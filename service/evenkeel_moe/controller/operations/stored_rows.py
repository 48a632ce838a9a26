"""Keeps a few rows about each deployment as one document in the store."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

import structlog

from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.stores import DeploymentStore

_log = structlog.get_logger(__name__)

Row = Mapping[str, Any]
_MOST = 1 << 63
"""Numbers are below it: no float holds every integer of JSON."""


@dataclass(eq=False, repr=False)
class StoredRows:
    """The newest rows of each deployment. Each change writes the whole document: keep it small.

    Args:
        name: name of the document.
        most: rows kept for each deployment.
        form: the type of each field that a row must have.
    """

    store: DeploymentStore
    health: StoreHealth
    name: str
    most: int
    form: Mapping[str, type | UnionType]
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def fetch(self, deployment: DeploymentId) -> Sequence[Row]:
        """Return the stored rows, oldest first.

        Raises:
            Unavailable: the store is out of reach.
        """
        document = await self.store.fetch_document(deployment, self.name) or {}
        rows = document.get("rows", [])
        found = rows if isinstance(rows, list) else [rows]
        sound = [row for row in found if self._is_sound(row)]
        if len(sound) < len(found):
            why = f"{len(found) - len(sound)} of {len(found)} rows have another form"
            self.health.unreadable("row", f"{deployment} {self.name}", why)
        return sound

    def _is_sound(self, row: Any) -> bool:
        return isinstance(row, Mapping) and all(
            isinstance(row.get(name), kind) and _is_bounded(row.get(name))
            for name, kind in self.form.items()
        )

    async def change(
        self, deployment: DeploymentId, edit: Callable[[Sequence[Row]], Sequence[Row]], term: int
    ) -> None:
        """Replace the rows by those that `edit` returns.

        A failure is only logged: what the rows report was done, whether they are stored or not.
        """
        try:
            async with self._writing:
                rows = edit(await self.fetch(deployment))[-self.most :]
                body = {"rows": [dict(row) for row in rows]}
                await self.store.store_document(deployment, self.name, body, term)
        except (Unavailable, Conflict) as error:
            if isinstance(error, Unavailable):
                self.health.failed(error)
            _log.warning(
                "rows_not_stored", document=self.name, deployment=deployment, error=str(error)
            )


def _is_bounded(value: Any) -> bool:
    """Return False for a truth value, and for a number that is not finite or has over 63 bits."""
    if isinstance(value, bool):
        return False
    return not isinstance(value, int | float) or -_MOST < value < _MOST
