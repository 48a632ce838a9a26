"""`python -m tests.chaos --seconds 600 --seed 1`: exits non-zero and lists the violations."""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

from tests.chaos.processes import MARK
from tests.chaos.run import run_chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of faults; starting and checking add some"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--peers", action="store_true", help="let hostile peers attack in place of faults"
    )
    parser.add_argument(
        "--folder", type=Path, help="for logs; kept. Without it only a failed run keeps them"
    )
    arguments = parser.parse_args()
    os.environ[MARK] = str(uuid.uuid4())
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = asyncio.run(
        run_chaos(
            folder,
            arguments.seed,
            arguments.seconds,
            num_ranks=arguments.ranks,
            peers=arguments.peers,
            say=print,
        )
    )
    if result.broken:
        print(f"broken, logs are in {folder}:")
        for sentence in result.broken:
            print(f"  {sentence}")
        return 1
    if arguments.folder is None:
        shutil.rmtree(folder)
    print("nothing broke")
    return 0


if __name__ == "__main__":
    sys.exit(main())
