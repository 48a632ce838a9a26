"""The states of the store as numbers, and the checks of what is written to it."""

from dataclasses import dataclass, replace
from typing import Any

from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.protocol import control_messages as ctl
from tests.explore.freeze import Freezer, normal_record
from tests.explore.invariants import History


@dataclass(frozen=True, eq=False)
class Store:
    """The records of the deployment and the term of its lease."""

    term: int
    plans: dict[PlanId, PlanRecord]
    epochs: dict[Epoch, Placement]


class Stores:
    """Every state of the store that was met."""

    def __init__(self) -> None:
        self.met: list[Store] = []
        self._numbers: dict[Any, int] = {}
        self._freezer = Freezer(None)
        self.empty = self._intern(Store(0, {}, {}))

    def _intern(self, store: Store) -> int:
        number = self._numbers.setdefault(self._freezer.freeze(store), len(self.met))
        if number == len(self.met):
            self.met.append(store)
        return number

    def term(self, number: int) -> int:
        return self.met[number].term

    def grant(self, number: int, term: int) -> int:
        """Return the store after the lease was granted at a term."""
        return self._intern(replace(self.met[number], term=term))

    def load(self, number: int) -> ctl.StoredRecords:
        store = self.met[number]
        return ctl.StoredRecords(tuple(store.plans.values()), dict(store.epochs))

    def write(
        self, number: int, history: History, action: ctl.PersistAction
    ) -> tuple[int, History]:
        """Store one record; raises Violation if it is not true."""
        store = self.met[number]
        plans, epochs = store.plans, store.epochs
        before = None
        match action:
            case ctl.PersistPlan(record=record):
                before = plans.get(record.plan.plan_id)
                plans = plans | {record.plan.plan_id: normal_record(record)}
            case ctl.PersistEpoch(_, epoch, placement, begins):
                kept = {e: map_ for e, map_ in epochs.items() if e < epoch and not begins}
                epochs = kept | {epoch: placement}
        history = history.write(action, before, max(store.epochs, default=0))
        return self._intern(Store(store.term, plans, epochs)), history
