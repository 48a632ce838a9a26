"""Holds a rank's answers back until the placement of its swap is saved.

A group that restarts comes back on its saved placement. A rank that named the new epoch before it
was saved would leave records behind that say committed, on a group that never was there.
"""

from collections import deque

from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol.messages import SendToController

_MOST_HELD = 256
"""Answers held back; the controller repeats its questions, so the oldest give way."""


class SaveBarrier:
    """What a rank may tell the controller while a save is under way.

    The shell holds the participant's lock around every call.
    """

    def __init__(self) -> None:
        self._before: tuple[Epoch, str] | None = None
        """Epoch and digest of the saved placement while another is being saved."""
        self._held: deque[SendToController] = deque(maxlen=_MOST_HELD)

    def begin(self, epoch: Epoch, placement_digest: str) -> None:
        """Begin a save.

        Args:
            epoch: epoch of the placement before the swap.
            placement_digest: its digest.
        """
        self._before = self._before or (epoch, placement_digest)

    def told(self, epoch: Epoch, placement_digest: str) -> tuple[Epoch, str]:
        """Return the epoch and digest for a Hello: those given, or the saved ones during a save."""
        return self._before or (epoch, placement_digest)

    def outgoing(self, action: SendToController) -> list[SendToController]:
        """Return the answers to send now: none during a save."""
        if self._before is None:
            return [action]
        self._held.append(action)
        return []

    def end(self) -> list[SendToController]:
        """End the save; return the answers that waited for it, in their order."""
        self._before = None
        held = list(self._held)
        self._held.clear()
        return held
