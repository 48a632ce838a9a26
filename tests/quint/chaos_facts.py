"""The facts of a chaos run in the terms of the model, and the moments by which each was true.

The facts are those of the outside judge (`tests/chaos/judge`): nothing here imports the package.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.chaos.judge.case import Case, Process, WaveId, wave_of
from tests.chaos.judge.maps import Map, digest_of
from tests.chaos.judge.ranks import RankFacts, RankSwap
from tests.chaos.judge.store import placement_of
from tests.chaos.judge.wire import RankStream, WireMessage
from tests.quint.values import Record

UNKNOWN_PLACE = -9
"""A map that no wave leads to."""
_SWAPPED = 1
"""WaveOutcome on the wire."""
_HOLDS = {2: "Staging", 3: "Prepared", 4: "Armed", 5: "Swapping"}
"""ParticipantState on the wire; a rank in another state holds nothing."""
ANSWERS = frozenset({"hello", "vote", "ack", "abort_answer", "rank_state", "term_refused"})
ORDERS = frozenset({"prepare", "commit", "abort", "query_state"})
_OF_WAVES = frozenset({"prepare", "commit", "abort", "vote", "ack", "abort_answer"})


class Fact(NamedTuple):
    """Something that was true at a moment, or had happened by then."""

    unix: float
    position: int
    """Position in the log of the wire, which orders equal times; -1 for a line of a rank."""
    kind: str
    rank: int
    what: Any


@dataclass(frozen=True, slots=True)
class Group:
    """One generation of the group."""

    number: int
    """The model's name of the generation, from 1 on."""
    name: str
    attempt: int
    began: float
    """Unix seconds of the first sign of it."""
    epochs: dict[int, int]
    """Rank -> the epoch at which it started."""
    first_step: int


