"""All facts of one run, and what follows from them before any rule is applied."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.judge.maps import Map, of_other_ranks, rows_of, with_rows
from tests.chaos.judge.ranks import Forming, RankFacts, RankStart, read_formings, read_ranks
from tests.chaos.judge.store import PlanFacts, StoreDump, read_dumps
from tests.chaos.judge.wire import RankStream, Wire, WireMessage, read_wire

__all__ = [
    "DUMPS",
    "WIRE",
    "Breach",
    "Case",
    "Group",
    "Process",
    "WaveId",
    "read_case",
    "wave_in",
    "wave_of",
]

WIRE, DUMPS = "wire.log.gz", "store.jsonl.gz"
"""Names of files in the folder of a run; those of the ranks are in `ranks`."""


class WaveId(NamedTuple):
    """The identity of a wave on the wire."""

    generation: str
    plan_id: str
    wave_index: int
    weights_version: int
    base_epoch: int
    """The epoch on which the plan is based."""


class Process(NamedTuple):
    """One process while it is a rank of one group."""

    generation: str
    rank: int


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks between two starts, restarts or resizes; of one generation."""

    number: int
    starts: dict[int, RankStart]
    """The start of each rank that began in the group."""
    last_epoch: int
    """The newest that a rank logged."""
    before: "Group | None"
    """The group before it."""
    over: Forming | None
    """The order by which it came from a group of another size; None if all its ranks began anew."""

    @property
    def first(self) -> RankStart:
        """The start of its first rank that got so far."""
        return next(iter(self.starts.values()))

    @property
    def generation(self) -> str:
        """Its name on the wire."""
        return self.first.generation

    @property
    def num_ranks(self) -> int:
        """Its size."""
        return self.first.num_ranks


@dataclass(frozen=True, slots=True)
class Breach:
    """One broken rule."""

    rule: str
    text: str
    unix: float = 0.0
    """Unix seconds; 0 if it has no one time."""
    place: str = ""
    """The place of the facts: connection and byte, or file and line."""

    def __str__(self) -> str:
        """Return the breach as one line."""
        at = f" at {self.unix:.6f}" if self.unix else ""
        return f"{self.rule}: {self.text}{at}{f' ({self.place})' if self.place else ''}"


