"""What a participant remembers of waves: the one it holds, those that ended, what a poll took of it."""

from dataclasses import dataclass
from typing import NamedTuple

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import Prepare, Vote, WaveOutcome

__all__ = ["EndedWaves", "HeldWave", "PollView"]

_MAX_ENDED = 1024
"""Waves remembered as ended at one epoch; far above what a network can still be carrying."""


class PollView(NamedTuple):
    """What one poll took of a participant: its part of the gate vector."""

    armed_epoch: int
    """Epoch the held wave would bring if armed, else 0."""
    fingerprint: int
    """h of the held wave if armed, else 0."""
    want_drop: bool
    """Not armed, and no leader was heard for `drop_after_s`."""
    wave: WaveKey | None
    """The wave held, armed or not."""


@dataclass(slots=True)
class HeldWave:
    """The wave between its Prepare and its end. Streams are where each answer was last asked for."""

    prepare: Prepare
    placement: Placement
    """The map it brings."""
    refusal: Vote
    """The no to repeat once it is given up."""
    vote_stream: int
    ack_stream: int
    abort_stream: int | None = None
    """None until someone asked to abort."""
    outcome: WaveOutcome = WaveOutcome.DROPPED
    """How it ends unless it swaps."""


class EndedWaves:
    """Waves that ended at the present epoch, so that a late repeat of a message is known as one.

    Waves of earlier epochs need no memory: their base is stale (R3).
    """

    def __init__(self) -> None:
        self._outcomes: dict[WaveKey, WaveOutcome] = {}

    def outcome(self, wave: WaveKey) -> WaveOutcome | None:
        """How a wave ended here; None if it is not known."""
        return self._outcomes.get(wave)

    def add(self, wave: WaveKey, outcome: WaveOutcome) -> WaveOutcome:
        """Remember an end; the first one stays."""
        if len(self._outcomes) >= _MAX_ENDED:
            del self._outcomes[next(iter(self._outcomes))]
        return self._outcomes.setdefault(wave, outcome)

    def clear(self) -> None:
        """The epoch rose."""
        self._outcomes.clear()
