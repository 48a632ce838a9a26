"""`python -m tests.quint --seeds n` lets the model judge n seeds of the simulation.

`--chaos FOLDER` lets it judge a kept chaos run instead. `--replay n` replays n random runs of the
model through the real machines; `--replay n --mutants` breaks each rule that a rank keeps.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.quint.chaos import chaos_verdict
from tests.quint.judge import TREE, judge, record_seed
from tests.quint.replay import FOUND, STEPS, difference, runs_until_found
from tests.quint.translate import load
from tests.quint.values import Walk
from tests.quint.walks import Walker
from tests.sim.kit import Kit
from tests.sim.mutants import BY_NAME


def main() -> int:
    """Judge the seeds or the run and print the figures; return 1 if the model refuses one."""
    parser = argparse.ArgumentParser(prog="tests.quint")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--chaos", type=Path, help="what `python -m tests.chaos --folder` kept")
    parser.add_argument("--replay", type=int, help="number of runs of the model")
    parser.add_argument("--mutants", action="store_true")
    options = parser.parse_args()
    if options.replay is not None:
        return _replay_mutants(options.replay) if options.mutants else _replay(options)
    if options.chaos is not None:
        line, refused = chaos_verdict(options.chaos)
        print(line)
        return 1 if refused else 0
    model = load(TREE, Walk(0))
    lengths, switched, failed = [], 0, 0
    for seed in range(options.first, options.first + options.seeds):
        trace = record_seed(seed)
        if trace is None:
            continue
        verdict = judge(model, *trace)
        lengths.append(verdict.accepted)
        switched += len(verdict.state["switched"])
        if verdict.refused:
            failed += 1
            print(f"seed {seed}: the model refuses event {verdict.accepted}: {verdict.refused}")
    lengths.sort()
    spread = [lengths[int((len(lengths) - 1) * share)] for share in (0, 0.1, 0.5, 0.9, 1)]
    print(
        f"traces {len(lengths)} refused {failed} events {sum(lengths)} waves {switched}, "
        f"events a trace (min, 10 %, median, 90 %, max) {spread}"
    )
    return 1 if failed else 0


def _replay(options: argparse.Namespace) -> int:
    """Replay runs of the model and print the figures; return 1 if a machine differs."""
    walker, events, failed = Walker(), Counter[str](), 0
    for seed in range(options.first, options.first + options.replay):
        run = walker.run(seed, STEPS)
        events.update(step.event[0] for step in run[1])
        if found := difference(walker, run, Kit()):
            failed += 1
            print(f"run {seed}: {found}")
    kinds = ", ".join(f"{label} {number}" for label, number in events.most_common())
    print(f"runs {options.replay} different {failed} events {events.total()}: {kinds}")
    return 1 if failed else 0


def _replay_mutants(most: int) -> int:
    """Print how many runs find each rule broken; return 1 if one is not found."""
    found = runs_until_found(Walker(), {name: BY_NAME[name].kit for name in FOUND}, most)
    print(", ".join(f"{name} {number or 'not found'}" for name, number in found.items()))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
