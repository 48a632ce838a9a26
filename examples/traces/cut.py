"""Copy some steps of a trace: `python cut.py SOURCE TARGET FIRST LAST`.

Keeps what the reader knows of it; drops predictions and counts by source rank.
"""

import sys
from dataclasses import replace
from pathlib import Path

from evenkeel_moe.formats import read_trace, write_trace


def main(source: str, target: str, first: str, last: str) -> None:
    """Write steps first..last-1 of the source trace to the target."""
    trace, start, end = read_trace(Path(source)), int(first), int(last)
    if not 0 <= start < end <= trace.num_steps:
        raise SystemExit(f"cannot cut steps {start}..{end} from a trace of {trace.num_steps}")
    tokens = None if trace.tokens is None else trace.tokens[start:end]
    counts = trace.counts[start:end]
    write_trace(Path(target), replace(trace, counts=counts, tokens=tokens, source=None))


if __name__ == "__main__":
    main(*sys.argv[1:])
