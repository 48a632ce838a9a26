"""Compares what plans for a slow rank promised with what they delivered, in runs of the demo.

The experts of one rank really take 12 % longer for a third of a run. The controller knows only the
seconds that ranks report. The ratio is of the sums over all runs, because one run measures the
saving to a few tenths of it.
"""

import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from bench.report import Row

__all__ = ["slow_rank_rows"]

RUNS = 5
TIMEOUT_S = 400

_SAVED = re.compile(r"([-\d.]+)% less, promised ([-\d.]+)%.* in force after (\d+) steps?;")
_FOUND = re.compile(r"that (?:rank \d+ is slow|the rank has recovered): after (\d+) steps?")
_PARTS = ("slow_rank", "slow_rank_recovery")


def _run() -> str:
    """Return the output of one run. A broken promise shows in the figures; the bench goes on."""
    command = [sys.executable, "-m", "evenkeel_moe", "demo", "--plain", "--slow"]
    command += ["--timeout-s", str(TIMEOUT_S - 60)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    told = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAIL"))]
    print("\n".join(told), flush=True)
    return done.stdout


def figures(printed: str) -> list[tuple[int, float, float, int]]:
    """Return (found after steps, % saved, % promised, in force after steps), slow and recovered.

    Raises:
        ValueError: the rank was not found slow and recovered, or not planned for.
    """
    found, saved = _FOUND.findall(printed), _SAVED.findall(printed)
    if len(found) != len(_PARTS) or len(saved) != len(_PARTS):
        raise ValueError(f"the run shows no plan both ways:\n{printed[-3000:]}")
    return [
        (int(steps), float(less), float(promised), int(force))
        for steps, (less, promised, force) in zip(found, saved, strict=True)
    ]


def slow_rank_rows() -> Iterator[list[Row]]:
    """Yield the rows, after all runs."""
    runs = []
    for number in range(RUNS):
        try:
            runs.append(figures(_run()))
        except (ValueError, subprocess.TimeoutExpired) as error:
            # The rows of the other benches must not be lost; a row of its own counts this run.
            print(f"slow rank, run {number + 1} of {RUNS}: {error}", flush=True)
    rows = [Row("slow_rank_runs_without_plans", float(RUNS - len(runs)), f"of {RUNS} runs")]
    for name, part in zip(_PARTS, zip(*runs, strict=True), strict=False):
        found, saved, promised, force = zip(*part, strict=True)
        rows += [
            Row(f"{name}_delivered_over_promised", sum(saved) / sum(promised), f"{len(runs)} runs"),
            Row(f"{name}_found_after", statistics.median(found), "steps"),
            Row(f"{name}_plan_in_force_after", statistics.median(force), "steps"),
        ]
    yield rows
