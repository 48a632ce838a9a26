"""Names of the machines' waves, placements and messages in the terms of the model."""

from collections.abc import Callable
from typing import Any

from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState, WaveOutcome
from tests.quint.values import Record

EMPTY: tuple = ()
HOLD = {
    ParticipantState.IDLE: "Nothing",
    ParticipantState.STAGING: "Staging",
    ParticipantState.PREPARED: "Prepared",
    ParticipantState.ARMED: "Armed",
    ParticipantState.SWAPPING: "Swapping",
    ParticipantState.ABORTED: "Nothing",
}


class Terms:
    """The names of one run's waves, and messages in the terms of the model.

    Args:
        place: returns the model's name of a placement, from a rank and a digest.
    """

    def __init__(self, place: Callable[[int, str], int]) -> None:
        self.waves: dict[Any, int] = {}
        self._place = place

    def wave(self, key: Any) -> int:
        """Return the model's name of a wave."""
        return self.waves.setdefault(key, len(self.waves) + 1)

    def wave_record(self, key: Any, base: int) -> Record:
        """Return the model's wave of a key."""
        return fields(id=self.wave(key), base=int(base), version=int(key.weights_version))

    def controller_message(self, rank: Any, message: Any) -> Record:
        """Return a controller's message in the terms of the model."""
        kind = type(message).__name__
        match message:
            case msg.Prepare():
                body: tuple = kind, self.wave_record(message.wave, message.base_epoch)
            case msg.Commit() | msg.Abort():
                body = kind, self.wave_record(message.wave, 0)
            case _:
                body = "Query", EMPTY
        return envelope(rank, message.leader, body)

    def answer(self, part: Any, message: Any) -> Record | None:
        """Return a rank's answer in the terms of the model; None if the model has none such."""
        match message:
            case msg.Vote():
                body: tuple = "Vote", fields(wave=self.wave(message.wave), yes=message.yes)
            case msg.Ack():
                body = "Ack", self._ack(message)
            case msg.AbortAnswer(outcome=WaveOutcome.SWAPPED):
                body = "Ack", self._ack(message)
            case msg.AbortAnswer():
                body = "Dropped", self._ack(message).having("drained", message.drained)
            case msg.RankState():
                body = "RankState", self._rank_state(part, message)
            case _:
                return None
        return envelope(part.identity, part.leader, body)

    def _ack(self, message: Any) -> Record:
        return fields(wave=self.wave(message.wave), epoch=int(message.epoch))

    def _rank_state(self, part: Any, message: msg.RankState) -> Record:
        hold = HOLD[message.state]
        base = part.prepare.base_epoch if part.prepare is not None else 0
        held = self.wave_record(message.wave, base) if message.wave is not None else None
        return fields(
            epoch=int(message.epoch),
            place=self._place(int(part.identity.rank), message.placement_digest),
            hold=(hold, EMPTY),
            wave=fields(id=0, base=0, version=0) if hold == "Nothing" or held is None else held,
            drained=message.drained,
            version=int(message.weights_version),
        )


def envelope(rank: Any, leader: Any, body: tuple) -> Record:
    """Return a message of the model between a rank and a leader; a leader of None has term 0."""
    name = int(leader.leader_id[1:]) if leader is not None else -1
    term = leader.term if leader is not None else 0
    gen = int(rank.generation[1:])
    return fields(rank=int(rank.rank), leader=name, term=term, gen=gen, body=body)


def fields(**values: Any) -> Record:
    """Return a record with these fields."""
    return Record(values)
