"""`python -m tests.sim --seeds N` runs N seeds, and every mutant until an invariant catches it.

The last line is `seeds N events M waves W failures F mutants K/K`. The exit code is 0 only if no
invariant broke and every mutant was caught that can occur here.

    --seed X [--guest] [--mutant R5] [--trace]   replay one seed exactly
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from evenkeel_moe.adapters.processes.child_process import die_with_parent
from tests.sim.guests import run_guest_seed
from tests.sim.hazards import HAZARDS
from tests.sim.mutants import BY_NAME, NOT_SIMULATED
from tests.sim.run import run_seed
from tests.sim.search import Hunt, Tally, hunt, run_seeds

MUTANT_SEEDS = 5000
"""The seeds a mutant is searched for; a mutant that is not caught in them survives."""
CHUNK = 100
MAX_FAILURES = 10
COMMAND = "python -m tests.sim"


def replay(seed: int, mutant: str | None, guest: bool, trace: bool) -> int:
    run = run_guest_seed if guest or (mutant and BY_NAME[mutant].guest) else run_seed
    if mutant is None:
        outcome = run(seed, trace=trace)
    else:
        one = BY_NAME[mutant]
        outcome = run(seed, one.kit, trace=trace, hazard=HAZARDS.get(one.hazard))
    print(f"seed {seed} events {outcome.events} swapped waves {outcome.committed}")
    if outcome.violation is None:
        return 0
    print(f"{outcome.violation}: {outcome.detail}")
    return 1


def simulate(seeds: int, first: int, workers: int, mutant_seeds: int) -> int:
    began, total = time.monotonic(), Tally()
    # A simulation that is killed must not leave its workers behind.
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        names = [name for name in BY_NAME if name not in NOT_SIMULATED]
        hunts = [pool.submit(hunt, name, mutant_seeds) for name in names]
        chunks = [
            pool.submit(run_seeds, start, min(CHUNK, first + seeds - start))
            for start in range(first, first + seeds, CHUNK)
        ]
        for chunk in chunks:
            tally = chunk.result()
            total.seeds += tally.seeds
            total.events += tally.events
            total.waves += tally.waves
            for seed, invariant, detail in tally.failures[: MAX_FAILURES - len(total.failures)]:
                print(f"FAILED seed {seed}: {invariant}: {detail}")
                print(f"  replay: {COMMAND} --seed {seed} --trace", flush=True)
            total.failures += tally.failures
        results = [job.result() for job in hunts]
    for result in results:
        report(result)
    caught = sum(result.seed is not None for result in results)
    print(f"{time.monotonic() - began:.0f} s")
    print(
        f"seeds {total.seeds} events {total.events} waves {total.waves}"
        f" failures {len(total.failures)} mutants {caught}/{len(results)}"
    )
    return 1 if total.failures or caught < len(results) else 0


def report(result: Hunt) -> None:
    mutant = BY_NAME[result.name]
    if result.seed is None:
        print(f"mutant {mutant.name:7} SURVIVED {result.tried} seeds: {mutant.breaks}")
        return
    found = f"caught by {result.invariant} at seed {result.seed}"
    print(f"mutant {mutant.name:7} {mutant.breaks}: {found}")
    print(f"  replay: {COMMAND} --seed {result.seed} --mutant {mutant.name} --trace")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=600, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutant-seeds", type=int, default=MUTANT_SEEDS)
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument(
        "--guest", action="store_true", help="with --seed: in an engine that moves its experts"
    )
    parser.add_argument("--mutant", choices=BY_NAME, help="with --seed: replay it on a mutant")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed, options.mutant, options.guest, options.trace)
    return simulate(options.seeds, options.first, options.workers, options.mutant_seeds)


if __name__ == "__main__":
    sys.exit(main())
