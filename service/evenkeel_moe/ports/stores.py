"""Protocols of the clock and of the stores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.model.topology import ModelShape


class Clock(Protocol):
    """Two clocks: one to measure time, one for timestamps."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start. They never decrease."""
        ...

    def unix(self) -> float:
        """Return Unix seconds."""
        ...


class WindowStore(Protocol):
    """Stores the newest steps of each (deployment, phase), bounded by number and time to live."""

    async def append(self, deployment: DeploymentId, phase: Phase, *parts: LoadWindow) -> None:
        """Append complete steps in consecutive parts, newest last.

        Source-side sums of the last part, if any, replace the stored ones.

        Raises:
            Unavailable: the store is not reachable; it is unknown if anything was stored.
        """
        ...

    async def fetch(
        self, deployment: DeploymentId, phase: Phase, shape: ModelShape, most: int
    ) -> LoadWindow | None:
        """Return the newest stored steps of a shape, oldest first.

        Args:
            deployment: their owner.
            phase: of the steps.
            shape: of the deployment. Steps and source-side sums of another shape are not used.
            most: largest number of steps.

        Returns:
            counts (n, L, E) with n <= most, tokens (n, R), source (R, L, E) or None; None if there
            is no step.

        Raises:
            Unavailable: the store is not reachable.
        """
        ...

    async def forget(self, deployment: DeploymentId) -> None:
        """Delete all windows of a deployment."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """The stored leadership of one deployment."""

    holder: str
    term: int
    lasting: bool = field(default=True, compare=False)
    """False while the store keeps nothing of the deployment beyond its leadership: its ranks were
    never all here."""


class DeploymentStore(Protocol):
    """Durable records of deployments. The term of the lease fences every write."""

    async def acquire_lease(
        self,
        deployment: DeploymentId,
        holder: str,
        ttl_s: float,
        at_least_term: int,
        lasting: bool = True,
    ) -> Lease:
        """Take the lease if it is free, expired or already the holder's. Return the lease in force.

        A new lease has a term above the stored one and above `at_least_term`. If it need not be
        lasting and the store has no records, the deployment is not listed and what is written
        under the lease is kept for a short time only.
        """
        ...

    async def renew_lease(self, deployment: DeploymentId, lease: Lease, ttl_s: float) -> bool:
        """Extend a lease. Return False if it is no longer ours.

        A lasting lease lists the deployment, and all its records are kept from then on.
        """
        ...

    async def release_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Release a lease if it is still ours."""
        ...

    async def drop_lease(self, deployment: DeploymentId, lease: Lease) -> None:
        """Delete a lease that is not lasting, if it is still ours, and all written under it."""
        ...

    async def has_records(self, deployment: DeploymentId) -> bool:
        """Return True if the ranks of a deployment were ever all here."""
        ...

    async def fetch_lease(self, deployment: DeploymentId) -> Lease | None:
        """Return the lease in force; None if there is none."""
        ...

    async def store_plan(self, record: PlanRecord, term: int) -> None:
        """Store a plan record.

        Beyond the number of plans that are kept, the oldest that have ended are dropped; a plan
        that has not ended never is. Calls for one deployment must not overlap.
        """
        ...

    async def plan_order(self, deployment: DeploymentId) -> Sequence[tuple[PlanId, float]]:
        """Return (id, created_at) of every stored plan, newest first."""
        ...

    async def open_plans(self, deployment: DeploymentId) -> Sequence[PlanId]:
        """Return the ids of stored plans that have not ended."""
        ...

    async def fetch_plans(
        self, deployment: DeploymentId, plan_ids: Sequence[PlanId]
    ) -> Sequence[PlanRecord]:
        """Return these plans in this order, without unknown ones.

        A plan of a large model has 0.1 MB: ask for few.
        """
        ...

    async def store_epoch(
        self,
        deployment: DeploymentId,
        epoch: Epoch,
        placement: Placement,
        term: int,
        begins_history: bool = False,
    ) -> None:
        """Store a committed placement under its epoch.

        Stored epochs above it belong to another history, and so do all if one begins. They become
        replaced epochs.
        """
        ...

    async def fetch_epochs(self, deployment: DeploymentId) -> Mapping[Epoch, Placement]:
        """Return the stored placements by epoch; the oldest are not kept."""
        ...

    async def fetch_replaced_epochs(
        self, deployment: DeploymentId
    ) -> Sequence[tuple[Epoch, Placement]]:
        """Return the epochs that another history replaced, the last replaced first.

        The oldest are not kept. A number may occur more than once.
        """
        ...

    async def store_document(
        self,
        deployment: DeploymentId,
        name: str,
        body: Mapping[str, Any],
        term: int,
        lasting: bool = True,
    ) -> None:
        """Store a small named JSON document: policy, shape, freeze.

        Args:
            deployment: its owner.
            name: of the document.
            body: the JSON object.
            term: of the writer's lease.
            lasting: as in the writer's lease.
        """
        ...

    async def fetch_document(self, deployment: DeploymentId, name: str) -> Mapping[str, Any] | None:
        """Return a named document; None if there is none."""
        ...

    async def append_decision(self, deployment: DeploymentId, decision: Mapping[str, Any]) -> None:
        """Append a row to the decision log, which is bounded by number and age.

        A row that is the newest already is not added again, so a write may be repeated.

        Args:
            deployment: its owner.
            decision: has `at` in Unix seconds and `reason`, else it is not read again.
        """
        ...

    async def fetch_decisions(
        self, deployment: DeploymentId, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return rows of the decision log, newest first."""
        ...

    async def unlist(self, deployment: DeploymentId) -> None:
        """Remove a deployment from `deployments` until it is led again; its records stay."""
        ...

    async def deployments(self) -> Sequence[DeploymentId]:
        """Return the deployments with records, without those removed by `unlist`."""
        ...

    async def unix(self) -> float:
        """Return Unix seconds by the clock of the store, which all replicas share.

        Raises:
            Unavailable: the store is not reachable.
        """
        ...

    async def ping(self) -> None:
        """Raise Unavailable unless the store accepts writes."""
        ...
