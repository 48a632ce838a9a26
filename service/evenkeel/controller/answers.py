"""Answers to requests with an `Idempotency-Key`, in the store, so that a key holds over a restart and a takeover."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import structlog

from evenkeel.controller.hands import StoreHealth
from evenkeel.errors import Conflict, Unavailable
from evenkeel.model.ids import DeploymentId
from evenkeel.ports import Clock, DeploymentStore, KeptAnswer

__all__ = ["AnswerLog"]

_log = structlog.get_logger(__name__)
_KEPT = 512
"""Answers of one deployment. They are one document, rewritten with every answer: about 120 kB."""
_KEPT_S = 86_400.0


class AnswerLog:
    """The newest answers of each deployment; what an answer said is found again by its plan."""

    def __init__(self, store: DeploymentStore, health: StoreHealth, clock: Clock) -> None:
        self._store = store
        self._health = health
        self._clock = clock
        self._writing = asyncio.Lock()

    async def keep(self, deployment: DeploymentId, answer: KeptAnswer, term: int) -> None:
        """Store an answer. One that could not be stored is said in the log: its change is done."""
        try:
            async with self._writing:
                rows = [row for row in await self._rows(deployment) if row["name"] != answer.name]
                rows.append({**asdict(answer), "at": self._clock.unix()})
                await self._store.store_document(deployment, "answers", {"rows": rows[-_KEPT:]}, term)
        except Unavailable as error:
            self._health.failed(error)
            _log.warning("answer_not_stored", deployment=deployment, error=str(error))
        except Conflict as error:
            _log.warning("answer_not_stored", deployment=deployment, error=str(error))

    async def find(self, deployment: DeploymentId, name: str) -> KeptAnswer | None:
        """The answer of that name; None when there is none, or none any more.

        Raises:
            Unavailable: the store is out of reach, so that nobody knows.
        """
        for row in await self._rows(deployment):
            if row["name"] == name:
                return KeptAnswer(name, str(row["digest"]), int(row["status"]), row["location"])
        return None

    async def _rows(self, deployment: DeploymentId) -> list[Mapping[str, Any]]:
        """Those young enough, oldest first."""
        document = await self._store.fetch_document(deployment, "answers") or {}
        oldest = self._clock.unix() - _KEPT_S
        return [row for row in document.get("rows", ()) if float(row["at"]) > oldest]
