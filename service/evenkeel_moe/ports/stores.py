"""The clock and the stores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord

__all__ = ["Clock", "DeploymentStore", "Lease", "WindowStore"]


class Clock(Protocol):
    """Two clocks: one to compare, one to write down."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never falls."""
        ...

    def unix(self) -> float:
        """Unix seconds."""
        ...


class WindowStore(Protocol):
    """Keeps the newest steps of each (deployment, phase), bounded by count and time to live."""

    async def append(self, deployment: DeploymentId, phase: Phase, *parts: LoadWindow) -> None:
        """Add complete steps in consecutive parts, newest last; the last part's source-side sums, if any, replace those stored.

        Raises:
            Unavailable: the store is out of reach; nothing is known to be stored.
        """
        ...

    async def fetch(self, deployment: DeploymentId, phase: Phase) -> LoadWindow | None:
        """The stored window, oldest step first; None when there is none."""
        ...

    async def forget(self, deployment: DeploymentId) -> None:
        """Drop every window of a deployment."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """Leadership of one deployment as the store has it."""

    holder: str
    term: int


class DeploymentStore(Protocol):
    """Durable records of one controller's deployments. Every write is fenced by the lease's term."""

    async def acquire_lease(
        self, deployment: DeploymentId, holder: str, ttl_s: float, at_least_term: int
    ) -> Lease:
        """Take the lease if it is free, expired or the same holder's; the reply is the winner.

        A new holding carries a term above both the stored one and `at_least_term`.
        """
        ...

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease; False when it is no longer ours."""
        ...

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Give the lease up if it is still ours."""
        ...

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Who leads; None while nobody does."""
        ...

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Write one plan record whole."""
        ...

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """(id, created_at) of every stored plan, newest first."""
        ...

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Stored plans that have not ended, by id."""
        ...

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        """Those plans in that order, without those that are not stored. A plan of a large model is 0.1 MB: ask for few."""
        ...

    async def store_epoch(
        self, deployment: DeploymentId, epoch: Epoch, placement: Placement, term: int
    ) -> None:
        """Record a committed placement under its epoch."""
        ...

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Recorded placements by epoch, as many as are kept."""
        ...

    async def store_document(
        self, deployment: DeploymentId, name: str, body: Mapping[str, Any], term: int
    ) -> None:
        """Write a small named JSON document: policy, shape, freeze, intent."""
        ...

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        """Read a named document."""
        ...

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Add a row to the decision log, bounded by count and age."""
        ...

    async def fetch_decisions(
        self, deployment: DeploymentId, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Decision rows, newest first."""
        ...

    async def unlist(self, deployment: DeploymentId) -> None:
        """Leave a deployment out of `deployments` until it is led again; its records stay."""
        ...

    async def deployments(self) -> Sequence[DeploymentId]:
        """Every deployment with a record here, but those taken off the list."""
        ...

    async def ping(self) -> None:
        """Raise Unavailable unless the store takes writes."""
        ...
