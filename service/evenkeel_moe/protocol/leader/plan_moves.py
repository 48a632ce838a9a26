"""The moves of a deployment's machine from one wave to the next, and between plans."""

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import ControlAction
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.transitions import ControlState


class PlanMoves(DeploymentState):
    """The steps that events of ranks, of time and of operators lead to alike."""

    def _to_wave(self, event: object, now: float) -> list[ControlAction]:
        """Pass an event to the newest wave's machine, which may have ended."""
        executor, recovery = self.as_leader.executor, self.as_leader.recovery
        was_running = executor.running
        if isinstance(event, ctl.CancelWave) and not was_running:
            return []
        actions = executor.take(event, now)
        if was_running and not executor.running:
            recovery.settled_query = recovery.query + 1
            actions += self._next_wave(now)
        return actions

    def _next_wave(self, now: float) -> list[ControlAction]:
        """The wave has ended on all ranks: ask all ranks again, or go on with the plan.

        If a rank refused the wave as stale, or swapped to another map, plans on the recorded epoch
        would all end in the same way.
        """
        leading = self.as_leader
        if self.state is not ControlState.RECOVERING and not leading.executor.found_stale:
            return self.advance_plan(now)
        self.state = ControlState.RECOVERING
        return leading.recovery.begin(now)

    def advance_plan(self, now: float) -> list[ControlAction]:
        """Begin the active plan's next wave if none runs; READY if there is no active plan."""
        if not self.recovered:
            return []
        executor, record = self.as_leader.executor, self.records.active
        if executor.running:
            return []
        actions: list[ControlAction] = []
        if record is not None and not executor.weights_changed:
            closed = self._closed_for(record, now)
            if closed is None:
                actions = executor.begin_wave(record, now, may_persist=not self.write_retry)
            else:
                actions = executor.wait(record, closed, "accepted before, and not begun yet", now)
        active = self.records.active is not None
        self.state = ControlState.MIGRATING if active else ControlState.READY
        return actions

    def _closed_for(self, record: PlanRecord, now: float) -> Reason | None:
        """Return the reason if no plan of its kind may begin now; None if it has begun."""
        if record.has_begun:
            return None
        return self.as_leader.planning_loop.closed(now, record.plan.kind)

    def _end_recovery(self, now: float) -> list[ControlAction]:
        """Leave RECOVERING if the recovery is over."""
        if not self.as_leader.recovery.over:
            return []
        self.state = ControlState.READY
        return self.advance_plan(now)
