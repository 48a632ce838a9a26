"""`python -m tests.fuzz --seconds N` gives every parser wrong input for N seconds in all.

A parser may only raise what it promises, and must answer within seconds. Input that made one fail
is kept in tests/fuzz/corpus/TARGET, and is tried first from then on.
"""

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
_SLOWEST_S = 10.0
"""Much more than any input of a megabyte takes."""
_POOL = 400
"""Inputs that a target builds on: those that were taken or refused in a new way."""


def kept(target: Target) -> list[bytes]:
    """Return the inputs of the corpus of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]


def failure(target: Target, data: bytes) -> tuple[str, str]:
    """Return what one input led to, and how it failed; empty: it did not."""
    began = time.monotonic()
    try:
        target.parse(data)
        outcome = "taken"
    except target.refusals as error:
        outcome = f"{type(error).__name__}: {str(error)[:40]}"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"[:300]
    took = time.monotonic() - began
    return outcome, f"took {took:.1f} s" if took > _SLOWEST_S else ""


def inputs(target: Target, rng: random.Random, pool: list[bytes]) -> Iterator[bytes]:
    """Yield the corpus, the seeds, and then changed ones for ever."""
    yield from pool
    while True:
        yield mutated(rng, rng.choice(pool), rng.choice(pool))


def fuzz(target: Target, seconds: float, seed: int) -> tuple[int, int, dict[str, bytes]]:
    """Fuzz one target; return inputs tried, inputs taken, and those that failed, by failure."""
    rng, pool = random.Random(f"{target.name} {seed}"), [*kept(target), *target.seeds]
    seen: set[str] = set()
    failures: dict[str, bytes] = {}
    tried = taken = 0
    least, until = 2 * len(pool), time.monotonic() + seconds
    for data in inputs(target, rng, pool):
        if tried >= least and time.monotonic() >= until:
            break
        tried += 1
        outcome, how = failure(target, data)
        taken += outcome == "taken"
        if how:
            failures.setdefault(how.partition(":")[0], data)
        if outcome not in seen and len(pool) < _POOL:
            seen.add(outcome)
            pool.append(data)
    return tried, taken, failures


def keep(target: Target, data: bytes) -> Path:
    """Add an input to the corpus of a target."""
    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.blake2b(data, digest_size=8).hexdigest()
    path.write_bytes(data)
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    options = parser.parse_args(arguments)
    total = failed = 0
    for target in TARGETS:
        tried, taken, failures = fuzz(target, options.seconds / len(TARGETS), options.seed)
        total += tried
        failed += len(failures)
        print(f"{target.name:20} {tried:8} inputs, {taken} taken, {len(failures)} failures")
        for how, data in failures.items():
            print(f"  {how}: kept as {keep(target, data)}", flush=True)
    print(f"targets {len(TARGETS)} inputs {total} failures {failed} seed {options.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
