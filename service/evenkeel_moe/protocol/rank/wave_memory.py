"""A participant's memory of waves: the one it holds, the ended ones, and the view of a poll."""

from dataclasses import dataclass
from typing import NamedTuple

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey, hash_of
from evenkeel_moe.protocol.messages import Prepare, Vote, WaveOutcome

_MAX_ENDED = 1024
"""Waves remembered as ended at one epoch; far more than a network can still deliver."""


class PollView(NamedTuple):
    """A participant's part of the gate's vector, as one poll took it."""

    armed_epoch: int
    """The epoch after the held wave if the rank is armed, else 0."""
    fingerprint: int
    """`HeldWave.fingerprint` if the rank is armed, else 0."""
    want_drop: bool
    """True if the rank is not armed and heard no leader for `drop_after_s`."""
    wave: WaveKey | None
    """The held wave, armed or not."""


@dataclass(slots=True)
class HeldWave:
    """A wave between its Prepare and its end."""

    prepare: Prepare
    placement: Placement
    """The placement after the wave."""
    refusal: Vote
    """The no that is repeated once the rank has given the wave up."""
    stream: int
    """The stream on which the rank was last asked for its vote, then for its Ack."""
    abort_stream: int | None = None
    """The stream of the last Abort; None until one arrives."""
    outcome: WaveOutcome = WaveOutcome.DROPPED
    """The outcome if the wave does not swap."""

    @property
    def fingerprint(self) -> int:
        """62-bit hash of the wave's key and the map after it, h in the gate's vector; never 0.

        Ranks that were sent different rows under one key must not swap together.
        """
        return hash_of(f"{self.prepare.wave.fingerprint}/{self.placement.digest}")


class EndedWaves:
    """The waves that ended at the present epoch; they identify late copies of a message.

    Waves of earlier epochs are not kept: their base is stale (R3).
    """

    def __init__(self) -> None:
        self._outcomes: dict[WaveKey, WaveOutcome] = {}

    def outcome(self, wave: WaveKey) -> WaveOutcome | None:
        """Return how a wave ended on this rank; None if it is unknown."""
        return self._outcomes.get(wave)

    def add(self, wave: WaveKey, outcome: WaveOutcome) -> WaveOutcome:
        """Remember the end of a wave, and return its first outcome, which stays."""
        if wave not in self._outcomes and len(self._outcomes) >= _MAX_ENDED:
            del self._outcomes[next(iter(self._outcomes))]
        return self._outcomes.setdefault(wave, outcome)

    def clear(self) -> None:
        """Forget all waves: the epoch has risen."""
        self._outcomes.clear()
