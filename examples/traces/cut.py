"""Copy some steps of a trace: `python cut.py SOURCE TARGET FIRST LAST`.

Keeps the counts, tokens, top-k and domain mix; drops predictions and counts by source rank.
"""

import sys

import numpy as np

_BY_STEP = ("T", "tokens", "mix")
_WHOLE = ("layer_ids", "topk", "domains")


def main(source: str, target: str, first: str, last: str) -> None:
    """Write steps first..last-1 of the source trace to the target."""
    steps = slice(int(first), int(last))
    with np.load(source, allow_pickle=False) as trace:
        parts = {name: trace[name][steps] for name in _BY_STEP if name in trace}
        whole = {name: trace[name] for name in _WHOLE if name in trace}
    np.savez_compressed(target, **parts, **whole)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
