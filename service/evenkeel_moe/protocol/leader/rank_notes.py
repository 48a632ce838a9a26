"""Notes which ranks are heard, refuse waves, stop and disconnect; no note leads to an action."""

from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import ControlAction
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState


class RankNotes(DeploymentState):
    """Handlers of the events by which ranks are heard, refuse waves, stop and disconnect."""

    def _heard(self, event: ctl.RankHeard, now: float) -> list[ControlAction]:
        self.membership.heard(event.rank, event.incarnation, event.stream, now)
        return []

    def _troubled(self, event: ctl.RankTroubled, _now: float) -> list[ControlAction]:
        self.membership.troubled(event.rank, event.stream, event.trouble)
        return []

    def _stopped(self, event: ctl.RankStopped, _now: float) -> list[ControlAction]:
        self.membership.stopped(event.rank, event.stream)
        return []

    def _closed(self, event: ctl.StreamClosed, now: float) -> list[ControlAction]:
        self.membership.closed(event.rank, event.stream, now)
        return []