@dataclass
class Case:
    """The facts of one run."""

    config: dict[str, Any]
    """The ranks' sizes, seed and deployment."""
    wire: Wire
    ranks: list[RankFacts]
    formings: list[Forming]
    dumps: list[StoreDump]

    @property
    def slots_per_rank(self) -> int:
        """The slots of a layer on one rank."""
        return int(self.config["slots_per_rank"])

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of which a rank got so far, in their order.

        A group that dies while it goes over is started anew with its new size, so the order to go
        over may be of a group that never started.
        """
        starts: dict[int, dict[int, RankStart]] = defaultdict(dict)
        for facts in self.ranks:
            for start in facts.starts:
                starts[start.group][facts.rank] = start
        newest: dict[str, int] = defaultdict(int)
        for facts in self.ranks:
            for swap in facts.swaps:
                newest[swap.generation] = max(newest[swap.generation], swap.epoch)
        found: list[Group] = []
        for number, of_group in sorted(starts.items()):
            epoch = max(start.epoch for start in of_group.values())
            generation = next(iter(of_group.values())).generation
            before = found[-1] if found else None
            over = None
            if before is not None:
                orders = [one for one in self.formings if before.number < one.group <= number]
                goes_over = epoch > before.last_epoch or [o for o in orders if o.group == number]
                over = orders[-1] if orders and goes_over else None
            last_epoch = max(epoch, newest[generation])
            found.append(Group(number, of_group, last_epoch, before, over))
        return found

    @cached_property
    def generations(self) -> dict[str, Group]:
        """The groups by their names."""
        return {group.generation: group for group in self.groups}

    @cached_property
    def overs(self) -> dict[int, Group]:
        """Epoch -> the group that came to it without a wave, because it has another size."""
        return {g.first.epoch: g for g in self.groups if g.over is not None}

    @cached_property
    def processes(self) -> dict[Process, RankFacts]:
        """Every process that a rank wrote about."""
        return {
            Process(start.generation, facts.rank): facts
            for facts in self.ranks
            for start in facts.starts
        }

    @cached_property
    def streams(self) -> dict[Process, list[RankStream]]:
        """The streams of each known process, in the order in which it opened them.

        A process opens one stream after another, so the messages that it sent on the first all
        precede those on the second, whenever a proxy read them.
        """
        found: dict[Process, list[RankStream]] = defaultdict(list)
        for stream in self.wire.streams:
            if (process := self.process_of(stream)) is not None:
                found[process].append(stream)
        return found

    def process_of(self, stream: RankStream) -> Process | None:
        """Return the known process that opened a stream; None for any other client."""
        identity = stream.identity
        if identity is None or identity.deployment != self.config["deployment"]:
            return None
        process = Process(identity.generation, identity.rank)
        return process if process in self.processes else None

    def sent_by(self, process: Process) -> Iterator[WireMessage]:
        """Yield the messages of a process in the order in which it sent them."""
        for stream in self.streams.get(process, []):
            yield from (message for message in stream.messages if message.from_rank)

    @cached_property
    def messages(self) -> list[WireMessage]:
        """The messages on streams of known processes, in the order in which they were read."""
        known = {id(stream) for streams in self.streams.values() for stream in streams}
        return [message for message in self.wire.messages if id(message.stream) in known]

    @cached_property
    def prepares(self) -> dict[WaveId, WireMessage]:
        """The first Prepare of each wave."""
        found: dict[WaveId, WireMessage] = {}
        for message in self.messages:
            if message.kind == "prepare":
                found.setdefault(wave_of(message.body.wave), message)
        return found

    @cached_property
    def swapped(self) -> dict[int, set[WaveId]]:
        """Epoch -> the waves by which ranks say they came to it; one, unless something tore."""
        found: dict[int, set[WaveId]] = defaultdict(set)
        for facts in self.ranks:
            for swap in facts.swaps:
                of_swap = (swap.generation, swap.plan_id, swap.wave_index)
                waves = [
                    wave
                    for wave, prepare in self.prepares.items()
                    if wave[:3] == of_swap and prepare.body.base_epoch == swap.epoch - 1
                ]
                # A wave that no Prepare named has no identity: -1 stands for what is not known.
                found[swap.epoch].update(waves or [WaveId(*of_swap, -1, -1)])
        return found

    @cached_property
    def maps(self) -> dict[int, Map]:
        """Epoch -> the map that the Prepares on the wire, and changes of the size, lead to."""
        first = next((facts.states[0] for facts in self.ranks if facts.states), None)
        if first is None:
            return {}
        found = {first.epoch: first.map}
        for epoch in sorted(self.swapped.keys() | self.overs.keys()):
            before = found.get(epoch - 1)
            if before is None:
                continue
            if (group := self.overs.get(epoch)) is not None:
                found[epoch] = self.first_map(group) or self.carried(group, before)
                continue
            prepare = self.prepares.get(min(self.swapped[epoch]))
            if prepare is not None:
                body = prepare.body.body
                rows = rows_of(body.rows, len(before[0]))
                found[epoch] = with_rows(before, body.layers, rows)
        return found

    def carried(self, group: Group, before: Map) -> Map:
        """Return the map that a group of another size takes over from the last map before it."""
        assert group.over is not None
        return of_other_ranks(before, group.over.former, self.slots_per_rank)

    def first_map(self, group: Group) -> Map | None:
        """Return the first map of a group that outlived a death, which no message names.

        Its ranks chose where the lost experts live. `maps_carry_over` judges the choice.
        """
        assert group.over is not None
        epoch = group.first.epoch
        states = (state for facts in self.ranks for state in facts.states if state.epoch == epoch)
        return next((state.map for state in states), None) if group.over.dead else None


def wave_of(key: Any) -> WaveId:
    """Return the identity that a WaveKey names."""
    return WaveId(key.generation, key.plan_id, key.wave_index, key.weights_version, key.base_epoch)


def wave_in(plan: PlanFacts, index: int) -> WaveId:
    """Return the identity of a wave of a stored plan."""
    return WaveId(plan.generation, plan.plan_id, index, plan.weights_version, plan.base_epoch)


def read_case(folder: Path) -> Case:
    """Read everything that a run left in its folder."""
    ranks = folder / "ranks"
    config = json.loads((ranks / "config.json").read_text(encoding="utf-8"))
    return Case(
        config,
        read_wire(folder / WIRE),
        read_ranks(ranks, config),
        read_formings(ranks),
        read_dumps(folder / DUMPS),
    )
