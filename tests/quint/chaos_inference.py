"""Infer what nobody saw of a chaos run, as late as possible: the messages that ranks take and more.

Each demand brings a rank to where something holds that it showed, by events that the model can
take. docs/testing.md says what is inferred.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.chaos.judge.case import Case, wave_of
from tests.chaos.judge.wire import RankStream, WireMessage
from tests.quint.chaos_facts import ChaosFacts
from tests.quint.judge import broken_invariant
from tests.quint.values import Record

EMPTY: tuple = ()
_Query = tuple[RankStream, int, int]
"""The stream, term and number of a query: each term counts its queries anew."""


class RefusedError(Exception):
    """The model cannot take an event."""


class DropNeededError(Exception):
    """A rank had dropped a wave, and no message can have told it to."""

    def __init__(self, poll: tuple[int, int]) -> None:
        self.poll = poll


class Inference:
    """The model's state after the facts so far, and what a fact demands before it.

    Args:
        drops: (generation, boundary) of the polls at which all ranks want to drop their wave.
    """

    def __init__(self, model: SimpleNamespace, case: Case, drops: set[tuple[int, int]]) -> None:
        self.model = model
        self.facts = ChaosFacts(case)
        self.drops = drops
        config = Record(every=self.facts.every, delay=self.facts.delay, fault="")
        self.ranks = range(self.facts.ranks)
        self.state = model.started(frozenset(self.ranks), frozenset({0, 1}), config)
        self.group = self.facts.groups[0]
        self.taken = 0
        self.inbox: dict[RankStream, deque[WireMessage]] = defaultdict(deque)
        """Messages that may have arrived at the rank and of which it has shown no effect yet."""
        self.streams: dict[int, list[RankStream]] = defaultdict(list)
        """The streams of each rank of this generation on which a message has arrived."""
        self.computed: dict[int, int] = defaultdict(lambda: -1)
        """The boundary of the newest step that each rank has computed in this generation."""
        self.answers: dict[int, deque[WireMessage]] = defaultdict(deque)
        """The answers of each rank that nobody has read yet."""
        self.said: dict[int, Record | None] = {}
        """The answers that were said, by the id of the message on the wire."""
        self._asked: set[_Query | None] = set()
        """The queries that ranks have taken."""
        self._saying: dict[int, WireMessage | None] = {}
        """The answer that each rank makes up at present."""

    def take(self, label: str, value: Any = EMPTY) -> None:
        """Let the model take an event."""
        after = self.model.apply(self.state, (label, value))
        if not after["ok"]:
            raise RefusedError(f"{label} {value}: {after['why']}")
        if broken := broken_invariant(self.model, after["state"]):
            raise RefusedError(f"{label} {value}: {broken}")
        self.state = after["state"]
        self.taken += 1

    def rank(self, rank: int) -> Record:
        """Return the model's state of a rank."""
        found: Record = self.state["ranks"][rank]
        return found

    def shows(self, rank: int, epoch: int, place: int) -> None:
        """Let an observer see the map of a rank."""
        self.take("Uses", Record(rank=rank, epoch=epoch, place=place))

    # --- answers ----------------------------------------------------------------------------------

    def say(self, rank: int, message: WireMessage) -> None:
        """Let a rank make up an answer, after what the answer demands."""
        number = self.facts.group_of(message.stream)[0].number
        if message.kind == "term_refused":
            self._refuse_order(rank, message.stream)
            self.said[id(message)] = None
            return
        body = self.facts.answer(message)
        if message.kind == "hello":
            self.said[id(message)] = _message(rank, -1, 0, number, body)
            return
        demand: Callable[[int, WireMessage, tuple[str, Any]], None]
        demand = getattr(self, f"_demand_{body[0].lower()}")
        outer, self._saying[rank] = self._saying.get(rank), message
        demand(rank, message, body)
        self._saying[rank] = outer
        known = self.rank(rank)
        term = int(message.body.highest_term) if message.kind == "rank_state" else known["term"]
        said = _message(rank, known["leader"], term, number, body)
        self.take("Says", said)
        if (ended := self.facts.ended(message)) is not None:
            self.take("Says", said.having("body", ended))
        self.said[id(message)] = said

    def _demand_vote(self, rank: int, message: WireMessage, body: tuple[str, Any]) -> None:
        """A vote answers a Prepare; a yes follows the copies."""
        wave = body[1]["wave"]
        held = self.rank(rank)
        if held["wave"]["id"] != wave and not (wave in held["dropped"] and not body[1]["yes"]):
            self._take_orders(rank, message.stream, lambda m: self._is_about(m, wave, "prepare"))
        held = self.rank(rank)
        if held["hold"][0] == "Staging" and held["wave"]["id"] == wave:
            self._vote(rank, body[1]["yes"])

    def _demand_ack(self, rank: int, message: WireMessage, body: tuple[str, Any]) -> None:
        """An Ack follows the swap."""
        epoch = body[1]["epoch"]
        self._reach_epoch(rank, epoch)
        if message.kind == "ack":
            digest = message.body.placement_digest
            self.shows(rank, epoch, self.facts.place_of_digest(digest, epoch))

    def _demand_dropped(self, rank: int, message: WireMessage, body: tuple[str, Any]) -> None:
        """The wave has ended at this rank, or can never begin."""
        wave = body[1]["wave"]
        self._reach_epoch(rank, body[1]["epoch"])
        if self.rank(rank)["wave"]["id"] == wave:
            self._let_go(rank)
        elif wave not in self.rank(rank)["dropped"]:
            kinds = ("commit", "abort")
            self._take_orders(rank, message.stream, lambda m: self._is_about(m, wave, *kinds))
        if body[1]["drained"]:
            self._drain(rank)

    def _demand_rankstate(self, rank: int, message: WireMessage, body: tuple[str, Any]) -> None:
        """A RankState answers a query, and tells what the rank holds."""
        hold, wave = body[1]["hold"][0], body[1]["wave"]["id"]
        self._use_older_streams(rank, message.stream, hold, wave)
        if _answered_query(message) not in self._asked:
            self._take_orders(rank, message.stream, lambda m: _query(m) == _answered_query(message))
        self._reach_epoch(rank, body[1]["epoch"])
        if hold != "Nothing":
            self._reach_hold(rank, hold, wave)
        elif self.rank(rank)["hold"][0] != "Nothing":
            self._let_go(rank)
        if body[1]["drained"]:
            self._drain(rank)

    def _say_those_of_now(self, rank: int) -> None:
        """Let a rank say what would not be true any more after its next boundary."""
        before = self.rank(rank)
        after = self.model.apply(self.state, ("Boundary", rank))["state"]["ranks"][rank]
        if after["hold"] == before["hold"]:
            return
        pending, swaps = self.answers[rank], after["hold"][0] == "Swapping"
        while pending and self._is_of_now(pending[0], before, swaps):
            self.say(rank, pending.popleft())

    def _is_of_now(self, message: WireMessage, now: Record, swaps: bool) -> bool:
        if message.kind == "term_refused" or self.facts.group_of(message.stream)[0] != self.group:
            return False
        label, said = self.facts.answer(message)
        if label == "Vote":
            return bool(said["wave"] == now["wave"]["id"])
        holds = label == "RankState" and said["hold"][0] != "Nothing"
        return bool(said["epoch"] <= now["epoch"] and (swaps or holds))

    # --- messages to a rank -----------------------------------------------------------------------

    def _is_about(self, message: WireMessage, wave: int, *kinds: str) -> bool:
        return message.kind in kinds and self.facts.wave(wave_of(message.body.wave)) == wave

    def _take_orders(
        self, rank: int, stream: RankStream, wanted: Callable[[WireMessage], bool]
    ) -> None:
        """Let a rank take the messages of a stream, in their order, up to one that is wanted."""
        if not any(map(wanted, self.inbox[stream])):
            raise RefusedError("nothing that explains it had arrived")
        while True:
            message = self.inbox[stream].popleft()
            self._got(rank, message, wanted(message))
            if wanted(message):
                return

    def _got(self, rank: int, message: WireMessage, wanted: bool) -> None:
        order = self.facts.order(message)
        if not wanted and not self.model.accepts(self.state, order):
            self.take("RankRefused", order)
            return
        if message.kind == "commit":
            self._poll_first(rank)
        refuses = message.kind == "prepare" and self._refuses(rank, message)
        self.take("RankGot", Record(message=order, again=True, refuses=refuses))
        if message.kind != "query_state":
            return
        self._asked.add(_query(message))
        pending = self.answers[rank]
        if not wanted and (answer := self._answer_to(rank, message)) is not None:
            while answer in pending:
                self.say(rank, pending.popleft())

    def _answer_to(self, rank: int, query: WireMessage) -> WireMessage | None:
        """Return the answer to a query that nobody has read yet."""
        for message in self.answers[rank]:
            if message.kind == "rank_state" and _answered_query(message) == _query(query):
                return message
        return None

    def _refuses(self, rank: int, prepare: WireMessage) -> bool:
        """Return True if the next answer about a wave, from the present one on, is a no."""
        if self.rank(rank)["hold"][0] != "Nothing":
            return False
        wave = wave_of(prepare.body.wave)
        now = self._saying.get(rank)
        for message in (*([] if now is None else [now]), *self.answers[rank]):
            if message.kind == "vote" and wave_of(message.body.wave) == wave:
                return not message.body.yes
            if message.kind == "rank_state" and message.body.HasField("wave"):
                if wave_of(message.body.wave) == wave:
                    return False
        return False

    def _refuse_order(self, rank: int, stream: RankStream) -> None:
        """Let a rank take the messages of a stream up to the first that it does not accept."""

        def wanted(message: WireMessage) -> bool:
            return not self.model.accepts(self.state, self.facts.order(message))

        while self.inbox[stream]:
            message = self.inbox[stream].popleft()
            if wanted(message):
                self.take("RankRefused", self.facts.order(message))
                return
            self._got(rank, message, False)
        raise RefusedError("the rank refused a term, and no message of a lower one had arrived")

    def _take_order_about(
        self, rank: int, wave: int, kind: str, streams: list[RankStream] | None = None
    ) -> bool:
        """Let a rank take a message about a wave, on the first stream on which one has arrived."""

        def wanted(message: WireMessage) -> bool:
            return self._is_about(message, wave, kind) and bool(
                self.model.accepts(self.state, self.facts.order(message))
            )

        for stream in self.streams[rank] if streams is None else streams:
            if any(map(wanted, self.inbox[stream])):
                self._take_orders(rank, stream, lambda m: self._is_about(m, wave, kind))
                return True
        return False

    def _use_older_streams(self, rank: int, stream: RankStream, hold: str, wave: int) -> None:
        """Let a rank take what only an older stream explains before anything of this stream."""
        streams = self.streams[rank]
        older = streams[: streams.index(stream)] if stream in streams else []
        held = self.rank(rank)
        if hold == "Nothing":
            here = any(self._is_about(m, held["wave"]["id"], "abort") for m in self.inbox[stream])
            if held["hold"][0] != "Nothing" and not here:
                self._take_order_about(rank, held["wave"]["id"], "abort", older)
            return
        if held["hold"][0] == "Nothing":
            self._take_order_about(rank, wave, "prepare", older)
        if hold == "Armed" and not any(
            self._is_about(m, wave, "commit") for m in self.inbox[stream]
        ):
            if self.rank(rank)["hold"][0] == "Staging":
                self._vote(rank, True)
            if self.rank(rank)["hold"][0] == "Prepared":
                self._take_order_about(rank, wave, "commit", older)

    # --- the held wave ----------------------------------------------------------------------------

    def _vote(self, rank: int, yes: bool) -> None:
        if yes:
            self.take("Copied", Record(rank=rank, good=True))
        self.take("Voted", Record(rank=rank, yes=yes))

    def _reach_hold(self, rank: int, wanted: str, wave: int) -> None:
        """Bring a rank to where it holds a wave as wanted."""
        while True:
            held = self.rank(rank)
            hold = held["hold"][0]
            if hold != "Nothing" and held["wave"]["id"] != wave:
                raise RefusedError(f"rank {rank} holds wave {held['wave']['id']}, not {wave}")
            if hold == wanted:
                return
            if hold == "Staging":
                self._vote(rank, True)
                continue
            kind = {"Nothing": "prepare", "Prepared": "commit"}.get(hold, "")
            if not self._take_order_about(rank, wave, kind) or self.rank(rank)["hold"] == (
                hold,
                EMPTY,
            ):
                raise RefusedError(f"rank {rank} cannot have come from {hold} to {wanted}")

    def _let_go(self, rank: int) -> None:
        """Bring a rank to where it holds nothing.

        Raises:
            DropNeededError: all ranks must have dropped the wave at a poll.
        """
        held = self.rank(rank)
        wave, boundary = held["wave"]["id"], held["boundary"]
        self._take_order_about(rank, wave, "abort")
        for later in range(1, self.facts.delay + 1):
            if self.rank(rank)["leaving"]:
                self.reach_boundary(rank, boundary + later)
        hold = self.rank(rank)["hold"][0]
        if hold == "Staging":
            self._vote(rank, False)
        elif hold != "Nothing":
            last = (boundary - self.facts.delay) // self.facts.every * self.facts.every
            poll = (self.group.number, last)
            if last < 1 or poll in self.drops:
                raise RefusedError(f"rank {rank} cannot have dropped wave {wave}")
            raise DropNeededError(poll)

    def _drain(self, rank: int) -> None:
        """No operation of an earlier wave is under way at this rank."""
        held = self.rank(rank)
        for wave in held["posted"] - {held["wave"]["id"]}:
            self.take("Drained", Record(rank=rank, wave=wave))

    # --- boundaries -------------------------------------------------------------------------------

    def _reach_epoch(self, rank: int, epoch: int) -> None:
        """Bring a rank past the swap by which it came to an epoch."""
        if self.rank(rank)["epoch"] < epoch:
            boundary = self.facts.boundary_of(self.group, rank, epoch)
            if boundary is None:
                raise RefusedError(f"rank {rank} never swapped to epoch {epoch}")
            self.reach_boundary(rank, boundary)

    def reach_boundary(self, rank: int, boundary: int) -> None:
        while self.rank(rank)["boundary"] < boundary:
            # No rank gets to a boundary before all ranks have begun the step before.
            for other in self.ranks:
                self.begin_step(other, self.rank(rank)["boundary"])
            self._say_those_of_now(rank)
            self.take("Boundary", rank)
            if self.rank(rank)["hold"][0] == "Swapping":
                self.take("Swapped", rank)

    def begin_step(self, rank: int, boundary: int) -> None:
        """Let a rank pass the boundary, begin a poll if it is time to, and begin its step."""
        self.reach_boundary(rank, boundary)
        if self.rank(rank)["boundary"] > boundary or not self.rank(rank)["inside"]:
            return
        polled = boundary % self.facts.every == 0
        if polled:
            self._prepare_ballot(rank, (self.group.number, boundary))
        self.take("Computed", Record(rank=rank, polled=polled))

    def _poll_first(self, rank: int) -> None:
        """Begin the next poll before a Commit is taken, if it can have begun and did not pass."""
        boundary = self.computed[rank] + 1
        poll = (self.group.number, boundary)
        if boundary % self.facts.every == 0 and poll not in {*self.facts.passed, *self.drops}:
            self.begin_step(rank, boundary)

    def _prepare_ballot(self, rank: int, poll: tuple[int, int]) -> None:
        """Bring a rank to the state with which its poll had the result that the ranks show."""
        if poll in self.facts.passed:
            self._reach_hold(rank, "Armed", self.facts.passed[poll])
        if poll in self.drops:
            self.take("LeaderLost", rank)


def _query(message: WireMessage) -> _Query | None:
    """Return the name of a query; None for another message."""
    if message.kind != "query_state":
        return None
    return message.stream, int(message.body.leader.term), int(message.body.query)


def _answered_query(state: WireMessage) -> _Query:
    """Return the name of the query that a RankState answers."""
    return state.stream, int(state.body.highest_term), int(state.body.query)


def _message(rank: int, leader: int, term: int, gen: int, body: tuple[str, Any]) -> Record:
    return Record(rank=rank, leader=leader, term=term, gen=gen, body=body)
