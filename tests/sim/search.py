"""The work of the simulation's worker processes: run many seeds, and catch mutants."""

import traceback
from dataclasses import dataclass, field

from tests.sim.checks import AGENT_ERROR
from tests.sim.guests import run_guest_seed
from tests.sim.hazards import HAZARDS
from tests.sim.mutants import BY_NAME
from tests.sim.run import run_seed

GUEST_EVERY = 10
"""So many seeds apart, a seed is also run with an engine that moves its experts itself."""


@dataclass
class Tally:
    """The result of a range of seeds."""

    seeds: int = 0
    events: int = 0
    waves: int = 0
    failures: list = field(default_factory=list)


@dataclass
class Hunt:
    """The result of the search with one mutant."""

    name: str
    seed: int | None = None
    invariant: str = ""
    tried: int = 0


def run_seeds(first: int, count: int) -> Tally:
    """Run seeds with the production parts."""
    tally = Tally(count)
    for seed in range(first, first + count):
        for run in (run_seed,) if seed % GUEST_EVERY else (run_seed, run_guest_seed):
            shown = f"{seed} --guest" if run is run_guest_seed else f"{seed}"
            try:
                outcome = run(seed)
            except Exception:
                tally.failures.append((shown, "exception", traceback.format_exc(limit=-3)))
                continue
            tally.events += outcome.events
            tally.waves += outcome.committed
            if outcome.violation is not None:
                tally.failures.append((shown, outcome.violation, outcome.detail))
    return tally


def hunt(name: str, limit: int, first: int = 0) -> Hunt:
    """Run one mutant until an invariant catches it; an error of the mutant is not a catch.

    Args:
        name: of the mutant.
        limit: seeds 0 to limit - 1 are tried.
        first: a seed that is tried before them.
    """
    mutant = BY_NAME[name]
    run = run_guest_seed if mutant.guest else run_seed
    for tried, seed in enumerate((first, *range(limit)), 1):
        try:
            outcome = run(seed, mutant.kit, hazard=HAZARDS.get(mutant.hazard))
        except Exception:
            continue
        if outcome.violation not in (None, AGENT_ERROR):
            return Hunt(name, seed, outcome.violation, tried)
    return Hunt(name, tried=limit)
