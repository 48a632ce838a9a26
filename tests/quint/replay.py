"""Replay random runs of the model through the real machines, and find where they differ."""

from evenkeel_moe.errors import IllegalEvent
from tests.quint.leader_replay import LeaderReplay
from tests.quint.rank_replay import DifferenceError, RankReplay
from tests.quint.values import Record
from tests.quint.walks import Step, Walker
from tests.sim.kit import Kit

STEPS = 1000
"""The events of a run."""
FOUND = ("R2b", "R3", "R3c", "R4", "R5", "R6", "R7", "R7b", "R9", "R10", "R12", "R14")
"""The mutants of the simulation that break a rule within the model's scope."""


def difference(walker: Walker, run: tuple[Record, list[Step]], kit: Kit) -> str:
    """Replay a run; return the event at which machine and model differ, or an empty string.

    An error of a machine is a difference too: it forbids what the model did.
    """
    start, steps = run
    ranks = RankReplay(walker.model, start, kit)
    leaders = LeaderReplay(ranks)
    for number, step in enumerate(steps):
        try:
            before = ranks.state
            ranks.take(step)
            leaders.take(before, step)
        except (DifferenceError, IllegalEvent, AssertionError, KeyError) as error:
            return f"event {number} {step.event}: {error}"
    return ""


def runs_until_found(walker: Walker, kits: dict[str, Kit], most: int) -> dict[str, int]:
    """Return which run is the first that shows each kit to differ: 1 to `most`, or 0 for none."""
    found = dict.fromkeys(kits, 0)
    for seed in range(most):
        left = [name for name, number in found.items() if not number]
        run = walker.run(seed, STEPS) if left else None
        for name in left:
            if run is not None and difference(walker, run, kits[name]):
                found[name] = seed + 1
    return found
