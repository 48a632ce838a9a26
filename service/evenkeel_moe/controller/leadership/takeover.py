"""Reads the stored records of a deployment when a replica begins to lead it."""

import json
from dataclasses import dataclass

from evenkeel_moe.controller.leadership.operator_state import OperatorStateRecovery, RestoredState
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.ports.stores import DeploymentStore, Lease
from evenkeel_moe.protocol.control_messages import StoredRecords
from evenkeel_moe.protocol.leader.plan_records import select_remembered

_PAGE = 48
"""Newest plans that a new leader reads besides the open ones. They cover the ended plans it keeps
in memory, and all proposals there may be where the store does not say which plans have ended.
Also the page size when it must look further back."""
_MAX_PLANS = 5 * _PAGE
"""Limit of the search for the last plan that was carried out. A plan of a large model takes 8 ms
to read, and nobody leads meanwhile."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The records that a new leader read from the store."""

    restored: RestoredState
    records: StoredRecords
    led_by: str | None
    """The replica that led last; empty if it let the deployment go. None if the store knows of no
    leader."""


async def take_over(
    store: DeploymentStore, deployment: DeploymentId, lease: Lease, recovery: OperatorStateRecovery
) -> Takeover:
    """Read the records, and store the operator's settings where the store lost them.

    Under a lease that is not lasting nothing is stored.

    The caller stores the document `leader` once everything is loaded. Until then the store still
    says who led last, and that it lost the settings.

    Raises:
        Unavailable: the store did not answer, or did not take a setting.
    """
    documents = {
        name: await store.fetch_document(deployment, name)
        for name in ("leader", "policy", "control")
    }
    restored = recovery.restore(documents)
    for name, body in restored.unstored.items() if lease.lasting else ():
        try:
            await store.store_document(deployment, name, body, lease.term)
        except Unavailable:
            # If only replicas of the store are away, the primary has it. That is enough to lead.
            found = await store.fetch_document(deployment, name)
            if json.dumps(found, sort_keys=True) != json.dumps(body, sort_keys=True):
                raise
    epochs = await store.fetch_epochs(deployment)
    # With one epoch no plan was ever carried out, and there may be a thousand unapproved proposals.
    plans = await _fetch_plans(store, deployment, find_committed=len(epochs) > 1)
    state = restored.state
    records = StoredRecords(plans, epochs, state.hold, state.frozen_until, state.policy)
    leader = documents["leader"]
    return Takeover(
        restored, records, None if leader is None else str(leader.get("replica_id", ""))
    )


async def _fetch_plans(
    store: DeploymentStore, deployment: DeploymentId, *, find_committed: bool
) -> tuple[PlanRecord, ...]:
    """Fetch the newest plans and the open ones.

    Args:
        find_committed: go back to the last plan that was carried out, which a rollback undoes.
    """
    order = [name for name, _ in await store.plan_order(deployment)]
    newest, rest = order[:_PAGE], order[_PAGE:_MAX_PLANS]
    still_open = [name for name in await store.open_plans(deployment) if name not in newest]
    # The open ones first: what one read may unpack is bounded.
    found = list(await store.fetch_plans(deployment, still_open + newest))
    rest = [name for name in rest if name not in still_open]
    while find_committed and rest and all(r.phase is not PlanPhase.COMMITTED for r in found):
        page, rest = rest[:_PAGE], rest[_PAGE:]
        found += await store.fetch_plans(deployment, page)
        found = select_remembered(sorted(found, key=lambda record: record.plan.created_at))
    return tuple(found)
