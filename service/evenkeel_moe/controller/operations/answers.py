"""Keeps the answers to requests with an `Idempotency-Key` in the store.

A key therefore holds over a restart, and when another replica takes over.
"""

from collections.abc import Sequence
from dataclasses import asdict

from evenkeel_moe.controller.operations.stored_rows import Row, StoredRows
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import StoredResponse
from evenkeel_moe.ports.stores import Clock, DeploymentStore

_KEPT = 512
"""Answers kept for each deployment: about 120 kB."""
_KEPT_S = 86_400.0

_FORM = {"at": float | int, "name": str, "digest": str, "status": int, "location": str | None}


class AnswerLog:
    """The newest answers of each deployment. An answer names its plan, which has the rest."""

    def __init__(self, store: DeploymentStore, health: StoreHealth, clock: Clock) -> None:
        self._stored = StoredRows(store, health, "answers", _KEPT, _FORM)
        self._clock = clock

    async def keep(self, deployment: DeploymentId, answer: StoredResponse, term: int) -> None:
        """Store an answer, and drop those that are too old."""
        row = {**asdict(answer), "at": self._clock.unix()}

        def edit(rows: Sequence[Row]) -> Sequence[Row]:
            return [*(old for old in self._young(rows) if old["name"] != answer.name), row]

        await self._stored.change(deployment, edit, term)

    async def find(self, deployment: DeploymentId, name: str) -> StoredResponse | None:
        """Return the answer of a name; None if there is none, or it is too old.

        Raises:
            Unavailable: the store is out of reach, so the answer is not known.
        """
        for row in self._young(await self._stored.fetch(deployment)):
            if row["name"] == name:
                return StoredResponse(
                    name, str(row["digest"]), int(row["status"]), row.get("location")
                )
        return None

    def _young(self, rows: Sequence[Row]) -> Sequence[Row]:
        oldest = self._clock.unix() - _KEPT_S
        return [row for row in rows if float(row["at"]) > oldest]
