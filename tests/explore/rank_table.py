"""The states of a rank and the messages that were met, as numbers, and the steps between them.

A machine is a function of its state and the event, so every step is run once and remembered.
"""

from typing import Any, NamedTuple

from evenkeel_moe.errors import IllegalEvent
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState
from tests.explore.freeze import AGES_AGO, Freezer, clone, normalise
from tests.explore.invariants import UNEXPECTED, Violation
from tests.explore.rank import DRAINING, FAILED, Outputs, RankProcess
from tests.explore.small import SLOTS
from tests.sim.kit import Kit

Broken = Violation | None
ERRORS = (Violation, IllegalEvent, AssertionError)


def as_violation(error: Exception) -> Violation:
    """Return an error of a machine as a broken invariant."""
    if isinstance(error, Violation):
        return error
    return Violation(UNEXPECTED, f"{type(error).__name__}: {error}"[:300])


class Messages:
    """Every message between controller and ranks, without the number of its rank."""

    def __init__(self) -> None:
        self.met: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._freezer = Freezer(None)

    def number(self, message: Any) -> int:
        """Return the number of a message; equal messages have the same."""
        key = self._freezer.freeze(message)
        number = self._numbers.setdefault(key, len(self.met))
        if number == len(self.met):
            self.met.append(message)
        return number


class RankStep(NamedTuple):
    """The result of one event of a rank."""

    after: int
    out: Outputs
    sends: tuple[tuple[int, int], ...]
    """(stream, number of the message)."""
    broken: Broken


class RankFacts(NamedTuple):
    """The parts of a rank's state that decide which events are possible."""

    state: ParticipantState
    events: tuple[str, ...]
    """The events of its own threads that are possible now."""
    moving: tuple[int, ...]
    """The layer of each wave whose bytes have not arrived; more than one only in a mutant."""
    stream: int
    newest_stream: int
    """The highest number of a stream that a message of its own may name."""
    passed: bool
    resolves: bool
    """True if it uses the result of a poll at its next boundary."""
    vector: tuple[int, ...] | None
    earlier: tuple[int, ...] | None
    reload: str
    leaderless: bool
    polls: bool
    """True if a poll may change this rank: it is armed or drops with all, or a poll saw it so."""
    shown: tuple[int, str, int, int]
    """(epoch, digest, weights version, communicator) in the exchange of tokens."""
    bytes: tuple
    life: int
    term: int
    """The term of the newest leader that it has heard; 0 for none."""
    pending: bool
    """True if one of its threads has something to do, besides the steps of the engine."""


class RankTable:
    """The states of a rank; 0 is a rank that has died."""

    def __init__(self, kit: Kit, messages: Messages) -> None:
        self.kit = kit
        self.messages = messages
        self.machines: list[RankProcess | None] = [None]
        self.facts: list[RankFacts | None] = [None]
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple, RankStep] = {}
        self._freezer = Freezer(None)

    def start(self, generation, life: int, epoch, placement: Placement, version: int) -> int:
        """Return the state of a process that starts."""
        return self._intern(RankProcess(self.kit, generation, life, epoch, placement, version))

    def _intern(self, machine: RankProcess) -> int:
        key = self._freezer.freeze(normalise(machine))
        number = self._numbers.setdefault(key, len(self.machines))
        if number == len(self.machines):
            self.machines.append(machine)
            self.facts.append(_facts(machine))
        return number

    def step(self, number: int, event: tuple) -> RankStep:
        """Return the result of an event; a message in it is given by its number."""
        known = self._steps.get((number, event))
        if known is None:
            known = self._steps[number, event] = self._run(number, event)
        return known

    def _run(self, number: int, event: tuple) -> RankStep:
        machine = clone(self.machines[number])
        given = (*event[:2], self.messages.met[event[2]]) if event[0] == "message" else event
        try:
            out = machine.take(given)
        except ERRORS as error:
            return RankStep(number, Outputs(), (), as_violation(error))
        sends = tuple((stream, self.messages.number(message)) for stream, message in out.sends)
        return RankStep(0 if out.left else self._intern(machine), out, sends, None)


def _facts(machine: RankProcess) -> RankFacts:
    part, phases = machine.participant, [copies.phase for copies in machine.copies]
    moving = tuple(copies.prepare.body.layers[0] for copies in machine.moving)
    events = []
    if DRAINING in phases and not machine.broken:
        events.append("drained")
    if FAILED in phases and part.state is ParticipantState.STAGING:
        events.append("lost")
    if machine.saving:
        events.append("save")
    if machine.reload == "loaded":
        events.append("report_reload")
    streams = [part._stream, *(a.stream for a in machine.barrier._held)]
    if part.held is not None:
        held = part.held
        streams += [held.stream, held.abort_stream or 0]
    return RankFacts(
        state=part.state,
        events=tuple(events),
        moving=moving,
        stream=machine.stream,
        newest_stream=max(streams),
        passed=machine.passed,
        resolves=machine.gate._began is not None,
        vector=machine.vector,
        earlier=machine.earlier,
        reload=machine.reload,
        leaderless=part._heard_at is None or part._heard_at == AGES_AGO,
        polls=_polls(machine),
        shown=(machine.epoch, machine.map.digest, machine.version, machine.serial),
        bytes=tuple(machine.bytes),
        life=part.identity.incarnation,
        term=part.leader.term if part.leader is not None else 0,
        pending=bool(events or moving) or machine.broken or bool(machine.reload),
    )


def _polls(machine: RankProcess) -> bool:
    part, view = machine.participant, machine.participant.poll
    drops = part.held is not None and part.leaderless(0.0)
    seen = view is not None and (view.armed_epoch > 0 or (view.want_drop and view.wave is not None))
    return part.state is ParticipantState.ARMED or drops or seen or machine.broken


def copied(source: tuple, layer: int) -> tuple:
    """Return the bytes that a rank gets for the two slots of a layer from its neighbour's slots."""
    return tuple(source[layer * SLOTS + 1 - local] for local in range(SLOTS))


def with_rank(message: Any, rank: Any) -> Any:
    """Return a rank's message with the number of its rank."""
    identity = getattr(message, "identity", None)
    if identity is None:
        return message
    fields = {
        name: getattr(message, name) for name in message.__dataclass_fields__ if name != "identity"
    }
    renamed = msg.RankIdentity(identity.deployment, rank, identity.generation, identity.incarnation)
    return type(message)(identity=renamed, **fields)
