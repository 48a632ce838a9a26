"""What the agent costs its engine: python -m bench.agent [--steps] [--runs].

Calls: two rank processes of DeepSeek-V3's counts step together and report to a real controller; each call is timed
where the engine makes it. Overhead: the reference engine with the agent under a controller and without, in turn, over
the same tokens; step times are paired by step number.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.agent_rank import POLL_EVERY, RESOLVE_AFTER
from bench.report import Row, write_report
from evenkeel.engines.demo.fleet import FleetLog, read_new_lines
from tests.integration.controller_rig import Controller
from tests.integration.whole import Fleet, whole

RANKS = 2
WARM_STEPS = 50
"""Not counted: connections, registration and the first polls."""
ENGINE = {"num_ranks": RANKS, "d_model": 256, "d_ffn": 512, "verify_every": 0, "min_step_s": 0.0}


async def time_calls(steps: int, folder: Path) -> list[dict[str, NDArray[np.float64]]]:
    """The calls of every rank under a controller that only watches."""
    async with Controller(folder / "data", PLANNER__MODE="observe") as controller:
        ranks = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.agent_rank", str(rank), str(RANKS), str(steps), str(folder), controller.address
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        codes = await asyncio.wait_for(asyncio.gather(*(rank.wait() for rank in ranks)), 600)
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        seen = (await controller.status("bench")).get("window_steps")
        if not seen:
            raise SystemExit("the controller saw no step: nothing was measured")
    return [dict(np.load(folder / f"calls-{rank}.npz")) for rank in range(RANKS)]


def call_rows(calls: list[dict[str, NDArray[np.float64]]]) -> list[Row]:
    """Quantiles over all ranks; boundaries at which a poll begins or is used are apart."""
    number = np.arange(1, calls[0]["boundary"].size + 1)
    polls = (number % POLL_EVERY == 0) | ((number - RESOLVE_AFTER) % POLL_EVERY == 0)
    kinds = {
        "record": [rank["record"] for rank in calls],
        "bare_store": [rank["bare_store"] for rank in calls],
        "boundary": [rank["boundary"][~polls] for rank in calls],
        "poll": [rank["boundary"][polls] for rank in calls],
    }
    rows = []
    for name, parts in kinds.items():
        micros = np.concatenate([part[len(part) // 10 :] for part in parts]) * 1e6
        micros = micros[~np.isnan(micros)]
        what = f"us, {micros.size} calls" + (f", K {POLL_EVERY}, D {RESOLVE_AFTER}" if name == "poll" else "")
        rows += [
            Row(f"{name}_p50_us", float(np.median(micros)), what),
            Row(f"{name}_p99_us", float(np.quantile(micros, 0.99)), what),
        ]
    return rows


def step_times(steps: int, with_agent: bool, folder: Path) -> NDArray[np.float64]:
    """(steps,) seconds of the slowest rank. Without the agent a controller runs all the same, with nothing to do."""
    config = ENGINE | {"agent": with_agent, "steps": WARM_STEPS + steps}
    log = FleetLog(RANKS)
    with whole(folder, {"PLANNER__MODE": "observe", "PLANNER__CYCLE_S": 3600}, config) as (served, fleet):
        # A controller has a machine of its own; here it may only have what the ranks leave.
        for process in (controller := psutil.Process(served.pid), *controller.children(recursive=True)):
            process.nice(19)
        served.wait(lambda: ended(fleet), 300, "the ranks to end")
        log.feed(read_new_lines(fleet.supervisor.folder, RANKS, {}))
    return np.array([row.seconds for row in sorted(log.rows, key=lambda row: row.step)])[WARM_STEPS:]


def ended(fleet: Fleet) -> bool:
    """Whether all steps were run; a fleet that failed stops the bench."""
    report = fleet.supervisor.poll()
    if report is not None and not report.ok:
        raise SystemExit(f"the fleet failed: {report}")
    return report is not None


def overhead_rows(steps: int, runs: int) -> list[Row]:
    """With and without in turn, the order swapped each time; a step's time is its median over the runs."""
    times: dict[bool, list[NDArray[np.float64]]] = {True: [], False: []}
    for run in range(runs):
        for with_agent in (True, False) if run % 2 else (False, True):
            with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
                times[with_agent].append(step_times(steps, with_agent, Path(folder)))
    ours, bare = (np.median(np.stack(times[key]), axis=0) for key in (True, False))
    rng = np.random.default_rng(0)
    draws = rng.integers(0, steps, (2000, steps))
    ratios = ours[draws].sum(axis=1) / bare[draws].sum(axis=1)
    return [
        Row("overhead_ratio", float(ours.sum() / bare.sum()), f"{runs} runs of {steps} steps each"),
        Row("overhead_ratio_upper95", float(np.quantile(ratios, 0.975)), "paired bootstrap over steps"),
        Row("overhead_step_s", float(np.median(bare)), "s, median step without the agent"),
    ]


def main() -> None:
    """Measure and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=4000, help="timed steps of the calls")
    arguments.add_argument("--engine-steps", type=int, default=200, help="steps of one run of the engine")
    arguments.add_argument("--runs", type=int, default=8, help="runs of the engine with, and as many without")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        rows = call_rows(asyncio.run(time_calls(chosen.steps, Path(folder))))
    rows += overhead_rows(chosen.engine_steps, chosen.runs)
    write_report("agent", rows, ("torch", "grpcio"))


if __name__ == "__main__":
    main()
