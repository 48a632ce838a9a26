"""Machines of an agent, changed to report their moves and to check who uses them."""

from evenkeel_moe.protocol.messages import MigrationDisabled, MigrationEnabled
from tests.sim.checks import NO_LOCK


def watched(rank, participant_type: type, gate_type: type) -> tuple[type, type]:
    """Return both machines, changed for one rank.

    A thread that uses them without the agent's lock may see half of what another thread does. It
    must hold the lock, except to set the flag that refuses waves.
    """
    world = rank.world

    def check(what: str) -> None:
        if rank.agent is not None and not rank.agent._lock.mine:
            world.checks.fail(NO_LOCK, f"rank {rank.rank} calls {what} without the agent's lock")

    class WatchedParticipant(participant_type):  # type: ignore[misc]
        def handle(self, event, now):
            if not isinstance(event, MigrationDisabled | MigrationEnabled):
                check("Participant.handle")
            before = self.state
            actions = super().handle(event, now)
            if self.state is not before:
                rank.told(f"rank is {self.state}")
            return actions

        def snapshot(self, now):
            check("Participant.snapshot")
            return super().snapshot(now)

    class WatchedGate(gate_type):  # type: ignore[misc]
        def begin_poll(self, now):
            check("Gate.begin_poll")
            state = rank.agent._participant.state
            rank.told("rank polls armed" if state == "armed" else "rank polls")
            vector = super().begin_poll(now)
            if vector[-1] == 1:
                rank.told("rank polls to drop")
            return vector

        def handle(self, event, now):
            check("Gate.handle")
            return super().handle(event, now)

        def request_rebuild(self, serial):
            check("Gate.request_rebuild")
            super().request_rebuild(serial)

    return WatchedParticipant, WatchedGate
