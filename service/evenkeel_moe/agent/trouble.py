"""Why a rank takes no waves, and what ends it."""

import time

import structlog

from evenkeel_moe.protocol.messages import MigrationDisabled
from evenkeel_moe.protocol.rank.participant import Participant

_log = structlog.get_logger(__name__)


class Trouble:
    """The fault that keeps one rank from taking waves, if any.

    Args:
        participant: refuses every wave while there is a fault.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._took_waves = False
        self._until_reload = False
        self.why = ""
        """The fault in words; empty without one."""

    @property
    def moves(self) -> bool:
        """True if the rank takes waves, or did before the fault."""
        return self._took_waves if self.why else not self._participant.observe_only

    def begin(self, why: str, *, until_reload: bool) -> None:
        """Refuse waves. The first fault is kept, unless only the later one outlasts a reload."""
        if self.why and (until_reload or not self._until_reload):
            return
        if not self.why:
            self._took_waves = not self._participant.observe_only
        self.why, self._until_reload = why, until_reload
        # Called with and without the agent's lock: this event sets a flag and moves nothing.
        self._participant.handle(MigrationDisabled(), time.monotonic())
        _log.error("placement_off", deployment=self._participant.identity.deployment, detail=why)

    def reloaded(self) -> None:
        """End a fault of the weights: those loaded now agree on all ranks."""
        if self._until_reload:
            self.end()

    def end(self) -> None:
        """Take waves again, if the rank took any before the fault."""
        if not self.why:
            return
        _log.info("placement_on", deployment=self._participant.identity.deployment, ended=self.why)
        self._participant.observe_only = not self._took_waves
        self.why, self._until_reload = "", False
