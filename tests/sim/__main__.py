"""`python -m tests.sim --seeds N` runs N seeds, and every mutant until an invariant catches it.

The last line is `seeds N events M pairs P/P mutants K/K`. The exit code is 0 only if no invariant
broke, every (state, event) pair of the tables passed and every mutant was caught. In a run of
thirty million events or more (some 16,000 seeds) every pair must also pass 1,000 times in ten
million.

    --seed X [--mutant R5] [--trace]   replay one seed exactly
    --agents [rules|guests]            ranks run the real agent, and the mutants are of its glue, or
                                       those of the rules; pairs need not pass
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from evenkeel_moe.adapters.processes.child_process import die_with_parent
from tests.sim.kinds import KINDS, Kind
from tests.sim.kit import all_pairs
from tests.sim.search import Hunt, Tally, hunt, run_seeds

MUTANT_SEEDS = 20_000
"""The seeds a mutant is searched for; a mutant that is not caught in them survives."""
CHUNK = 100
MAX_FAILURES = 10
RAREST = 5
OFTEN = 1000
"""The times each pair must pass in ten million events of a full run."""
FULL = 3 * 10**7
"""The events of a full run. In shorter runs the rates of rare pairs vary too much."""


def replay(kind: Kind, seed: int, mutant: str | None, trace: bool) -> int:
    kit = kind.by_name[mutant].kit if mutant is not None else None
    outcome = kind.run_seed(seed, kit, trace=trace)
    print(f"seed {seed} events {outcome.events} swapped waves {outcome.committed}")
    if outcome.violation is None:
        return 0
    print(f"{outcome.violation}: {outcome.detail}")
    return 1


def simulate(kind: Kind, seeds: int, first: int, workers: int, mutant_seeds: int) -> int:
    began = time.monotonic()
    total = Tally()
    # A simulation that is killed must not leave its workers behind.
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        hunts = [pool.submit(hunt, mutant.name, mutant_seeds, kind.name) for mutant in kind.mutants]
        chunks = [
            pool.submit(run_seeds, start, min(CHUNK, first + seeds - start), kind.name)
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
                print(f"  replay: {kind.command} --seed {seed} --trace", flush=True)
        results = [job.result() for job in hunts]
    rates = pair_rates(total)
    if kind.covers_pairs:
        show_rarest(rates)
    for result in results:
        report(kind, result)
    caught = sum(result.seed is not None for result in results)
    seconds = time.monotonic() - began
    print(f"{total.waves} waves swapped, {len(total.failures)} failures, {seconds:.0f} s")
    covered = sum(rate > 0 for rate in rates.values())
    print(
        f"seeds {total.seeds} events {total.events} pairs {covered}/{len(rates)}"
        f" mutants {caught}/{len(results)}"
    )
    clean = is_clean(total) if kind.covers_pairs else not total.failures
    return 0 if clean and caught == len(results) else 1


def show_rarest(rates: dict[tuple[str, str, str], float]) -> None:
    for pair in sorted(rates, key=lambda pair: (rates[pair], pair))[:RAREST]:
        print(f"rarest pairs: {' '.join(pair)}, {rates[pair]:.0f} per 10^7 events")
    below = sum(rate < OFTEN for rate in rates.values())
    print(f"pairs below {OFTEN} per 10^7 events: {below} of {len(rates)}")


def pair_rates(total: Tally) -> dict[tuple[str, str, str], float]:
    """Return the times each pair of the tables passed, per ten million events."""
    return {pair: total.pairs[pair] * 10**7 / max(total.events, 1) for pair in all_pairs()}


def is_clean(total: Tally) -> bool:
    """Return True if no invariant broke and every pair passed, in a full run often enough."""
    least = OFTEN if total.events >= FULL else 0
    return not total.failures and all(
        rate > 0 and rate >= least for rate in pair_rates(total).values()
    )


def report(kind: Kind, result: Hunt) -> None:
    mutant = kind.by_name[result.name]
    if result.seed is None:
        print(f"mutant {mutant.name:4} SURVIVED {result.tried} seeds: {mutant.breaks}")
        return
    found = f"caught by {result.invariant} at seed {result.seed}"
    print(f"mutant {mutant.name:4} {mutant.breaks}: {found}")
    print(f"  replay: {kind.command} --seed {result.seed} --mutant {mutant.name} --trace")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutant-seeds", type=int, default=MUTANT_SEEDS)
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--mutant", help="with --seed: replay it on a mutant")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument(
        "--agents",
        nargs="?",
        const="agents",
        default="machines",
        choices=("agents", "guests", "rules"),
        help="let ranks run the real agent; `rules`: with the mutants of the rules",
    )
    options = parser.parse_args(arguments)
    kind = KINDS[options.agents]()
    if options.mutant not in (None, *kind.by_name):
        parser.error(f"--mutant is one of {', '.join(kind.by_name)}")
    if options.seed is not None:
        return replay(kind, options.seed, options.mutant, options.trace)
    return simulate(kind, options.seeds, options.first, options.workers, options.mutant_seeds)


if __name__ == "__main__":
    sys.exit(main())
