"""Record a simulation run as events of the model."""

from dataclasses import replace
from typing import Any

from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState
from tests.quint.terms import EMPTY, HOLD, Terms, envelope, fields
from tests.quint.values import Record
from tests.sim.kit import Kit
from tests.sim.run import FleetWorld

_LEFT_OUT = (msg.EngineRebalanced, msg.SwapFailed)
"""Events that the model leaves out: a trace ends there."""


class Recorder:
    """The events of one run of one deployment, in the terms of the model."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.ended_by = ""
        self.world: Any = None
        self._terms = Terms(self._place)
        self._messages: dict[int, tuple[Any, Record]] = {}
        """Answers that ranks have made up, by the id of the message, which is kept alive."""
        self._sending: Record | None = None
        """The answer that leaves a rank at this moment."""
        self._rows: dict[Any, bytes] = {}
        """The rows that the first Prepare of each wave has."""
        self._digests: dict[str, int] = {}
        self._saved: dict[tuple[int, str], int] = {}
        self._places: dict[int, int] = {}
        self._passed: dict[int, int] = {}
        """Boundaries that each rank has reached."""
        self._inside: set[int] = set()
        """Ranks at a boundary whose step is not computed yet."""

    def add(self, label: str, value: Any = EMPTY) -> None:
        """Add an event, unless the trace has ended."""
        if not self.ended_by:
            self.events.append((label, value))

    def end(self, why: str) -> None:
        """End the trace before an event that the model leaves out."""
        self.ended_by = self.ended_by or why

    def kit(self, kit: Kit) -> Kit:
        """Return the kit with a participant and a gate that record what they do."""
        return replace(
            kit,
            participant=_recorded_participant(kit.participant, self),
            gate=_recorded_gate(kit.gate, self),
        )

    def attach(self, world: FleetWorld) -> None:
        """Record what happens in a world that has not begun yet."""
        self.world = world
        fleet, network, checks = self.world.fleet, self.world.network, self.world.checks
        start, remember, exchange = fleet.start, fleet.remember, fleet.exchange
        to_rank, to_replica, outcome = network.to_rank, network.to_replica, checks.outcome
        send, write = network.send, world.store.write

        def started() -> None:
            start()
            self.group_started(fleet)

        def remembered(site: Any, epoch: int, placement: Any) -> None:
            self.add("Saved", site.rank.rank)
            self._saved[epoch, placement.digest] = self._places[site.rank.rank]
            remember(site, epoch, placement)

        def exchanged(generation: Any) -> None:
            for rank in fleet.ranks:
                self.reach(rank.rank, rank.gate.calls)
                self.compute(rank.rank, False)
            exchange(generation)

        def sent_to_rank(stream: Any, message: Any) -> None:
            if stream.rank.fleet is fleet:
                if isinstance(message, msg.Prepare) and self._differs(message):
                    self.end("ranks are sent different Prepares of one wave")
                self.add("LeaderSent", self._terms.controller_message(stream.rank, message))
            to_rank(stream, message)

        def sent_to_replica(stream: Any, message: Any) -> None:
            if stream.rank.fleet is fleet:
                self.sends(stream.rank, message)
            to_replica(stream, message)

        def sent(stream: Any, deliver: Any, message: Any) -> None:
            send(stream, self.hearing(stream, deliver), message)

        def written(deployment: Any, action: Any, leader: Any) -> None:
            # A leader of the simulation may learn late that a write failed, which no shell does. So
            # what it tried to store counts here.
            if isinstance(action, ctl.PersistIntent) and leader is not None:
                wave = self._terms.wave(action.wave)
                self.add("Intended", fields(term=leader.term, wave=wave))
            write(deployment, action, leader)

        def recorded(deployment: Any, wave: Any, committed: bool) -> None:
            if wave in self._terms.waves:
                self.add("Recorded", fields(wave=self._terms.waves[wave], committed=committed))
            outcome(deployment, wave, committed)

        fleet.start, fleet.remember, fleet.exchange = started, remembered, exchanged
        network.to_rank, network.to_replica = sent_to_rank, sent_to_replica
        network.send, world.store.write = sent, written  # type: ignore[method-assign]
        checks.outcome = recorded

    def _differs(self, prepare: msg.Prepare) -> bool:
        """Return True if another Prepare of this wave had other rows."""
        rows = prepare.body.rows.tobytes()
        return self._rows.setdefault(prepare.wave, rows) != rows

    # --- the group --------------------------------------------------------------------------------

    def group_started(self, fleet: Any) -> None:
        """Record a start of the whole group."""
        part = fleet.ranks[0].sites[self.world.deployments[0]].participant
        place = self._saved.get((part.epoch, part.placement.digest), 0)
        if fleet.generations > 1:
            start = fields(epoch=int(part.epoch), place=place, version=part.weights_version)
            self.add("GroupRestarted", start)
        self._saved[part.epoch, part.placement.digest] = place
        self._places = dict.fromkeys(range(fleet.num_ranks), place)
        self._digests[part.placement.digest] = place
        self._passed = dict.fromkeys(range(fleet.num_ranks), 0)
        self._inside.clear()

    def reach(self, rank: int, boundary: int) -> None:
        """Record that a rank has reached a boundary, unless it was there already."""
        if self._passed[rank] < boundary:
            self._passed[rank] = boundary
            self._inside.add(rank)
            self.add("Boundary", rank)

    def compute(self, rank: int, polled: bool) -> None:
        """Record that a rank begins its step, unless it did so already."""
        if rank in self._inside:
            self._inside.discard(rank)
            self.add("Computed", fields(rank=rank, polled=polled))

    # --- one rank ---------------------------------------------------------------------------------

    def seen(self, part: Any) -> None:
        """Record the state of a rank that an observer sees."""
        hold = HOLD[part.state]
        wave = 0 if hold == "Nothing" else self._terms.wave(part.wave)
        seen = fields(rank=part.identity.rank, hold=(hold, EMPTY), wave=wave)
        self.add("Seen", seen.having("epoch", int(part.epoch)))

    def says(self, part: Any, message: Any) -> None:
        """Record an answer that a rank has made up."""
        record = self._terms.answer(part, message)
        if record is None:
            return
        self._messages[id(message)] = message, record
        self.add("Says", record)

    def sends(self, rank: Any, message: Any) -> None:
        """Record that an answer or a Hello leaves a rank."""
        if isinstance(message, msg.Hello):
            named = fields(wave=0, epoch=int(message.epoch))
            self.add("Sends", envelope(rank, None, ("Ack", named)))
        elif id(message) in self._messages:
            self._sending = self._messages[id(message)][1]
            self.add("Sends", self._sending)

    def hearing(self, stream: Any, deliver: Any) -> Any:
        """Return what delivers a message; if it is an answer, record that its leader heard it."""
        answer, self._sending = self._sending, None
        if answer is None:
            return deliver
        heard = fields(leader=int(stream.replica.name[1:]), message=answer)

        def delivered(*args: Any) -> None:
            self.add("LeaderHeard", heard)
            deliver(*args)

        return delivered

    def _place(self, rank: int, digest: str) -> int:
        place = self._places[rank]
        return place if self._digests.get(digest) == place else -9

    def handle(self, part: Any, event: Any, take: Any) -> list:
        """Record one event of a participant, and what it answers."""
        rank = part.identity.rank
        before, held, accepts = part.state, part.wave, True
        if isinstance(event, _LEFT_OUT) or self._is_left_out(part, event):
            self.end(type(event).__name__)
        reloading = part.reloading
        if isinstance(event, msg.FromController):
            accepts = part.accepts_leader(event.message.leader)
        actions: list = take()
        match event:
            case msg.FromController(message=message):
                self._got(part.identity, message, accepts, actions, held)
            case msg.StagingFinished() if before is ParticipantState.STAGING != part.state:
                self.add("Copied", fields(rank=rank, good=True))
                self.add("Voted", fields(rank=rank, yes=True))
            case msg.StagingFailed() if before is ParticipantState.STAGING != part.state:
                self.add("Voted", fields(rank=rank, yes=False))
            case msg.TransportDrained() if before is ParticipantState.ABORTED != part.state:
                self.add("Drained", fields(rank=rank, wave=self._terms.wave(event.wave)))
            case msg.SwapFinished():
                self._places[rank] = self._terms.wave(event.wave)
                self._digests[part.placement.digest] = self._places[rank]
                self.add("Swapped", rank)
            case msg.ReloadRequested() if not reloading:
                self.add("ReloadAsked", rank)
            case msg.WeightsReloaded():
                self.add("Reloaded", rank)
        self.seen(part)
        for action in actions:
            if isinstance(action, msg.SendToController):
                self.says(part, action.message)
        return actions

    def is_foreign(self, part: Any) -> bool:
        """Return True for a rank of another group."""
        return not part.identity.generation.startswith(self.world.fleet.name)

    def _is_left_out(self, part: Any, event: Any) -> bool:
        foreign = self.is_foreign(part)
        if isinstance(event, msg.WeightsReloaded):
            raised = event.weights_version == part.weights_version + 1
            return foreign or not part.reloading or not raised
        return foreign

    def _got(self, rank: Any, message: Any, accepts: bool, actions: list, held: Any) -> None:
        record = self._terms.controller_message(rank, message)
        if not accepts:
            self.add("RankRefused", record)
            return
        stages = any(isinstance(action, msg.StartStaging) for action in actions)
        refuses = isinstance(message, msg.Prepare) and not stages and held is None
        self.add("RankGot", fields(message=record, again=True, refuses=refuses))


def _recorded_participant(kind: type, recorder: Recorder) -> type:
    def handle(self: Any, event: Any, now: float) -> list:
        return recorder.handle(self, event, lambda: kind.handle(self, event, now))  # type: ignore[attr-defined]

    def snapshot(self: Any, now: float) -> Any:
        view = kind.snapshot(self, now)  # type: ignore[attr-defined]
        if view.want_drop and not recorder.is_foreign(self):
            recorder.add("LeaderLost", self.identity.rank)
        return view

    return type(kind.__name__, (kind,), {"handle": handle, "snapshot": snapshot})


def _recorded_gate(kind: Any, recorder: Recorder) -> type:
    def reached(gate: Any) -> None:
        part = gate.participants[0]
        if not recorder.is_foreign(part):
            recorder.reach(int(part.identity.rank), gate.calls)

    def advance(self: Any) -> bool:
        due = bool(kind.advance(self))
        if not due:
            reached(self)
        return due

    def handle(self: Any, event: Any, now: float) -> list:
        reached(self)
        return list(kind.handle(self, event, now))

    def begin_poll(self: Any, now: float) -> Any:
        reached(self)
        vector = kind.begin_poll(self, now)
        part = self.participants[0]
        if not recorder.is_foreign(part):
            recorder.compute(int(part.identity.rank), True)
        return vector

    members = {"advance": advance, "handle": handle, "begin_poll": begin_poll}
    return type(kind.__name__, (kind,), members)
