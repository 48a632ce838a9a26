"""`python -m tests.sim --seeds N`: N seeds, then every mutant until an invariant catches it.

The last line is `seeds N events M pairs P/P mutants K/K`; the exit code is 0 only when no invariant
broke, every (state, event) pair of the tables was passed and every mutant was caught. A run of thirty million
events or more (some 16,000 seeds) must have passed every pair a thousand times in ten million, too.

    --seed X [--mutant R5] [--trace]   replay one seed exactly
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.sim.kit import all_pairs
from tests.sim.mutants import BY_NAME, MUTANTS
from tests.sim.run import run_seed
from tests.sim.search import Hunt, Tally, hunt, run_seeds

MUTANT_SEEDS = 20_000
"""A mutant not caught within so many seeds has survived."""
CHUNK = 100
MAX_FAILURES = 10
RAREST = 5
OFTEN = 1000
"""How often in ten million events a pair must pass, for a machine's answer there to count as tried."""
FULL = 3 * 10**7
"""A run of fewer events leaves that to chance: what is rare comes in bursts, a few seeds have most of it."""


def replay(seed: int, mutant: str | None, trace: bool) -> int:
    kit = BY_NAME[mutant].kit if mutant is not None else None
    outcome = run_seed(seed, kit, trace=trace)
    print(f"seed {seed} events {outcome.events} swapped waves {outcome.committed}")
    if outcome.violation is None:
        return 0
    print(f"{outcome.violation}: {outcome.detail}")
    return 1


def simulate(seeds: int, first: int, workers: int, mutant_seeds: int) -> int:
    began = time.monotonic()
    total = Tally()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        hunts = [pool.submit(hunt, mutant.name, mutant_seeds) for mutant in MUTANTS]
        chunks = [
            pool.submit(run_seeds, start, min(CHUNK, first + seeds - start))
            for start in range(first, first + seeds, CHUNK)
        ]
        shown = 0
        for chunk in chunks:
            tally = chunk.result()
            total.seeds += tally.seeds
            total.events += tally.events
            total.waves += tally.waves
            total.pairs += tally.pairs
            total.failures += tally.failures
            for seed, invariant, detail in tally.failures[: max(0, MAX_FAILURES - shown)]:
                shown += 1
                print(f"FAILED seed {seed}: {invariant}: {detail}")
                print(f"  replay: python -m tests.sim --seed {seed} --trace", flush=True)
        results = [job.result() for job in hunts]
    rates = pair_rates(total)
    for pair in sorted(rates, key=lambda pair: (rates[pair], pair))[:RAREST]:
        print(f"rarest pairs: {' '.join(pair)}, {rates[pair]:.0f} per 10^7 events")
    below = sum(rate < OFTEN for rate in rates.values())
    print(f"pairs below {OFTEN} per 10^7 events: {below} of {len(rates)}")
    for result in results:
        report(result)
    caught = sum(result.seed is not None for result in results)
    print(
        f"{total.waves} waves swapped, {len(total.failures)} failures, {time.monotonic() - began:.0f} s"
    )
    covered = sum(rate > 0 for rate in rates.values())
    print(
        f"seeds {total.seeds} events {total.events} pairs {covered}/{len(rates)} mutants {caught}/{len(results)}"
    )
    return 0 if is_clean(total) and caught == len(results) else 1


def pair_rates(total: Tally) -> dict[tuple[str, str, str], float]:
    """How often each pair of the tables passed in ten million events."""
    return {pair: total.pairs[pair] * 10**7 / max(total.events, 1) for pair in all_pairs()}


def is_clean(total: Tally) -> bool:
    """No invariant broke, and every pair was passed: in a full run, often."""
    least = OFTEN if total.events >= FULL else 0
    return not total.failures and all(
        rate > 0 and rate >= least for rate in pair_rates(total).values()
    )


def report(result: Hunt) -> None:
    mutant = BY_NAME[result.name]
    if result.seed is None:
        print(f"mutant {mutant.name:4} SURVIVED {result.tried} seeds: {mutant.breaks}")
        return
    print(
        f"mutant {mutant.name:4} {mutant.breaks}: caught by {result.invariant} at seed {result.seed}"
    )
    print(f"  replay: python -m tests.sim --seed {result.seed} --mutant {mutant.name} --trace")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutant-seeds", type=int, default=MUTANT_SEEDS)
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument(
        "--mutant", choices=sorted(BY_NAME), help="with --seed: replay it on a mutant"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed, options.mutant, options.trace)
    return simulate(options.seeds, options.first, options.workers, options.mutant_seeds)


if __name__ == "__main__":
    sys.exit(main())
