"""The facts that ranks wrote: which maps and which bytes each step was computed with."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.judge.maps import Map, map_of_tables

__all__ = [
    "Forming",
    "RankFacts",
    "RankStart",
    "RankSwap",
    "StepFacts",
    "StepState",
    "read_formings",
    "read_ranks",
]


@dataclass(frozen=True, slots=True)
class Forming:
    """The engine's order to its ranks to go over into a group of another size."""

    group: int
    former: tuple[int | None, ...]
    """The rank of each process in the group before; None for one that joins."""
    dead: tuple[int, ...]
    """The ranks of the group before whose death is the cause."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """The start of one rank in one group."""

    unix: float
    group: int
    generation: str
    epoch: int
    num_ranks: int
    former_rank: int | None
    """The rank that this process had in the group before; None if it was not there."""


@dataclass(frozen=True, slots=True)
class RankSwap:
    """A swap that a rank logged, after it had saved the placement."""

    unix: float
    generation: str
    epoch: int
    plan_id: str
    wave_index: int
    step: int
    """The last step before it."""


@dataclass(frozen=True, slots=True)
class StepState:
    """The contents of a rank's own memory right before or right after the computation of a step."""

    unix: float
    group: int
    step: int
    epoch: int
    map: Map
    """As the routing tables say it."""
    slots: dict[tuple[int, int], str]
    """(layer, local slot) -> checksum of the bytes in each slot to which the tables lead."""
    line: int
    """Number of its line in the file."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of one rank."""

    unix: float
    group: int
    step: int
    epoch: int
    before: StepState
    after: StepState
    line: int


@dataclass(slots=True)
class RankFacts:
    """All that one rank of each group wrote."""

    rank: int
    starts: list[RankStart] = field(default_factory=list)
    swaps: list[RankSwap] = field(default_factory=list)
    states: list[StepState] = field(default_factory=list)
    steps: list[StepFacts] = field(default_factory=list)
    saves: dict[tuple[int, int], float] = field(default_factory=dict)
    """(group, epoch) -> Unix seconds at which the file system had the saved placement."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of the processes that wrote one."""

    def start(self, group: int) -> RankStart | None:
        """Return the start in a group; None if the rank did not get so far."""
        return next((start for start in self.starts if start.group == group), None)


def read_ranks(folder: Path, config: dict[str, Any]) -> list[RankFacts]:
    """Read what all ranks of a run wrote into its folder."""
    found = []
    for rank in range(len(list(folder.glob("rank-*.jsonl")))):
        facts = RankFacts(rank)
        _read_log(facts, folder / f"rank-{rank}.jsonl")
        _read_evidence(facts, folder / f"evidence-{rank}.jsonl", config)
        found.append(facts)
    return found


def read_formings(folder: Path) -> list[Forming]:
    """Read which groups of another size the engine ordered to form."""
    return [
        Forming(line["group"], tuple(line["former"]), tuple(line["dead"]))
        for _, line in _lines(folder / "supervisor.jsonl")
        if line["kind"] == "forming"
    ]


def _read_log(facts: RankFacts, path: Path) -> None:
    """Read the rank's own log."""
    for _, line in _lines(path):
        match line["kind"]:
            case "start":
                facts.starts.append(
                    RankStart(
                        line["unix"],
                        line["group"],
                        line["generation"],
                        line["epoch"],
                        line["ranks"],
                        line["former_rank"],
                    )
                )
            case "swap":
                facts.swaps.append(
                    RankSwap(
                        line["unix"],
                        facts.starts[-1].generation,
                        line["epoch"],
                        line["plan_id"],
                        line["wave_index"],
                        line["step"],
                    )
                )
            case "exit":
                facts.codes.append(line["code"])


def _read_evidence(facts: RankFacts, path: Path, config: dict[str, Any]) -> None:
    """Read the lines of `tests.chaos.rank`, which explains them."""
    states: dict[tuple[int, int], StepState] = {}
    num_slots = {s.group: s.num_ranks * config["slots_per_rank"] for s in facts.starts}
    for number, line in _lines(path):
        group = line["group"]
        match line["kind"]:
            case "state":
                state = StepState(
                    line["unix"],
                    group,
                    line["step"],
                    line["epoch"],
                    map_of_tables(line["tables"], num_slots[group]),
                    {(layer, slot): value for layer, slot, value in line["slots"]},
                    number,
                )
                states[group, line["number"]] = state
                facts.states.append(state)
            case "step":
                before, after = (states[group, one] for one in line["states"])
                step, epoch = line["step"], line["epoch"]
                facts.steps.append(
                    StepFacts(line["unix"], group, step, epoch, before, after, number)
                )
            case "saved":
                facts.saves[group, line["epoch"]] = line["changed"]


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the lines of a file with their numbers, without one that a crash cut off."""
    found = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append((number, json.loads(line)))
        except ValueError:
            continue
    return found
