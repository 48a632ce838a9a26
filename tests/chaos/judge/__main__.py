"""`python -m tests.chaos.judge FOLDER`: judges a kept run; exits with 1 if it finds a breach."""

import argparse
import sys
from pathlib import Path

from tests.chaos.judge.verdict import judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.judge")
    parser.add_argument("folder", type=Path, help="that `python -m tests.chaos --folder` kept")
    verdict = judge(parser.parse_args().folder)
    print("\n".join(verdict.lines()))
    return 1 if verdict.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
