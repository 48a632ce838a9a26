"""SimStore: records that can be out of reach, lose their last write, or be flushed."""

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Leader


class StoreDown(Exception):
    """The store does not answer; the write may or may not have happened."""


class Shelf:
    """The stored data."""

    def __init__(self) -> None:
        self.holder = ""
        self.term = 0
        self.lease_until = 0.0
        self.plans: dict = {}
        self.epochs: dict = {}
        self.control: dict = {}

    def copy(self) -> "Shelf":
        twin = Shelf()
        twin.__dict__.update(self.__dict__)
        twin.plans, twin.epochs, twin.control = (
            dict(self.plans),
            dict(self.epochs),
            dict(self.control),
        )
        return twin


def _write(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a write fail while the store is down, without or after its change."""

    @wraps(method)
    def call(self: "SimStore", *args: Any) -> Any:
        fails = self.down and self.world.rng.random() < 0.7
        if fails and self._lost_answers.random() >= self.world.lost_answers:
            raise StoreDown
        self._before_last = self.shelf.copy()
        answer = method(self, *args)
        if fails:
            raise StoreDown
        return answer

    return call


class SimStore:
    """One store for all replicas; every write is fenced by the lease's term."""

    def __init__(self, world) -> None:
        self.world = world
        self.down = False
        self.shelf = Shelf()
        self._before_last: Shelf | None = None
        self._lost_answers = random.Random(f"store {world.seed}")
        """A generator of its own leaves the other draws of a seed as they were."""

    # --- faults -----------------------------------------------------------------------------------

    def lose_last_write(self) -> None:
        """The store crashed and came back without its last write."""
        if self._before_last is not None:
            self.shelf, self._before_last = self._before_last, None
            self.world.checks.forgot()

    def flush(self) -> None:
        """Everything is gone."""
        self.shelf, self._before_last = Shelf(), None
        self.world.checks.forgot()

    # --- leases -----------------------------------------------------------------------------------

    @_write
    def acquire(self, holder: str, ttl: float, at_least: int) -> Leader | None:
        """Take the lease if it is free, expired or ours."""
        shelf = self.shelf
        if shelf.holder not in ("", holder) and self.world.now < shelf.lease_until:
            return None
        if shelf.holder != holder or self.world.now >= shelf.lease_until or shelf.term <= at_least:
            shelf.term = max(shelf.term, at_least) + 1
        shelf.holder, shelf.lease_until = holder, self.world.now + ttl
        leader = Leader(holder, shelf.term)
        self.world.checks.granted = leader
        return leader

    @_write
    def renew(self, leader: Leader, ttl: float) -> bool:
        shelf = self.shelf
        if (shelf.holder, shelf.term) != (
            leader.leader_id,
            leader.term,
        ) or self.world.now >= shelf.lease_until:
            return False
        shelf.lease_until = self.world.now + ttl
        return True

    @_write
    def release(self, leader: Leader) -> None:
        shelf = self.shelf
        if (shelf.holder, shelf.term) == (leader.leader_id, leader.term):
            shelf.lease_until = 0.0

    # --- records ----------------------------------------------------------------------------------

    @_write
    def write(self, action: ctl.PersistAction, leader: Leader | None) -> None:
        """Store one persist action; raises StoreDown, also when the term is fenced off."""
        shelf = self.shelf
        if leader is None or leader.term < shelf.term:
            raise StoreDown
        checks = self.world.checks
        rightful = checks.is_rightful(leader)
        match action:
            case ctl.PersistEpoch(generation, epoch, placement, begins):
                checks.epoch(generation, epoch, placement, shelf.epochs, rightful)
                for known in [known for known in shelf.epochs if begins or known > epoch]:
                    del shelf.epochs[known]
                shelf.epochs[epoch] = placement
            case ctl.PersistPlan(record=record):
                checks.plan(record, shelf.plans.get(record.plan.plan_id), rightful)
                shelf.plans[record.plan.plan_id] = record
            case ctl.PersistDocument(name="control", body=body):
                shelf.control = dict(body)

    def load(self) -> ctl.StoredRecords:
        if self.down:
            raise StoreDown
        shelf = self.shelf
        plans: tuple[PlanRecord, ...] = tuple(shelf.plans.values())
        hold = Hold.of_document(shelf.control)
        frozen = float(shelf.control.get("frozen_until", 0.0))
        return ctl.StoredRecords(plans, dict(shelf.epochs), hold, frozen)
