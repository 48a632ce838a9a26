"""An operator that requests one plan after another by its own ids, during all faults."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from evenkeel_moe.model.topology import ModelShape
from tests.chaos.processes import DEPLOYMENT, ControllerProcess

__all__ = ["Operator", "PlanLife", "draw_target"]

_TERMINAL = frozenset({"committed", "aborted", "cancelled", "expired", "refused"})
_TRY_AGAIN = frozenset({409, 404, 429, 500, 502, 503})
_PAUSE_S = 0.3


def draw_target(rng: random.Random, shape: ModelShape, pool_per_layer: int) -> list[list[int]]:
    """Return an (L, S) random placement that fits the pool.

    It has every expert once, then further copies; no rank holds an expert twice.
    """
    rows = []
    for _ in range(shape.num_layers):
        experts = list(range(shape.num_logical_experts))
        rng.shuffle(experts)
        held = [experts[rank :: shape.num_ranks] for rank in range(shape.num_ranks)]
        row = np.full((shape.num_ranks, shape.slots_per_rank), -1, np.int64)
        for rank, mine in enumerate(held):
            spare = [expert for expert in experts if expert not in mine]
            mine += rng.sample(spare, pool_per_layer - len(mine))
            row[rank, : len(mine)] = mine
        rows.append(row.reshape(-1).tolist())
    return rows


@dataclass(slots=True)
class PlanLife:
    """One plan as the operator saw it."""

    plan_id: str
    asked_at: float
    """Unix seconds of the first request."""
    target: list[list[int]] = field(default_factory=list, repr=False)
    """(L, S) empty until it is drawn."""
    num_ranks: int = 0
    """Ranks of the group for which the target is; 0 until it is drawn."""
    leader: str = ""
    term: int = 0
    primary: int | None = None
    """These three when it was accepted; the primary is None if Sentinel did not name one."""
    accepted_at: float = 0.0
    ended_at: float = 0.0
    phase: str = ""
    reason: str = ""
    final_leader: tuple[str, int, int | None] = ("", 0, None)
    """(leader, term, primary) when its end was seen."""
    lost: int = 0
    """Times the record was gone and the plan was asked for again."""
    misfit: bool = False
    """The group once had another size than the plan."""
    waves: int = 0
    waves_committed: int = 0

    @property
    def through_failover(self) -> bool:
        *leader, primary = self.final_leader
        other_primary = None not in (primary, self.primary) and primary != self.primary
        return self.accepted_at > 0 and (leader != [self.leader, self.term] or other_primary)


@dataclass
class Operator:
    """Keeps one plan under way.

    Args:
        shape: of the group at the start.
        primary: returns the store node that Sentinel takes for the primary.
    """

    controllers: Sequence[ControllerProcess]
    shape: ModelShape
    pool_per_layer: int
    primary: Any
    seed: int
    clock: Any
    plans: list[PlanLife] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Answers that an operator must never get."""
    answers: dict[str, int] = field(default_factory=dict)
    """Requests by outcome."""
    waits: bool = False
    """No new plan is asked for: ranks are to retire first."""

    async def run(self, stop: asyncio.Event) -> None:
        rng = random.Random(self.seed)
        while not stop.is_set():
            life = PlanLife(f"chaos-{self.seed}-{len(self.plans)}", self.clock())
            self.plans.append(life)
            await self._see_through(life, rng, stop)
            await asyncio.sleep(rng.uniform(0.2, 1.0))

    @property
    def under_way(self) -> bool:
        """A plan was accepted and has not ended."""
        return bool(self.plans) and self.plans[-1].accepted_at > 0 and not self.plans[-1].ended_at

    @property
    def waiting(self) -> bool:
        """A plan was accepted and has not ended, even if its record is lost and asked for again."""
        again = bool(self.plans) and self.plans[-1].lost > 0 and not self.plans[-1].ended_at
        return self.under_way or again

    async def retire(self, from_ranks: int, to_ranks: int) -> dict[str, Any] | None:
        """Ask for a retirement, or for it again; return the answer, None without one."""
        leader = await self._leader()
        if leader is None:
            return None
        body = {"from_ranks": from_ranks, "to_ranks": to_ranks}
        answer = await self._post(leader[0], "resize", body)
        if answer is None:
            return None
        reason = "" if answer.is_success else answer.json().get("reason", "")
        self._count(f"resize {answer.status_code} {reason}".strip())
        # Plans come one after another, so they have to wait for a retirement to begin.
        self.waits = reason == "plan_in_progress"
        if not answer.is_success:
            if answer.status_code not in _TRY_AGAIN or answer.status_code == 500:
                self.faults.append(f"resize: {answer.status_code} {answer.text[:300]}")
            return None
        found: dict[str, Any] = answer.json()
        return found

    async def _post(
        self, process: ControllerProcess, path: str, body: dict[str, Any]
    ) -> httpx.Response | None:
        try:
            return await process.http.post(f"/v1/deployments/{DEPLOYMENT}/{path}", json=body)
        except httpx.HTTPError as error:
            self._count(type(error).__name__)
            return None

    async def _see_through(self, life: PlanLife, rng: random.Random, stop: asyncio.Event) -> None:
        # A request under way at the end may still be accepted: then its plan is seen through.
        while not stop.is_set() or self.under_way:
            leader = await self._leader()
            if leader is None:
                await asyncio.sleep(_PAUSE_S)
                continue
            process, status = leader
            if not life.accepted_at and not await self._ask(life, process, status, rng):
                await asyncio.sleep(_PAUSE_S)
                continue
            if life.ended_at or await self._ended(life, process, status):
                return
            await asyncio.sleep(_PAUSE_S)

    async def _leader(self) -> tuple[ControllerProcess, dict[str, Any]] | None:
        for process in self.controllers:
            if (status := await process.status_if_leader()) is not None:
                return process, status
        return None

    async def _ask(
        self,
        life: PlanLife,
        process: ControllerProcess,
        status: dict[str, Any],
        rng: random.Random,
    ) -> bool:
        """Request the plan; return True if it was accepted, or cannot be any more."""
        size = status["shape"]["num_ranks"] if status["shape"] else life.num_ranks
        if life.num_ranks not in (0, size):
            life.phase, life.reason, life.ended_at = "outgrown", "", self.clock()
            return True
        if not life.target:
            if self.waits or not size:
                return False
            life.num_ranks = size
            shape = replace(self.shape, num_ranks=size)
            life.target = draw_target(rng, shape, self.pool_per_layer)
        target = {"physical_to_logical": life.target}
        body = {"plan_id": life.plan_id, "approve": True, "target": target}
        answer = await self._post(process, "plans", body)
        if answer is None:
            return False
        reason = "" if answer.is_success else answer.json().get("reason", "")
        self._count(f"{answer.status_code} {reason}".strip())
        if not answer.is_success:
            if reason == "wrong_shape" and not life.misfit:
                # The group changed its size after the status was read, as the next one shows.
                life.misfit = True
                return False
            if answer.status_code not in _TRY_AGAIN or reason == "id_reused":
                self.faults.append(f"{life.plan_id}: {answer.status_code} {answer.text[:300]}")
            if reason == "no_change" and life.lost:
                # The store lost the plan's record after the plan had been carried out.
                life.phase, life.reason, life.ended_at = "forgotten", "no_change", self.clock()
                return True
            if answer.status_code == 500:
                self.faults.append(f"{life.plan_id}: internal error {answer.text[:300]}")
            return False
        if answer.json()["plan_id"] != life.plan_id:
            self.faults.append(f"{life.plan_id}: answered with plan {answer.json()['plan_id']}")
        life.accepted_at = self.clock()
        life.leader, life.term = status["leader"], status["term"]
        life.primary = await self.primary()
        return True

    async def _ended(
        self, life: PlanLife, process: ControllerProcess, status: dict[str, Any]
    ) -> bool:
        try:
            answer = await process.http.get(f"/v1/deployments/{DEPLOYMENT}/plans/{life.plan_id}")
        except httpx.HTTPError:
            return False
        if answer.status_code == 404 and status["state"] in ("ready", "migrating"):
            # The store lost its last writes or was flushed: the same request makes the plan again.
            life.lost += 1
            life.accepted_at = 0.0
            return False
        if not answer.is_success:
            return False
        plan = answer.json()
        life.phase, life.reason = plan["phase"], plan["reason"]
        life.waves, life.waves_committed = plan["waves"], plan["waves_committed"]
        if plan["phase"] not in _TERMINAL:
            return False
        life.ended_at = self.clock()
        life.final_leader = (status["leader"], status["term"], await self.primary())
        return True

    def _count(self, outcome: str) -> None:
        self.answers[outcome] = self.answers.get(outcome, 0) + 1
