"""Copy some steps of a trace: `python cut.py SOURCE TARGET FIRST LAST`.

Keeps the counts, tokens, top-k and domain mix; drops predictions and counts by source rank.
"""

import sys
from dataclasses import replace
from pathlib import Path

from evenkeel_moe.formats import read_trace, write_trace


def main(source: str, target: str, first: str, last: str) -> None:
    """Write steps first..last-1 of the source trace to the target."""
    trace = read_trace(Path(source)).cut(int(first), int(last))
    write_trace(Path(target), replace(trace, source=None))


if __name__ == "__main__":
    main(*sys.argv[1:])
