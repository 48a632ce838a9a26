"""What operators ordered of a deployment, and what becomes of it where a store comes back empty."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenkeel_moe.controller.policy_document import policy_document, policy_from_document
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.policy import DeploymentPolicy

__all__ = ["Orders", "Recalled", "StandingOrders"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What stands until an operator says otherwise."""

    policy: DeploymentPolicy
    held: bool = False
    """Automatic plans wait for `resume`."""
    frozen_until: float = 0.0
    """Unix seconds; 0 when not frozen."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """The orders a new leader goes by."""

    orders: Orders
    unstored: Mapping[str, Mapping[str, Any]]
    """Documents the store lacks, by name."""
    loss: str = ""
    """What the store lost and what follows; empty where it lost nothing that is known of."""

    def row(self, unix: float) -> dict[str, Any]:
        """The loss for the decision log."""
        reason = Reason.HELD_AFTER_ROLLBACK if self.orders.held else Reason.RECOVERED
        return {
            "at": unix,
            "reason": reason.value,
            "plan_id": None,
            "numbers": {},
            "detail": self.loss,
        }


class StandingOrders:
    """One deployment's orders on this replica: as stored, or as remembered where the store lost them.

    Every leader stores the document `leader`. Where it is missing the store never knew the deployment, or forgot all of it.
    """

    def __init__(self, replica_id: str, default: DeploymentPolicy) -> None:
        self._replica_id = replica_id
        self._default = default
        self._remembered: Orders | None = None
        self._term = 0
        """The last one this replica led under, and so what it remembers is of."""
        self._ranks_know = 0
        """The highest term a rank told of."""
        self._was_blank = False
        """The store knew nothing when this replica began to lead, and no other replica has led since."""

    def remember(self, term: int, orders: Orders) -> None:
        """What stands while this replica leads."""
        self._term, self._remembered = term, orders

    def ranks_know(self, term: int) -> None:
        """A rank was led under this term: the deployment is not new, whatever the store says."""
        self._ranks_know = max(self._ranks_know, term)

    def recall(self, stored: Mapping[str, Mapping[str, Any] | None]) -> Recalled:
        """What to go by now that this replica leads again; `stored`: documents `leader`, `policy`, `control`."""
        leader, policy, control = stored["leader"], stored["policy"], stored["control"]
        if leader is None:
            self._was_blank = True
        elif leader.get("replica_id") != self._replica_id:
            self._was_blank = False
        known = (self._remembered if self._was_blank else None) or Orders(self._default)
        orders = Orders(
            known.policy if policy is None else policy_from_document(policy, self._default),
            known.held if control is None else bool(control.get("held", False)),
            known.frozen_until if control is None else float(control.get("frozen_until", 0.0)),
        )
        loss = ""
        if self._was_blank and self._ranks_know > self._term:
            # Another led since, or this process never did: what was ordered then is not known.
            orders = Orders(orders.policy, True, orders.frozen_until)
            loss = (
                f"the store came back empty, and ranks were led under term {self._ranks_know}: what operators had set is"
                " lost; automatic plans are held until resume"
            )
        elif leader is None and self._remembered is not None:
            loss = "the store came back empty: mode, freeze and hold stay as they were"
        unstored: dict[str, Mapping[str, Any]] = {}
        if policy is None and orders.policy != self._default:
            unstored["policy"] = policy_document(orders.policy)
        body = {"held": orders.held, "frozen_until": orders.frozen_until}
        if body != (control or {"held": False, "frozen_until": 0.0}):
            unstored["control"] = body
        return Recalled(orders, unstored, loss)
