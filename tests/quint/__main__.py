"""`python -m tests.quint --seeds n` lets the model judge n seeds of the simulation.

`--chaos FOLDER` lets it judge a kept chaos run instead.
"""

import argparse
import sys
from pathlib import Path

from tests.quint.chaos import chaos_verdict
from tests.quint.judge import TREE, judge, record_seed
from tests.quint.translate import load
from tests.quint.values import Walk


def main() -> int:
    """Judge the seeds or the run and print the figures; return 1 if the model refuses one."""
    parser = argparse.ArgumentParser(prog="tests.quint")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--chaos", type=Path, help="what `python -m tests.chaos --folder` kept")
    options = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
