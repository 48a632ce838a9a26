"""The ranks of a run of the model, as real machines.

Each event of the run becomes an event of a real participant, gate or save barrier. After it the
machine must be in the model's state, and must have answered what the model lets a rank say.
"""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState
from evenkeel_moe.protocol.rank.gate import Gate, PollResolved
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier
from tests.quint.terms import HOLD, Terms
from tests.quint.values import Record
from tests.quint.walks import FROM_LEADER, Step
from tests.quint.waves import Waves
from tests.sim.kit import Kit

_DROP_AFTER_S = 30.0


class DifferenceError(Exception):
    """The machine and the model differ."""


@dataclass
class Rank:
    """The machines of one rank, and what their shell knows."""

    number: int
    participant: Participant
    gate: Gate
    barrier: SaveBarrier
    now: float = 0.0
    """The rank's clock in seconds."""
    permitted: bool = False
    """True if the engine may load other weights."""
    swap: msg.Swap | None = None
    """The swap that is under way."""
    rebuilt: bool = False
    """True if the last poll made the rank build another communicator."""


@dataclass
class RankReplay:
    """The ranks of one run of the model: each event of the run is one of a real machine.

    Args:
        model: the model's definitions.
        start: its first state.
        kit: the classes of the machines.
    """

    model: SimpleNamespace
    start: Record
    kit: Kit
    ranks: dict[int, Rank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.start
        self.waves = Waves(len(self.start["ranks"]))
        self.terms = Terms(lambda _rank, digest: self.waves.places.get(digest, -9))
        self._polls: dict[int, dict[int, Any]] = {}
        self._start_group()

    def take(self, step: Step) -> None:
        """Take one event of the run. Raises: DifferenceError."""
        for message in step.refused:
            self._refuse(message)
        before, self.state = self.state, step.state
        label, value = step.event
        if label in _RANK_EVENTS:
            rank = self.ranks[_number(value)]
            getattr(self, _RANK_EVENTS[label])(rank, value, before)
            if step.told is not None:
                self._told(rank, step.told)
            self._drain(rank)
            self._compare(rank)
        elif label == "WaveBegun":
            self._wave_begun(value["leader"])
        elif label == "GroupRestarted":
            self._start_group()

    # --- the group --------------------------------------------------------------------------------

    def _start_group(self) -> None:
        self._polls.clear()
        config = self.state["config"]
        for number, known in sorted(self.state["ranks"].items()):
            identity = msg.RankIdentity(
                DeploymentId("d"), EpRank(number), Generation(f"g{known['gen']}"), known["gen"]
            )
            participant = self.kit.participant(
                identity,
                self.waves.shape,
                self.waves.placements[known["place"]],
                epoch=Epoch(known["epoch"]),
                weights_version=known["version"],
                checksums=self.waves.checksums(known["version"]),
                staging_bytes=10**6,
                drop_after_s=_DROP_AFTER_S,
            )
            gate = self.kit.gate(
                [participant], poll_every=config["every"], resolve_after=config["delay"]
            )
            self.ranks[number] = Rank(number, participant, gate, self.kit.barrier())
        minima = np.minimum.reduce([rank.gate.agreement() for rank in self.ranks.values()])
        for rank in self.ranks.values():
            rank.gate.settle(minima)
            self._compare(rank)

    def _wave_begun(self, number: int) -> None:
        leader = self.state["leaders"][number]
        self.waves.begin(leader["wave"], leader["gen"])
        self.terms.waves = self.waves.named()

    # --- steps of the engine ----------------------------------------------------------------------

    def _boundary(self, rank: Rank, _value: Any, before: Record) -> None:
        gate, delay = rank.gate, self.state["config"]["delay"]
        began = self.state["ranks"][rank.number]["boundary"] - delay
        ballots = before["polls"].get(began)
        advanced = gate.advance()
        self._equal("a result is due", advanced and gate.resolve_due, ballots is not None)
        rank.rebuilt = False
        if ballots is None:
            return
        minima = np.minimum.reduce(list(self._polls[began].values()))
        for item in gate.handle(PollResolved(minima), rank.now):
            self._carry(rank, [item.action])
        wanted = any(not ballot["connected"] for ballot in ballots.values())
        self._equal("builds a communicator", rank.rebuilt, wanted)

    def _computed(self, rank: Rank, value: Any, _before: Record) -> None:
        self._equal("a swap is under way", rank.swap, None)
        self._equal("a poll is due", rank.gate.poll_due, value["polled"])
        if not value["polled"]:
            return
        known = self.state["ranks"][rank.number]
        ballot = self.state["polls"][known["boundary"]][rank.number]
        vector = rank.gate.begin_poll(rank.now).tolist()
        self._polls.setdefault(known["boundary"], {})[rank.number] = np.array(vector, np.int64)
        armed = ballot["armed"]
        held = rank.participant.held if armed else None
        wave = self.waves.key(ballot["wave"]) if armed else None
        self._equal("polls as armed for", vector[5], known["epoch"] + 1 if armed else 0)
        self._equal("polls with the wave", held.prepare.wave if held else None, wave)
        self._equal("polls with its map", vector[7], held.fingerprint if held else 0)
        self._equal("wants to drop", vector[9] == 1, ballot["drop"] and not armed)
        self._equal(
            "has a communicator", -vector[0] <= rank.gate.transport_serial, ballot["connected"]
        )

    def _swapped(self, rank: Rank, _value: Any, _before: Record) -> None:
        part, swap = rank.participant, rank.swap
        if swap is None or part.next_placement is None:
            raise DifferenceError(f"rank {rank.number} has nothing to swap")
        rank.swap = None
        rank.barrier.begin(part.epoch, part.placement.digest)
        self._feed(rank, msg.SwapFinished(swap.wave, part.next_placement.digest))

    def _saved(self, rank: Rank, _value: Any, _before: Record) -> None:
        for answer in rank.barrier.end():
            self._send(rank, answer)

    def _crashed(self, rank: Rank, _value: Any, _before: Record) -> None:
        """The process ends; the supervisor starts the whole group again."""

    def _leader_lost(self, rank: Rank, _value: Any, _before: Record) -> None:
        rank.now += _DROP_AFTER_S

    def _reload_asked(self, rank: Rank, _value: Any, _before: Record) -> None:
        self._feed(rank, msg.ReloadRequested())

    def _reloaded(self, rank: Rank, _value: Any, _before: Record) -> None:
        self._equal("may load", rank.permitted, True)
        rank.permitted = False
        version = self.state["ranks"][rank.number]["version"]
        self._feed(rank, msg.WeightsReloaded(version, self.waves.checksums(version)))

    # --- copies -----------------------------------------------------------------------------------

    def _copied(self, rank: Rank, _value: Any, _before: Record) -> None:
        """Bytes reach the staging memory, which the machines do not see."""

    def _voted(self, rank: Rank, value: Any, before: Record) -> None:
        wave = self.waves.key(before["ranks"][rank.number]["wave"]["id"])
        if value["yes"]:
            self._feed(rank, msg.StagingFinished(wave))
        else:
            self._feed(rank, msg.StagingFailed(wave, Reason.CHECKSUM_MISMATCH))

    def _drained(self, rank: Rank, value: Any, _before: Record) -> None:
        self._feed(rank, msg.TransportDrained(self.waves.key(value["wave"])))

    def _disconnected(self, rank: Rank, _value: Any, _before: Record) -> None:
        rank.gate.request_rebuild(rank.gate.transport_serial)

    def _drain(self, rank: Rank) -> None:
        """Report that nothing of a dropped wave is under way, if the model says so."""
        part = rank.participant
        if part.state is ParticipantState.ABORTED and part.wave is not None:
            if self.terms.wave(part.wave) not in self.state["ranks"][rank.number]["posted"]:
                self._feed(rank, msg.TransportDrained(part.wave))

    # --- messages ---------------------------------------------------------------------------------

    def _got(self, rank: Rank, value: Any, _before: Record) -> None:
        event = msg.FromController(0, self._message(value["message"]))
        if not value["refuses"]:
            self._feed(rank, event)
            return
        for each in (msg.MigrationDisabled(), event, msg.MigrationEnabled()):
            self._feed(rank, each)

    def _refuse(self, message: Record) -> None:
        """Offer a rank a message that the model refuses. A stream belongs to one generation."""
        number = message["rank"]
        known = self.state["ranks"][number]
        offered = message["gen"] == known["gen"] and message["body"][0] in FROM_LEADER
        if not (offered and known["up"] and message in self.state["net"]):
            return
        rank = self.ranks[number]
        event = msg.FromController(0, self._message(message))
        answers = rank.participant.handle(event, rank.now)
        refused = [
            isinstance(answer, msg.SendToController) and isinstance(answer.message, msg.TermRefused)
            for answer in answers
        ]
        self._equal(f"refuses {message}", refused, [True])
        self._compare(rank)

    def _message(self, message: Record) -> msg.ControllerMessage:
        leader = msg.Leader(f"c{message['leader']}", message["term"])
        match message["body"]:
            case ("Prepare", wave):
                return self.waves.prepare(wave["id"], leader)
            case ("Commit", wave):
                return msg.Commit(leader, self.waves.key(wave["id"]))
            case ("Abort", wave):
                return msg.Abort(leader, self.waves.key(wave["id"]))
        return msg.QueryState(leader)

    def _feed(self, rank: Rank, event: object) -> None:
        self._carry(rank, rank.participant.handle(event, rank.now))

    def _carry(self, rank: Rank, actions: list) -> None:
        for action in actions:
            match action:
                case msg.SendToController():
                    record = self.terms.answer(rank.participant, action.message)
                    self._allowed(rank, "says", record)
                    for answer in rank.barrier.outgoing(action):
                        self._send(rank, answer)
                case msg.StartStaging(prepare=prepare):
                    if not self.state["ranks"][rank.number]["connected"]:
                        failed = msg.StagingFailed(prepare.wave, Reason.TRANSPORT_NOT_DRAINED)
                        self._feed(rank, failed)
                case msg.CancelStaging():
                    pass  # `_drain` reports the end.
                case msg.Swap():
                    rank.swap = action
                case msg.PermitReload():
                    rank.permitted = True
                case msg.RebuildTransport():
                    rank.rebuilt = True
                case _:
                    raise DifferenceError(f"rank {rank.number}: {action}")

    def _send(self, rank: Rank, answer: msg.SendToController) -> None:
        self._allowed(rank, "sends", self.terms.answer(rank.participant, answer.message))

    def _allowed(self, rank: Rank, verb: str, record: Record | None) -> None:
        after = getattr(self.model, verb)(self.state, record)
        if not after["ok"]:
            raise DifferenceError(f"rank {rank.number} {verb} {record}: {after['why']}")

    def _told(self, rank: Rank, told: Record) -> None:
        """Ask the machine what the model's rank has said, on a copy of it."""
        label, content = told["body"]
        assert rank.participant.leader is not None
        question: Any = msg.QueryState(rank.participant.leader)
        if label != "RankState":
            key = self.waves.key(content["wave"])
            if key.generation != rank.participant.identity.generation:
                return  # No leader asks about a wave of an earlier generation.
            question = msg.Commit(rank.participant.leader, key)
            if label == "Dropped":
                question = msg.Abort(rank.participant.leader, key)
            elif label == "Vote":
                question = self.waves.prepare(content["wave"], rank.participant.leader)
        self._equal("answers", self._asked(rank, question), _cautious(rank, told))

    def _asked(self, rank: Rank, question: Any) -> Record | None:
        part = copy.copy(rank.participant)
        if not isinstance(question, msg.QueryState):
            part._ended = copy.deepcopy(part._ended)
            part.held = copy.copy(part.held)
        actions = part.handle(msg.FromController(0, question), rank.now)
        answers = [each for each in actions if isinstance(each, msg.SendToController)]
        return self.terms.answer(part, answers[-1].message) if answers else None

    # --- comparison -------------------------------------------------------------------------------

    def _compare(self, rank: Rank) -> None:
        known, part = self.state["ranks"][rank.number], rank.participant
        if not known["up"]:
            return
        hold = HOLD[part.state]
        wave = 0 if part.wave is None or hold == "Nothing" else self.terms.wave(part.wave)
        places = self.waves.places
        leader = (part.leader.leader_id, part.leader.term) if part.leader is not None else None
        told = rank.barrier.told(part.epoch, part.placement.digest)
        held = known["hold"][0]
        self._equal("holds", (hold, wave), (held, known["wave"]["id"]))
        self._equal(
            "has not drained",
            part.state is ParticipantState.ABORTED,
            held == "Nothing" and known["posted"] != frozenset(),
        )
        self._equal("is at epoch", part.epoch, known["epoch"])
        self._equal("has the map", places[part.placement.digest], known["place"])
        self._equal("is of generation", part.identity.generation, f"g{known['gen']}")
        self._equal("has the weights", part.weights_version, known["version"])
        self._equal("reloads", part.reloading, known["reloading"])
        self._equal("may load", rank.permitted, known["reloading"] and held == "Nothing")
        self._equal("has passed boundaries", rank.gate.calls, known["boundary"])
        named = (f"c{known['leader']}", known["term"]) if known["term"] else None
        self._equal("obeys", leader, named)
        saved = known["saved"]
        self._equal("has saved", (told[0], places[told[1]]), (saved["epoch"], saved["place"]))
        if part.leader is not None:
            body = "RankState", self.model.answer(self.state, rank.number)
            answer = self._asked(rank, msg.QueryState(part.leader))
            assert answer is not None
            self._equal("answers", answer["body"], _cautious(rank, Record(body=body))["body"])

    def _equal(self, what: str, machine: Any, model: Any) -> None:
        if machine != model:
            raise DifferenceError(f"{what}: the machine {machine}, the model {model}")


def _cautious(rank: Rank, told: Record) -> Record:
    """Return the message of the model as a rank says it that copies or has copied.

    It does not call itself drained while copies of the wave that it holds are under way. The model
    leaves open whether it does.
    """
    label, content = told["body"]
    if label == "RankState" and rank.participant.state is ParticipantState.STAGING:
        return told.having("body", (label, content.having("drained", False)))
    return told


def _number(value: Any) -> int:
    if isinstance(value, int):
        return value
    return int(value["rank"] if "rank" in value else value["message"]["rank"])


_RANK_EVENTS = {
    "Boundary": "_boundary",
    "Swapped": "_swapped",
    "Computed": "_computed",
    "Saved": "_saved",
    "Copied": "_copied",
    "CopiedLate": "_copied",
    "Drained": "_drained",
    "Disconnected": "_disconnected",
    "Voted": "_voted",
    "Tells": "_copied",
    "Greets": "_copied",
    "LeaderLost": "_leader_lost",
    "ReloadAsked": "_reload_asked",
    "Reloaded": "_reloaded",
    "Crashed": "_crashed",
    "RankGot": "_got",
}
"""Events of the model at a rank, and the methods that take them."""
