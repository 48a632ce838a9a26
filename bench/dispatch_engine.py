"""Runs the reference engine under every dispatch rule, in real processes with checked outputs."""

import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import Row
from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.planning.problem.metrics import balancedness_mean

__all__ = ["engine_rows", "run_ranks"]

RANKS, STEPS = 4, 60
LONGEST_S = 150.0


def engine_rows() -> list[Row]:
    """Run each rule on the initial placement: 5 slots per rank for 4 experts.

    The balancedness counts the shared expert's work too.
    """
    rows = []
    print(
        f"\nreference engine, {RANKS} ranks, {STEPS} steps:"
        " realised balancedness of routed and shared work"
    )
    for rule in DispatchRule:
        with tempfile.TemporaryDirectory() as folder:
            config = RankConfig(
                run_folder=folder,
                num_ranks=RANKS,
                steps=STEPS,
                agent=False,
                dispatch=rule,
                experts=16,
            )
            if not run_ranks(Supervisor(config)):
                print(f"{rule.value:12} did not finish in {LONGEST_S:.0f} s")
                continue
            served, wrong, seconds = _read(Path(folder))
        balance = balancedness_mean(served)
        verdict = f"WRONG: {wrong} rows differ" if wrong else "exact"
        print(
            f"{rule.value:12} balancedness {balance:.4f}   step {seconds * 1e3:6.2f} ms"
            f"   outputs {verdict}"
        )
        rows += [
            Row(f"engine_{rule.value}_balancedness", balance, "1"),
            Row(f"engine_{rule.value}_wrong_rows", float(wrong), "rows"),
        ]
    return rows


def run_ranks(supervisor: Supervisor) -> bool:
    """Run a group to its end; return True if every rank ended well, within the time for it."""
    deadline = time.monotonic() + LONGEST_S
    supervisor.start()
    try:
        while (report := supervisor.poll()) is None:
            if time.monotonic() > deadline:
                return False
            try:
                supervisor._ranks[0].wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        return report.ok
    finally:
        supervisor.stop()


def _read(folder: Path) -> tuple[np.ndarray, int, float]:
    """Return ((T, L, R) tokens computed, wrong rows, median step seconds)."""
    served, wrong, seconds = [], 0, []
    for rank in range(RANKS):
        found = [
            json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()
        ]
        steps = [row for row in found if row["kind"] == "step"]
        served.append([row["served"] for row in steps])
        seconds += [row["seconds"] for row in steps]
        wrong += sum(row["mismatches"] for row in found if row["kind"] == "check")
    return np.moveaxis(np.array(served, np.float64), 0, 2), wrong, float(np.median(seconds))
