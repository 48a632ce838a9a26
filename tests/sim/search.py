"""The work of the simulation's worker processes: run many seeds, and catch mutants."""

import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.sim.kinds import KINDS


@dataclass
class Tally:
    """The result of a range of seeds."""

    seeds: int = 0
    events: int = 0
    waves: int = 0
    pairs: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)


@dataclass
class Hunt:
    """The result of the search with one mutant."""

    name: str
    seed: int | None = None
    invariant: str = ""
    detail: str = ""
    tried: int = 0


def run_seeds(first: int, count: int, kind: str = "machines") -> Tally:
    """Run seeds with the production machines, and count the pairs they pass."""
    run_seed = KINDS[kind]().run_seed
    tally, passed = Tally(), Counter()
    for seed in range(first, first + count):
        try:
            outcome = run_seed(seed, pairs=passed)
        except Exception:
            tally.failures.append((seed, "exception", traceback.format_exc(limit=-3)))
            continue
        tally.events += outcome.events
        tally.waves += outcome.committed
        if outcome.violation is not None:
            tally.failures.append((seed, outcome.violation, outcome.detail))
    tally.seeds = count
    for (machine, state, event), times in passed.items():
        tally.pairs[machine, str(state), event.__name__] += times
    return tally


def hunt(name: str, limit: int, kind: str = "machines") -> Hunt:
    """Run one mutant until an invariant catches it; an exception of the mutant is not a catch."""
    found = KINDS[kind]()
    run_seed, kit = found.run_seed, found.by_name[name].kit
    for seed in range(limit):
        try:
            outcome = run_seed(seed, kit)
        except Exception:
            continue
        if outcome.violation is not None:
            return Hunt(name, seed, outcome.violation, outcome.detail, seed + 1)
    return Hunt(name, tried=limit)
