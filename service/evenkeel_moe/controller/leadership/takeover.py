"""What a replica reads of the store when it begins to lead a deployment."""

import json
from dataclasses import dataclass

from evenkeel_moe.controller.leadership.operator_state import Recalled, StandingOrders
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.ports import DeploymentStore
from evenkeel_moe.protocol.control_messages import StoredRecords
from evenkeel_moe.protocol.leader.plan_records import remembered

__all__ = ["Taken", "take_over"]

_PLANS_LOADED = 48
"""Newest plans a new leader reads besides those that have not ended: the ended ones it keeps, and where it is not noted which
have ended, all proposals there may be. As many at a time where it must look further back."""
_MOST_PLANS_LOADED = 5 * _PLANS_LOADED
"""However far back the last plan that was carried out is: one of a large model takes 8 ms to read, and nobody leads meanwhile."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What comes with a lease."""

    recalled: Recalled
    records: StoredRecords
    led_by: str | None
    """Who led last; empty: it was let go of. None where the store knows of nobody."""


async def take_over(
    store: DeploymentStore, deployment: DeploymentId, term: int, orders: StandingOrders
) -> Taken:
    """Read the records; store what operators ordered where the store lost it.

    Raises:
        Unavailable: the store did not answer, or did not take an order.

    The caller stores the document `leader` when all is loaded: before, the store still tells who led last, and that it lost
    the orders.
    """
    documents = {
        name: await store.fetch_document(deployment, name)
        for name in ("leader", "policy", "control")
    }
    recalled = orders.recall(documents)
    for name, body in recalled.unstored.items():
        try:
            await store.store_document(deployment, name, body, term)
        except Unavailable:
            # Where only replicas are away the primary has it all the same; nobody could lead otherwise.
            found = await store.fetch_document(deployment, name)
            if json.dumps(found, sort_keys=True) != json.dumps(body, sort_keys=True):
                raise
    epochs = await store.fetch_epochs(deployment)
    # One map was never changed by a plan, and there may be a thousand proposals nobody approved.
    plans = await _fetch_plans(store, deployment, search=len(epochs) > 1)
    valid = recalled.orders
    records = StoredRecords(plans, epochs, valid.held, valid.frozen_until, valid.policy)
    leader = documents["leader"]
    return Taken(recalled, records, None if leader is None else str(leader.get("replica_id", "")))


async def _fetch_plans(
    store: DeploymentStore, deployment: DeploymentId, *, search: bool
) -> tuple[PlanRecord, ...]:
    """The newest plans and those that have not ended; to `search` is to go back to the last one carried out, which a
    rollback undoes."""
    order = [name for name, _ in await store.plan_order(deployment)]
    newest, rest = order[:_PLANS_LOADED], order[_PLANS_LOADED:_MOST_PLANS_LOADED]
    still_open = [name for name in await store.open_plans(deployment) if name not in newest]
    found = list(await store.fetch_plans(deployment, newest + still_open))
    rest = [name for name in rest if name not in still_open]
    while search and rest and all(record.phase is not PlanPhase.COMMITTED for record in found):
        page, rest = rest[:_PLANS_LOADED], rest[_PLANS_LOADED:]
        found += await store.fetch_plans(deployment, page)
        found = remembered(sorted(found, key=lambda record: record.plan.created_at))
    return tuple(found)