class ChaosFacts:
    """Names of the model for the things of one run, and its facts in the order of time."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.every = int(case.config["poll_every"])
        self.delay = int(case.config["poll_latency"])
        self.ranks = case.num_ranks
        self._waves: dict[WaveId, int] = {}
        self._leaders: dict[str, int] = {}
        self.groups = self._find_groups()
        self._by_name = {group.name: group for group in self.groups}
        self._maps = {found: epoch for epoch, found in case.maps.items()}
        self._digests = {
            digest_of(found, self.ranks, case.config["experts"]): epoch
            for epoch, found in case.maps.items()
        }
        self.passed = self._find_passed()

    # --- names ------------------------------------------------------------------------------------

    def wave(self, wave: WaveId) -> int:
        """Return the model's name of a wave."""
        return self._waves.setdefault(wave, len(self._waves) + 1)

    def wave_record(self, key: Any, based: bool = True) -> Record:
        """Return the model's wave of a key; its base is 0 unless `based`."""
        prepare = self.case.prepares.get(wave_of(key))
        base = prepare.body.base_epoch if based and prepare is not None else 0
        number = self.wave(wave_of(key))
        return Record(id=number, base=int(base), version=int(key.weights_version))

    def place_of_epoch(self, epoch: int) -> int:
        """Return the wave that led to an epoch; 0 for the first one."""
        waves = self.case.swapped.get(epoch)
        if waves:
            return self.wave(min(waves))
        return 0 if epoch == 0 else UNKNOWN_PLACE

    def place_of_swap(self, swap: RankSwap) -> int:
        """Return the wave by which a rank says that it came to an epoch."""
        named = (swap.generation, swap.plan_id, swap.wave_index)
        for wave, prepare in self.case.prepares.items():
            if wave[:3] == named and prepare.body.base_epoch == swap.epoch - 1:
                return self.wave(wave)
        return UNKNOWN_PLACE

    def place_of_map(self, found: Map, epoch: int) -> int:
        """Return the wave that led to a map, which was seen at an epoch."""
        if self.case.maps.get(epoch) == found:
            return self.place_of_epoch(epoch)
        known = self._maps.get(found)
        return UNKNOWN_PLACE if known is None else self.place_of_epoch(known)

    def place_of_digest(self, digest: str, epoch: int) -> int:
        """Return the wave that led to the map with a digest, which was named at an epoch."""
        wanted = self.case.maps.get(epoch)
        if wanted is not None:
            experts = self.case.config["experts"]
            if digest == digest_of(wanted, self.ranks, experts):
                return self.place_of_epoch(epoch)
        known = self._digests.get(digest)
        return UNKNOWN_PLACE if known is None else self.place_of_epoch(known)

    def leader(self, name: str) -> int:
        """Return the model's name of a replica."""
        return self._leaders.setdefault(name, len(self._leaders))

    def group_of(self, stream: RankStream) -> tuple[Group, int]:
        """Return the generation and the rank that opened a stream."""
        process = self.case.process_of(stream)
        assert process is not None
        return self._by_name[process.generation], process.rank

    def order(self, message: WireMessage) -> Record:
        """Return a controller's message in the terms of the model."""
        group, rank = self.group_of(message.stream)
        leader = message.body.leader
        body: tuple[str, Any] = ("Query", ())
        if message.kind != "query_state":
            wave = self.wave_record(message.body.wave, message.kind == "prepare")
            body = (message.kind.capitalize(), wave)
        return Record(
            rank=rank,
            leader=self.leader(leader.leader_id),
            term=int(leader.term),
            gen=group.number,
            body=body,
        )

    def answer(self, message: WireMessage) -> tuple[str, Any]:
        """Return the body of a rank's message in the terms of the model."""
        body: Any = message.body
        wave = self.wave(wave_of(body.wave)) if message.kind in _OF_WAVES else 0
        match message.kind:
            case "vote":
                return "Vote", Record(wave=wave, yes=bool(body.yes))
            case "ack" | "hello":
                return "Ack", Record(wave=wave, epoch=int(body.epoch))
            case "abort_answer" if body.outcome == _SWAPPED:
                return "Ack", Record(wave=wave, epoch=int(body.epoch))
            case "abort_answer":
                drained = bool(body.drained)
                return "Dropped", Record(wave=wave, epoch=int(body.epoch), drained=drained)
        hold = _HOLDS.get(body.state, "Nothing")
        nothing = Record(id=0, base=0, version=0)
        return "RankState", Record(
            epoch=int(body.epoch),
            place=self.place_of_digest(body.placement_digest, int(body.epoch)),
            hold=(hold, ()),
            wave=nothing if hold == "Nothing" else self.wave_record(body.wave),
            drained=bool(body.drained),
            version=int(body.weights_version),
        )

    def ended(self, message: WireMessage) -> tuple[str, Any] | None:
        """Return what a RankState says of the wave that ended last, if there is one."""
        body: Any = message.body
        if message.kind != "rank_state" or not body.HasField("last_wave"):
            return None
        named = Record(wave=self.wave(wave_of(body.last_wave)), epoch=int(body.epoch))
        if body.last_outcome == _SWAPPED:
            return "Ack", named
        return "Dropped", named.having("drained", False)

    # --- generations ------------------------------------------------------------------------------

    def _find_groups(self) -> list[Group]:
        names: dict[str, int] = {}
        for facts in self.case.ranks:
            for start in facts.starts:
                names.setdefault(start.generation, start.attempt)
        ordered = sorted(names.items(), key=lambda pair: pair[1])
        return [self._group(n, name, attempt) for n, (name, attempt) in enumerate(ordered, 1)]

    def _group(self, number: int, name: str, attempt: int) -> Group:
        starts = {
            facts.rank: start
            for facts in self.case.ranks
            for start in facts.starts
            if start.generation == name
        }
        signs = [start.unix for start in starts.values()]
        for rank in starts:
            sent = self.case.sent_by(Process(name, rank))
            signs += [message.read.unix for message in sent]
        steps = [s.step for facts in self.case.ranks for s in facts.steps if s.attempt == attempt]
        epochs = {rank: start.epoch for rank, start in starts.items()}
        return Group(number, name, attempt, min(signs), epochs, min(steps, default=0))

    def boundary(self, group: Group, swap: RankSwap) -> int:
        """Return the boundary at which a rank swapped."""
        return swap.step + 1 - group.first_step

    def boundary_of(self, group: Group, rank: int, epoch: int) -> int | None:
        """Return the boundary at which a rank came to an epoch; None if it wrote of none."""
        for swap in self.case.ranks[rank].swaps:
            if swap.generation == group.name and swap.epoch == epoch:
                return self.boundary(group, swap)
        return None

    def _find_passed(self) -> dict[tuple[int, int], int]:
        """Return the polls that passed: (generation, boundary of the poll) -> wave."""
        return {
            (group.number, self.boundary(group, swap) - self.delay): self.place_of_epoch(swap.epoch)
            for group in self.groups
            for facts in self.case.ranks
            for swap in facts.swaps
            if swap.generation == group.name
        }

    # --- facts ------------------------------------------------------------------------------------

    def in_order(self) -> list[Fact]:
        """Return all facts in the order of time."""
        found = [Fact(g.began, -1, "restarted", -1, g) for g in self.groups[1:]]
        for facts in self.case.ranks:
            found += self._of_rank(facts)
        for message in self.case.messages:
            if message.kind in ORDERS:
                found += self._of_order(message)
        for process in self.case.streams:
            found += self._of_answers(process)
        found += self._of_store()
        return sorted(found, key=lambda fact: (fact.unix, fact.position))

    def _of_rank(self, facts: RankFacts) -> Iterator[Fact]:
        """Yield the steps, swaps and saves of one rank."""
        for step in facts.steps:
            yield Fact(step.unix, -1, "step", facts.rank, (self._attempt(step.attempt), step))
        for swap in facts.swaps:
            group = self._by_name[swap.generation]
            # The rank logs its swap once the placement is saved, and answers after that.
            saved = max(swap.unix, facts.saves.get((group.attempt, swap.epoch), 0.0))
            yield Fact(saved, -1, "saved", facts.rank, (group, swap))

    def _attempt(self, attempt: int) -> Group:
        return next(group for group in self.groups if group.attempt == attempt)

    def _of_order(self, message: WireMessage) -> Iterator[Fact]:
        """Yield that a controller's message was sent, and that it could arrive."""
        rank = self.group_of(message.stream)[1]
        yield Fact(message.read.unix, message.read.position, "ordered", rank, message)
        if message.passed is not None:
            yield Fact(message.passed.unix, message.passed.position, "arrived", rank, message)

    def _of_answers(self, process: Process) -> list[Fact]:
        """Return the answers of a process, each by the time at which a later one was read.

        A process that has ended had sent all its messages before the next generation began.
        """
        group = self._by_name[process.generation]
        later = [other.began for other in self.groups if other.number > group.number]
        limit, position = min(later, default=float("inf")), -2
        found: list[Fact] = []
        sent = [message for message in self.case.sent_by(process) if message.kind in ANSWERS]
        for message in reversed(sent):
            if message.read.unix < limit:
                limit, position = message.read.unix, message.read.position
            if message.passed is not None:
                passed = message.passed
                found.append(Fact(passed.unix, passed.position, "heard", process.rank, message))
            found.append(Fact(limit, position, "answered", process.rank, message))
        return found[::-1]

    def _of_store(self) -> Iterator[Fact]:
        """Yield what controllers stored about waves and epochs, and what dumps newly show of it."""
        for write in self.case.wire.writes:
            if not write.accepted:
                continue
            unix, position = write.sent.unix, write.sent.position
            if write.name == "outcome":
                yield Fact(unix, position, "recorded", -1, json.loads(write.body))
            elif write.table == "epochs":
                epoch = int(write.name)
                yield Fact(unix, position, "mapped", -1, (epoch, placement_of(write.body)))
            elif write.name == "intent" and write.answered is not None:
                unix, position = write.answered.unix, write.answered.position
                intent = (write.term, json.loads(write.body))
                yield Fact(unix, position, "intended", -1, intent)
        known: set[tuple[int, Map]] = set()
        for dump in self.case.dumps:
            if "outcome" in dump.documents:
                yield Fact(dump.unix, -1, "recorded", -1, dump.documents["outcome"])
            for shown in dump.epochs.items() - known:
                known.add(shown)
                yield Fact(dump.unix, -1, "mapped", -1, shown)
