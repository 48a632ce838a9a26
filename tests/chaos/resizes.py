"""Resizes of the group of ranks in a chaos run: ranks join, retire, and die alone."""

import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.lines import read_lines
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.errors import Conflict, InfeasiblePlan
from tests.chaos.operator import Operator
from tests.chaos.schedule import FaultKind
from tests.chaos.system import POOL_PER_LAYER
from tests.waiting import until

__all__ = ["Resizes", "resizes_done"]

_WITHIN_S = 120.0
"""Other faults strike meanwhile: one or two failovers may come first."""
_PAUSE_S = 0.3


def resizes_done(folder: Path) -> Counter[FaultKind]:
    """Return how often the ranks of a run formed a group of another size, by the cause."""
    found = Counter(dict.fromkeys((FaultKind.GROW, FaultKind.RETIRE, FaultKind.KILL_RANK), 0))
    for line in read_lines(folder / "supervisor.jsonl"):
        if line["kind"] == "resized":
            grown = FaultKind.GROW if None in line["former"] else FaultKind.RETIRE
            found[FaultKind.KILL_RANK if line["dead"] else grown] += 1
    return found


@dataclass
class Resizes:
    """Changes the number of ranks between the least that have room and those of the start.

    Args:
        config: of the ranks at the start.
    """

    supervisor: Supervisor
    operator: Operator
    config: RankConfig

    @property
    def _full_ranks(self) -> int:
        """The fewest ranks that have room for all experts."""
        return -(-self.config.experts // POOL_PER_LAYER)

    def can(self, kind: FaultKind) -> bool:
        """Return True if the group has not reached its limit."""
        size = self.supervisor.num_ranks
        grows = kind is FaultKind.GROW
        return size < self.config.num_ranks if grows else size > self._full_ranks + 1

    async def do(self, kind: FaultKind, rng: random.Random) -> str:
        """Change the number of ranks, and return how."""
        size = self.supervisor.num_ranks
        match kind:
            case FaultKind.GROW:
                await until(self._grow, within_s=_WITHIN_S, every_s=_PAUSE_S, what="ranks to join")
            case FaultKind.RETIRE:
                spare = size - self._full_ranks - 1
                await self._retire(size, size - rng.randint(1, min(2, spare)))
            case _:
                await self._kill([rng.randrange(size)])
        return f"{size} to {self.supervisor.num_ranks} ranks"

    async def kill_most(self, rng: random.Random) -> str:
        """Kill so many ranks that the others have no room for all experts."""
        size = self.supervisor.num_ranks
        ranks = sorted(rng.sample(range(size), size - self._full_ranks + 1))
        await self._kill(ranks)
        return f"{len(ranks)} of {size} ranks"

    async def _kill(self, ranks: list[int]) -> None:
        """Kill ranks and wait until the others go on, or all have started again."""
        supervisor = self.supervisor
        restarts, before = supervisor.restarts, supervisor.resized
        for rank in ranks:
            supervisor.kill_rank(rank)

        def followed() -> bool:
            outlived = supervisor.resized is not None and supervisor.resized is not before
            return outlived or supervisor.restarts > restarts

        await until(followed, within_s=_WITHIN_S, what="the group after a death")
        at = time.time()
        await until(
            lambda: self._serves(at),
            within_s=_WITHIN_S,
            every_s=_PAUSE_S,
            what="the group after a death to serve",
        )

    async def plans_go_on(self, since: float) -> None:
        """Wait until a plan has committed that was accepted after a time; Unix seconds."""
        plans = self.operator.plans

        def committed() -> bool:
            return any(plan.accepted_at > since and plan.phase == "committed" for plan in plans)

        await until(committed, within_s=_WITHIN_S, what="a plan of the group of another size")

    def _serves(self, since: float) -> bool:
        """Return True if a step of rank 0 has been written since a time."""
        lines = read_lines(self.supervisor.folder / "rank-0.jsonl")
        return any(line["kind"] == "step" and line["unix"] > since for line in lines)

    async def _grow(self) -> bool:
        missing = self.config.num_ranks - self.supervisor.num_ranks
        return missing <= 0 or await self._resize(self.config.num_ranks, [])

    async def _retire(self, size: int, wanted: int) -> None:
        async def retired() -> bool:
            if self.supervisor.num_ranks != size:
                return True  # A death has made the group smaller, which ends the retirement.
            asked = await self.operator.retire(size, wanted)
            if asked is None or not asked["ready"] or self.supervisor.num_ranks != size:
                return False
            return await self._resize(wanted, asked["retire"])

        try:
            await until(retired, within_s=_WITHIN_S, every_s=_PAUSE_S, what="ranks to retire")
        finally:
            self.operator.waits = False

    async def _resize(self, ranks: int, retire: list[int]) -> bool:
        """Form the next group; return False if that has to be tried again."""
        supervisor = self.supervisor
        try:
            supervisor.resize(ranks, retire)
        except (Conflict, InfeasiblePlan):
            return False
        outcome = await until(
            lambda: supervisor.resized, within_s=_WITHIN_S, what=f"the group of {ranks} ranks"
        )
        return not outcome.failed and not outcome.dead
