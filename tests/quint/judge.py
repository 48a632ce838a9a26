"""Let the model judge recorded runs: it must be able to take every event of a trace in turn."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.quint.recorder import Recorder
from tests.quint.values import Record
from tests.sim.kit import Kit
from tests.sim.run import FleetWorld, run_seed

QUINT = Path(".cache/quint/node_modules/.bin/quint").absolute()
TREE = Path(".cache/quint/switch.json").absolute()
"""The model as Quint parsed it; `make quint` writes it."""


@dataclass(frozen=True)
class Verdict:
    """The model's judgement of one trace."""

    accepted: int
    """Events that the model could take, from the first one on."""
    refused: str = ""
    """The event that the model cannot take, and why; empty if there is none."""
    state: Any = None
    """The model's state after the accepted events."""


def record_seed(seed: int, kit: Kit | None = None) -> tuple[Record, list[tuple[str, Any]]] | None:
    """Run one seed of the simulation and return the model's start and the events.

    Returns None if the seed is about what the model leaves out: several deployments, or a group
    whose ranks have different gates.
    """
    world = FleetWorld(seed)
    if len(world.deployments) > 1 or world.fleet.misconfigured:
        return None
    recorder = Recorder()
    run_seed(seed, recorder.kit(kit or Kit()), watch=recorder.attach)
    fleet = recorder.world.fleet
    config = Record(every=fleet.poll_every, delay=fleet.resolve_after, fault="")
    start = Record(ranks=frozenset(range(fleet.num_ranks)), config=config)
    return start, recorder.events


def judge(model: SimpleNamespace, start: Record, events: Iterable[tuple[str, Any]]) -> Verdict:
    """Return how many events the model can take, and the first that it cannot."""
    state = model.started(start["ranks"], frozenset({0, 1}), start["config"])
    number = 0
    for number, event in enumerate(events, 1):
        after = model.apply(state, event)
        if not after["ok"]:
            return Verdict(number - 1, f"{event}: {after['why']}", state)
        state = after["state"]
        if broken := broken_invariant(model, state):
            return Verdict(number - 1, f"{event}: {broken}", state)
    return Verdict(number, "", state)


INVARIANTS = ("mapIsWhole", "recordsAgree", "operationsMatch", "bytesAreRight", "toldIsSaved")
FAULTS = {
    "initSwapOnCommit": "mapIsWhole",
    "initTellUnsaved": "toldIsSaved",
    "initNoChecksum": "bytesAreRight",
    "initCopyIntoSlots": "bytesAreRight",
    "initPollOnlyWithWave": "operationsMatch",
    "initRestartOnOldest": "recordsAgree",
}
"""Rules broken in the model that a few random runs find, and the invariant each breaks."""


def broken_invariant(model: SimpleNamespace, state: Record) -> str:
    """Return the name of an invariant that the state breaks, or an empty string."""
    return next((name for name in INVARIANTS if not getattr(model, name)(state)), "")
