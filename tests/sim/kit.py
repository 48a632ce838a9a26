"""The production machines a run is made of, with every (state, event) pair they pass recorded.

A mutant is a kit with one class replaced.
"""

from collections import Counter
from dataclasses import dataclass, replace

from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.transitions import (
    CONTROL,
    CONTROL_MOVES,
    COORDINATOR,
    COORDINATOR_MOVES,
    ILLEGAL,
    PARTICIPANT,
    PARTICIPANT_MOVES,
    VIOLATION,
)

__all__ = ["Kit", "all_pairs"]


def all_pairs() -> set[tuple[str, str, str]]:
    """Every pair a run may pass: neither our own bug nor a peer's."""
    tables = {"participant": PARTICIPANT, "coordinator": COORDINATOR, "control": CONTROL}
    return {
        (machine, str(state), event.__name__)
        for machine, table in tables.items()
        for (state, event), cell in table.items()
        if cell not in (ILLEGAL, VIOLATION)
    }


@dataclass(frozen=True)
class Kit:
    """Which class plays which part."""

    participant: type[Participant] = Participant
    gate: type[Gate] = Gate
    control: type[DeploymentControl] = DeploymentControl
    coordinator: type[Coordinator] = Coordinator
    executor: type[PlanExecutor] = PlanExecutor
    recovery: type[Recovery] = Recovery
    membership: type[Membership] = Membership

    def wired(self, pairs: Counter | None = None) -> "Kit":
        """The same parts put together; (machine, state, event type) are counted in `pairs` as they pass."""
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


MOVES = {
    "participant": PARTICIPANT_MOVES,
    "coordinator": COORDINATOR_MOVES,
    "control": CONTROL_MOVES,
}


def recorded(machine: type, name: str, pairs: Counter) -> type:
    """The machine, counting each pair it dispatches and holding its moves against the table's."""
    dispatch, moves = machine._dispatch, MOVES[name]  # type: ignore[attr-defined]

    def note(self, kind, *arguments):
        before = self.state
        pairs[name, before, kind] += 1
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
