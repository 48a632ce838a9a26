"""`python -m tests.explore` visits every state of small worlds, and checks invariants in each.

Each world ends with `ranks R waves W faults F states N depth D exhausted yes|no violations V`. The
exit code is 0 only if no invariant broke. A broken invariant is printed with the shortest way to
it. Without arguments the small worlds of `make test` are searched.

    --ranks 2 --waves 1 --faults 1 [--kinds lose,reload] [--seconds S] [--states N]   one world
    --mutants                                                every mutant that can occur in a world
"""

import argparse
import sys
import time

from tests.explore.catalogue import MUTANT_WORLDS, NOT_APPLICABLE, SMALL_WORLDS, search
from tests.explore.faults import KINDS
from tests.explore.search import Found, Result, Search
from tests.explore.world import Size
from tests.sim.kit import Kit
from tests.sim.mutants import BY_NAME
from tests.sim.network import describe


def print_found(searched: Search, found: Found) -> None:
    """Print a broken invariant and the events that lead to it."""
    print(f"BROKEN {found.invariant}: {found.detail}")
    met = searched.world.tables.messages.met
    for number, event in enumerate(found.events, 1):
        rank = "" if event.rank is None else f" {event.rank}"
        message = "" if event.message is None else f": {describe(met[event.message])}"
        print(f"  {number:3} {event.name}{rank}{message}")


def last_line(size: Size, result: Result) -> str:
    exhausted = "yes" if result.exhausted else "no"
    return (
        f"ranks {size.ranks} waves {size.waves} faults {size.faults} states {result.states}"
        f" depth {result.depth} exhausted {exhausted} violations {len(result.found)}"
    )


def explore(sizes: list[Size], seconds: float | None, states: int | None) -> int:
    """Search worlds one after the other; return the exit code."""
    broken = 0
    for size in sizes:
        kinds = "all kinds" if size.kinds == frozenset(KINDS) else ", ".join(sorted(size.kinds))
        print(f"faults: {kinds if size.faults else 'none'}")
        cpu = time.process_time()
        searched = search(
            Kit(), size, most_seconds=seconds, most_states=states,
            progress=lambda line: print(line, flush=True),
        )  # fmt: skip
        result = searched.run()
        for found in result.found:
            print_found(searched, found)
        cpu = time.process_time() - cpu
        print(f"{result.transitions} transitions, {cpu:.1f} s of one core, {result.seconds:.1f} s")
        print(last_line(size, result), flush=True)
        broken += len(result.found)
    return 1 if broken else 0


def catch_mutants(seconds: float | None) -> int:
    """Search each mutant in the world where it can occur; return the exit code."""
    survived = 0
    for name, size in MUTANT_WORLDS.items():
        mutant = BY_NAME[name]
        result = (searched := search(mutant.kit, size, mutant=True, most_seconds=seconds)).run()
        where = f"{result.states} states, {result.seconds:.1f} s"
        if not result.found:
            survived += 1
            print(f"mutant {name:4} SURVIVED {where}: {mutant.breaks}", flush=True)
            continue
        print(f"mutant {name:4} {mutant.breaks}: caught in {where}")
        print_found(searched, result.found[0])
    for name, why in NOT_APPLICABLE.items():
        print(f"mutant {name:4} does not apply: {why}")
    print(f"mutants {len(MUTANT_WORLDS) - survived}/{len(MUTANT_WORLDS)}", flush=True)
    return 1 if survived else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--waves", type=int, default=1, help="waves that are begun at most")
    parser.add_argument("--faults", type=int, default=1, help="faults of one run at most")
    parser.add_argument("--kinds", help=f"of faults, with commas between: {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, help="end a search after this time")
    parser.add_argument("--states", type=int, help="end a search at this number of states")
    parser.add_argument("--mutants", action="store_true", help="search the mutants")
    options = parser.parse_args(arguments)
    if options.mutants:
        return catch_mutants(options.seconds)
    sizes = list(SMALL_WORLDS)
    if options.ranks is not None:
        kinds = frozenset(options.kinds.split(",")) if options.kinds else frozenset(KINDS)
        if unknown := kinds - KINDS.keys():
            parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
        sizes = [Size(options.ranks, options.waves, options.faults, kinds)]
    return explore(sizes, options.seconds, options.states)


if __name__ == "__main__":
    sys.exit(main())
