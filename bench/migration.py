"""Measures the cost of moving weights: python -m bench.migration [--pairs] [--rounds] [--plans].

Bandwidth: two rank processes stage the same wave in turn through the agent, timed from the first
byte to the last vote, and by one bare batch_isend_irecv. Further pairs of processes repeat it,
because pairs differ more than rounds do.

Serving: a fleet of the reference engine under a real controller gets one random placement after
another. Its steps during a plan are compared with as many steps before it.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Row, write_report
from evenkeel_moe.engines.demo.fleet_log import FleetLog, StepRow
from evenkeel_moe.engines.reference.lines import read_new_lines
from tests.chaos.operator import draw_target
from tests.integration.whole import Fleet, Served, plans, whole

RANKS = 2
WARM_STEPS = 60
BETWEEN_STEPS = 60
"""Steps without a plan before each plan: at least as many as a plan takes."""
SERVING = {
    "num_ranks": RANKS,
    "d_model": 256,
    "d_ffn": 512,
    "staging_bytes": 64 << 20,
    "verify_every": 0,
    "min_step_s": 0.0,
}


def bandwidth(pairs: int, rounds: int) -> list[Row]:
    """Compare both ways of copying by the medians of each pair over interleaved rounds."""
    found = [copy_both_ways(rounds) for _ in range(pairs)]
    ratios = [float(np.median(one["bare_s"]) / np.median(one["ours_s"])) for one in found]
    rates = [one["bytes"] / float(np.median(one["ours_s"])) for one in found]
    return [
        Row(
            "bandwidth_ratio_to_raw",
            float(np.median(ratios)),
            "ratio of medians, median over pairs",
        ),
        Row("bandwidth_ratio_to_raw_lowest", min(ratios), "of the pairs"),
        Row("bandwidth_ratio_to_raw_highest", max(ratios), "of the pairs"),
        Row("bandwidth_bytes_per_s", float(np.median(rates)), "bytes / s, all ranks"),
    ]


def copy_both_ways(rounds: int) -> dict[str, Any]:
    """Run one pair of processes and return its measurements."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.migration_rank",
                    str(rank),
                    str(RANKS),
                    str(rounds),
                    folder,
                ]
            )
            for rank in range(RANKS)
        ]
        codes = [rank.wait(600) for rank in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        figures: dict[str, Any] = json.loads((Path(folder) / "bandwidth.json").read_text())
        return figures


def serving(wanted: int) -> list[Row]:
    """Measure a fleet that carries out one plan after another."""
    rng, log, offsets = random.Random(7), FleetLog(RANKS), {}
    with (
        tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder,
        whole(Path(folder), {"PLANNER__MODE": "observe"}, SERVING) as (served, fleet),
    ):

        def steps(count: int) -> int:
            goal = fleet.newest_step() + count
            served.wait(lambda: fleet.newest_step() >= goal, 120, f"step {goal}")
            return goal

        steps(WARM_STEPS)
        for number in range(wanted):
            steps(BETWEEN_STEPS)
            move(served, fleet, rng, f"bench-{number}")
        log.feed(read_new_lines(fleet.supervisor.folder, offsets))
        return serving_rows(log, plans(served))


def move(served: Served, fleet: Fleet, rng: random.Random, plan_id: str) -> None:
    """Request a random placement and wait until it is committed."""
    shape = fleet.config.shape
    target = {"physical_to_logical": draw_target(rng, shape, fleet.config.pool_slots_per_layer)}

    def asked() -> bool:
        answer = served.post("/plans", {"plan_id": plan_id, "approve": True, "target": target})
        return answer.is_success

    served.wait(asked, 60, f"{plan_id} to be taken")
    served.wait(
        lambda: served.get(f"/plans/{plan_id}")["phase"] == "committed", 60, f"{plan_id} to commit"
    )


def serving_rows(log: FleetLog, done: Sequence[dict]) -> list[Row]:
    """Compare the steps during each plan with as many right before it, over all plans."""
    during: list[StepRow] = []
    before: list[StepRow] = []
    for plan in done:
        last = max(swap.step for swap in log.swaps if swap.plan_id == plan["plan_id"])
        running = [row for row in log.rows if row.unix >= plan["created_at"] and row.step <= last]
        calm = [row for row in log.rows if row.unix < plan["created_at"]]
        during += running
        before += calm[-len(running) :] if running else []
    median = quantile(log.rows, 0.5)
    swaps = [swap.seconds for swap in log.swaps]
    return [
        Row("swap_over_median_step", max(swaps) / median, "longest swap over a median step"),
        Row("swap_median_over_median_step", float(np.median(swaps)) / median, "median swap"),
        Row(
            "step_p99_ratio",
            quantile(during, 0.99) / quantile(before, 0.99),
            f"{len(during)} steps of plans, p99 over before",
        ),
        Row(
            "step_median_ratio", quantile(during, 0.5) / quantile(before, 0.5), "median over before"
        ),
        Row("step_median_s", median, "s"),
        Row("plans", float(len(done)), "committed"),
    ]


def quantile(rows: Sequence[StepRow], share: float) -> float:
    """Return a quantile of the slowest rank's step times [s]."""
    return float(np.quantile([row.seconds for row in rows], share))


def main() -> None:
    """Measure and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--pairs", type=int, default=9, help="pairs of processes, one after the other"
    )
    arguments.add_argument("--rounds", type=int, default=20, help="waves each pair copies each way")
    arguments.add_argument(
        "--plans", type=int, default=20, help="plans under which the fleet serves"
    )
    chosen = arguments.parse_args()
    began = time.monotonic()
    rows = bandwidth(chosen.pairs, chosen.rounds)
    print(f"bandwidth took {time.monotonic() - began:.0f} s", flush=True)
    rows += serving(chosen.plans)
    write_report("migration", rows, ("torch", "xxhash"))


if __name__ == "__main__":
    main()
