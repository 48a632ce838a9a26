"""The production machines of a run, changed to count every (state, event) pair they pass.

A mutant is a kit with one class replaced.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier
from evenkeel_moe.protocol.transitions import (
    CONTROL,
    CONTROL_MOVES,
    COORDINATOR,
    COORDINATOR_MOVES,
    ILLEGAL,
    NOT_READY,
    PARTICIPANT,
    PARTICIPANT_MOVES,
    VIOLATION,
)

__all__ = ["Kit", "all_pairs"]

TABLES: dict[str, Any] = {
    "participant": PARTICIPANT,
    "coordinator": COORDINATOR,
    "control": CONTROL,
}


def all_pairs() -> set[tuple[str, str, str]]:
    """Return every pair a run may pass: those that a table does not forbid."""
    return {
        (machine, str(state), event.__name__)
        for machine, table in TABLES.items()
        for (state, event), cell in table.items()
        if cell not in (ILLEGAL, VIOLATION, NOT_READY)
    }


@dataclass(frozen=True)
class Kit:
    """The classes of the machines in a run."""

    participant: type[Participant] = Participant
    gate: type[Gate] = Gate
    control: type[DeploymentControl] = DeploymentControl
    coordinator: type[Coordinator] = Coordinator
    executor: type[PlanExecutor] = PlanExecutor
    recovery: type[Recovery] = Recovery
    membership: type[Membership] = Membership
    barrier: type[SaveBarrier] = SaveBarrier

    def wired(self, pairs: Counter | None = None) -> "Kit":
        """Return the kit with its classes connected; passing pairs are counted in `pairs`."""
        participant, control, coordinator = self.participant, self.control, self.coordinator
        if pairs is not None:
            participant = recorded(participant, "participant", pairs)
            coordinator = recorded(coordinator, "coordinator", pairs)
            control = recorded(control, "control", pairs)
        executor = type("PlanExecutor", (self.executor,), {"coordinator_type": coordinator})
        parts = {
            "executor_type": executor,
            "recovery_type": self.recovery,
            "membership_type": self.membership,
        }
        return replace(self, participant=participant, control=type("Control", (control,), parts))


MOVES: dict[str, Any] = {
    "participant": PARTICIPANT_MOVES,
    "coordinator": COORDINATOR_MOVES,
    "control": CONTROL_MOVES,
}


def recorded(machine: type, name: str, pairs: Counter) -> type:
    """Return the machine, changed to count each pair and to check each move against the table."""
    dispatch, moves = machine._dispatch, MOVES[name]  # type: ignore[attr-defined]

    def note(self, kind, *arguments):
        before = self.state
        # Requests of operators that come too early are refused, and are no pairs to pass.
        pairs[name, before, kind] += TABLES[name].get((before, kind)) is not NOT_READY
        actions = dispatch(self, *arguments)
        if self.state is not before and self.state not in moves[before].get(kind, ()):
            raise AssertionError(f"{name} went from {before} to {self.state} by {kind.__name__}")
        return actions

    def with_event(self, event):
        return note(self, type(event), event)

    def with_kind(self, kind, event, now):
        return note(self, kind, kind, event, now)

    return type(
        machine.__name__,
        (machine,),
        {"_dispatch": with_event if name == "participant" else with_kind},
    )
