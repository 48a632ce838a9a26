"""The rule about Commit: nobody arms a rank before the wave is decided."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.judge.case import Breach, Case, WaveId, wave_in, wave_of
from tests.chaos.judge.wire import Moment, WireMessage

__all__ = ["commits_follow_votes_and_intent"]

_SWAPPED = 1
"""WaveOutcome on the wire."""
_HOLDING = frozenset({3, 4, 5})
"""ParticipantState on the wire: prepared, armed, swapping."""
_RULE = "no Commit before votes and intent"


@dataclass(slots=True)
class _Heard:
    """The answers that one replica received about one wave."""

    yes: set[int] = field(default_factory=set)
    """Ranks whose yes arrived."""
    no: set[int] = field(default_factory=set)
    holding: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Query -> ranks that answered it and hold the wave, ready to swap."""
    swapped: bool = False
    """Some rank said that it had swapped."""


def commits_follow_votes_and_intent(case: Case) -> Iterator[Breach]:
    """A Commit follows a yes of every rank and the stored intent, or what a new leader found.

    A new leader may send Commit without them if some rank has swapped, or if every rank told it
    that it holds the wave, ready to swap.
    """
    heard: dict[tuple[str, WaveId], _Heard] = defaultdict(_Heard)
    intents = _intents(case)
    for moment, message in _in_order(case):
        controller = message.stream.controller
        if message.from_rank:
            _hear(case, heard, controller, message)
            continue
        body = message.body
        wave, found = wave_of(body.wave), heard[controller, wave_of(body.wave)]
        stored = intents.get((wave, body.leader.term))
        voted = len(found.yes) == case.num_ranks and not found.no
        intended = stored is not None and stored < moment
        recovered = any(len(ranks) == case.num_ranks for ranks in found.holding.values())
        if not (found.swapped or recovered or (voted and intended)):
            yield Breach(
                _RULE,
                f"{controller} sent Commit of {wave} after yes of ranks {sorted(found.yes)},"
                f" no of {sorted(found.no)}, intent {'stored' if intended else 'not stored'}",
                message.read.unix,
                message.place,
            )


def _intents(case: Case) -> dict[tuple[WaveId, int], Moment]:
    """Return when the store's answer to an intent was passed on, by wave and term."""
    found: dict[tuple[WaveId, int], Moment] = {}
    for write in case.wire.writes:
        if write.name != "intent" or not write.accepted or write.answered is None:
            continue
        wave = wave_in(json.loads(write.body))
        found.setdefault((wave, write.term), write.answered)
    return found


def _in_order(case: Case) -> list[tuple[Moment, WireMessage]]:
    """Return what controllers can have heard, and their Commits, in the order of the wire.

    A rank's message counts from when it was passed on, a Commit from when it was read.
    """
    found = []
    for message in case.messages:
        if message.from_rank and message.passed is not None:
            found.append((message.passed, message))
        elif message.kind == "commit":
            found.append((message.read, message))
    return sorted(found, key=lambda pair: pair[0])


def _hear(
    case: Case, heard: dict[tuple[str, WaveId], _Heard], controller: str, message: WireMessage
) -> None:
    process = case.process_of(message.stream)
    assert process is not None
    body: Any = message.body
    match message.kind:
        case "vote":
            of_wave = heard[controller, wave_of(body.wave)]
            (of_wave.yes if body.yes else of_wave.no).add(process.rank)
        case "ack":
            heard[controller, wave_of(body.wave)].swapped = True
        case "abort_answer" if body.outcome == _SWAPPED:
            heard[controller, wave_of(body.wave)].swapped = True
        case "rank_state":
            if body.HasField("last_wave") and body.last_outcome == _SWAPPED:
                heard[controller, wave_of(body.last_wave)].swapped = True
            if body.HasField("wave") and body.state in _HOLDING:
                found = heard[controller, wave_of(body.wave)].holding
                found[body.query].add(process.rank)
