"""Why a rank takes no waves, and what ends it."""

from enum import StrEnum

import structlog

from evenkeel_moe.protocol.rank.participant import Participant

_log = structlog.get_logger(__name__)


class FaultEnd(StrEnum):
    """What ends a fault; the faults of a rank are told in this order."""

    RESTART = "a restart of the group"
    RELOAD = "weights on which all ranks agree"
    MOVE = "the end of the move"


class Trouble:
    """The faults that keep one rank from taking waves, at most one for each way to end.

    Args:
        participant: refuses every wave while there is a fault.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._faults: dict[FaultEnd, str] = {}
        self._took_waves = False

    @property
    def why(self) -> str:
        """The fault that is hardest to end, in words; empty without one."""
        faults = self._faults
        return next((faults[end] for end in FaultEnd if end in faults), "")

    @property
    def moves(self) -> bool:
        """True if the rank takes waves, or did before its first fault."""
        return self._took_waves if self._faults else self._participant.takes_waves

    def begin(self, why: str, until: FaultEnd) -> None:
        """Refuse waves until the fault has ended; of two faults that end alike the first counts."""
        if until in self._faults:
            return
        if not self._faults:
            self._took_waves = self._participant.takes_waves
        self._faults = {**self._faults, until: why}
        # Called with and without the agent's lock: the flag moves nothing.
        self._participant.disabled = True
        deployment = self._participant.identity.deployment
        _log.error("placement_off", deployment=deployment, detail=why, until=until)

    def end(self, end: FaultEnd) -> None:
        """End a fault. Without another one the rank takes waves again, if it took any before."""
        if end not in self._faults:
            return
        self._faults = {other: why for other, why in self._faults.items() if other is not end}
        if not self._faults:
            self._participant.disabled = not self._took_waves
            _log.info("placement_on", deployment=self._participant.identity.deployment, ended=end)
