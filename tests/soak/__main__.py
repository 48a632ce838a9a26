"""`python -m tests.soak --seconds N` runs hostile peers beside honest groups for N seconds.

The fleet must not lose a stream, a step, a lease or a plan, and the controller's memory must stay
within a bound. It prints the figures and exits with 1 if a promise was broken.
"""

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.soak.run import run_soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        say = partial(print, flush=True)
        broken = asyncio.run(run_soak(Path(folder), options.seconds, options.seed, say=say))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
