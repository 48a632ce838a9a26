"""Both store ports in memory, for tests that need a store that does not fail.

The same contract tests check it and the real one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.ports.stores import Clock, Lease
from evenkeel_moe.telemetry.windows import join_windows


class MemoryStore:
    def __init__(
        self,
        clock: Clock,
        *,
        capacity: int = 512,
        epochs_kept: int = 64,
        plans_kept: int = 1000,
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._epochs_kept = epochs_kept
        self._plans_kept = plans_kept
        self._leases: dict[DeploymentId, tuple[Lease, float]] = {}
        self._terms: dict[DeploymentId, int] = {}
        self._listed: set[DeploymentId] = set()
        self._plans: dict[DeploymentId, dict[str, PlanRecord]] = {}
        self._epochs: dict[DeploymentId, dict[Epoch, Placement]] = {}
        self._replaced: dict[DeploymentId, list[tuple[Epoch, Placement]]] = {}
        self._documents: dict[tuple[DeploymentId, str], str] = {}
        self._decisions: dict[DeploymentId, list[str]] = {}
        self._windows: dict[tuple[DeploymentId, Phase], LoadWindow] = {}

    async def acquire_lease(
        self,
        deployment: DeploymentId,
        holder: str,
        ttl_s: float,
        at_least_term: int,
        lasting: bool = True,
    ) -> Lease:
        others = [name for owner, name in self._documents if owner == deployment]
        records = self._epochs.get(deployment) or self._plans.get(deployment)
        lasting = lasting or bool(records) or not {"leader"}.issuperset(others)
        held = self._leases.get(deployment)
        if held is not None and held[1] > self._clock.monotonic() and held[0].holder != holder:
            return Lease(held[0].holder, held[0].term, lasting)
        term = max(self._terms.get(deployment, 0), at_least_term) + 1
        self._terms[deployment] = term
        if lasting:
            self._listed.add(deployment)
        lease = Lease(holder, term, lasting)
        self._leases[deployment] = (lease, self._clock.monotonic() + ttl_s)
        return lease

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        held = self._leases.get(deployment)
        if held is None or held[0] != lease or held[1] <= self._clock.monotonic():
            return False
        self._leases[deployment] = (lease, self._clock.monotonic() + ttl_s)
        if lease.lasting:
            self._listed.add(deployment)
        return True

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        held = self._leases.get(deployment)
        if held is not None and held[0] == lease:
            del self._leases[deployment]

    async def drop_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        held = self._leases.get(deployment)
        if held is not None and held[0] == lease:
            del self._leases[deployment], self._terms[deployment]
            self._documents = {k: v for k, v in self._documents.items() if k[0] != deployment}

    async def has_records(self, deployment: DeploymentId) -> bool:
        return deployment in self._epochs

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        held = self._leases.get(deployment)
        return None if held is None or held[1] <= self._clock.monotonic() else held[0]

    def _fence(self, deployment: DeploymentId, term: int) -> None:
        known = self._terms.get(deployment, 0)
        if known > term:
            raise Conflict(f"term {known} has taken over from term {term}", Reason.LEASE_LOST)
        self._terms[deployment] = term

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        self._fence(record.plan.deployment, term)
        plans = self._plans.setdefault(record.plan.deployment, {})
        plans[record.plan.plan_id] = record
        if len(plans) > self._plans_kept:
            oldest = reversed(await self.plan_order(record.plan.deployment))
            ended = [name for name, _ in oldest if plans[name].phase.terminal]
            for name in ended[: len(plans) - self._plans_kept]:
                del plans[name]

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        plans = [record.plan for record in self._plans.get(deployment, {}).values()]
        rows = [(plan.plan_id, plan.created_at) for plan in plans]
        return sorted(rows, key=lambda row: (row[1], row[0]), reverse=True)

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        plans = self._plans.get(deployment, {})
        return sorted(PlanId(name) for name, record in plans.items() if not record.phase.terminal)

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        known = self._plans.get(deployment, {})
        return [known[plan_id] for plan_id in plan_ids if plan_id in known]

    async def store_epoch(
        self,
        deployment: DeploymentId,
        epoch: Epoch,
        placement: Placement,
        term: int,
        begins_history: bool = False,
    ) -> None:
        self._fence(deployment, term)
        known = self._epochs.pop(deployment, {})
        rows = sorted(known.items(), key=lambda row: row[0])
        replaced = [row for row in rows if begins_history or row[0] > epoch]
        moved = [row for row in reversed(replaced) if row != (epoch, placement)]
        before = [row for row in self._replaced.get(deployment, []) if row not in moved]
        self._replaced[deployment] = (moved + before)[: self._epochs_kept]
        stay = {e: p for e, p in rows if epoch - self._epochs_kept < e and (e, p) not in replaced}
        self._epochs[deployment] = stay | {epoch: placement}

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        return dict(self._epochs.get(deployment, {}))

    async def fetch_replaced_epochs(
        self, deployment: DeploymentId
    ) -> Sequence[tuple[Epoch, Placement]]:
        return list(self._replaced.get(deployment, []))

    async def store_document(
        self,
        deployment: DeploymentId,
        name: str,
        body: Mapping[str, Any],
        term: int,
        lasting: bool = True,
    ) -> None:
        self._fence(deployment, term)
        self._documents[deployment, name] = json.dumps(body)

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        body = self._documents.get((deployment, name))
        return None if body is None else json.loads(body)

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        rows, row = self._decisions.setdefault(deployment, []), json.dumps(decision)
        if rows[-1:] != [row]:
            rows.append(row)

    async def fetch_decisions(
        self, deployment: DeploymentId, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        rows = self._decisions.get(deployment, [])
        return [json.loads(row) for row in rows[::-1][: max(0, limit)]]

    async def unlist(self, deployment: DeploymentId) -> None:
        self._listed.discard(deployment)

    async def deployments(self) -> Sequence[DeploymentId]:
        return sorted(self._listed)

    async def unix(self) -> float:
        return self._clock.unix()

    async def ping(self) -> None:
        pass

    async def append(self, deployment: DeploymentId, phase: Phase, *parts: LoadWindow) -> None:
        held = self._windows.get((deployment, phase))
        joined = join_windows(parts if held is None else [held, *parts])
        source = joined.source if joined.source is not None or held is None else held.source
        self._windows[deployment, phase] = LoadWindow(
            joined.counts, joined.steps, joined.epochs, joined.tokens, joined.compute_s, source
        ).last(self._capacity)

    async def fetch(
        self, deployment: DeploymentId, phase: Phase, shape: ModelShape, most: int
    ) -> LoadWindow | None:
        window = self._windows.get((deployment, phase))
        layers, experts, ranks = shape.num_layers, shape.num_logical_experts, shape.num_ranks
        if window is None or window.counts.shape[1:] != (layers, experts):
            return None
        window, source = window.last(most), window.source
        fits = source is None or source.shape == (ranks, layers, experts)
        return window if fits else replace(window, source=None)

    async def forget(self, deployment: DeploymentId) -> None:
        for phase in Phase:
            self._windows.pop((deployment, phase), None)


class SilentStore(MemoryStore):
    """A store that does not answer some calls.

    Args:
        silent: the names of these calls; may be changed at any time.
        about: only those about this deployment are not answered; None for all.
    """

    def __init__(
        self, clock: Clock, *silent: str, about: DeploymentId | None = None, **sizes: int
    ) -> None:
        super().__init__(clock, **sizes)
        self.silent = set(silent)
        self.refused = 0
        self._about = about
        for name in dir(MemoryStore):
            if not name.startswith("_"):
                setattr(self, name, self._unless_silent(name))

    def _unless_silent(self, name: str) -> Any:
        call = getattr(super(), name)

        async def ask(*arguments: Any, **options: Any) -> Any:
            if name in self.silent and (self._about is None or self._about == arguments[0]):
                self.refused += 1
                raise Unavailable("no answer")
            return await call(*arguments, **options)

        return ask
