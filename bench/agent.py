"""Measures the cost of the agent to its engine: python -m bench.agent [--steps] [--pairs].

Calls: two rank processes with DeepSeek-V3's layer and expert counts step together and report to a
real controller. Each agent call is timed where the engine makes it.

Overhead: two fleets of the reference engine take turns of two seconds, one with the agent under a
controller and one without. A signal stops one while the other runs. The speed of a machine drifts
by several percent within minutes, so only neighbouring turns are compared.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.agent_rank import POLL_EVERY, RESOLVE_AFTER
from bench.report import Row, write_report
from evenkeel_moe.engines.demo.fleet_log import FleetLog
from evenkeel_moe.engines.reference.lines import read_new_lines
from tests.integration.controller_rig import Controller
from tests.integration.whole import Fleet, whole

RANKS = 2
WARM_STEPS = 50
"""Steps that are not counted: connections, registration and the first polls."""
TURN_S = 2.0
SETTLE_S = 0.1
"""The start of a turn that is not counted: caches fill, and reports that waited are sent."""
ENGINE = {"num_ranks": RANKS, "d_model": 256, "d_ffn": 512, "verify_every": 0, "min_step_s": 0.0}


async def time_calls(steps: int, folder: Path) -> list[dict[str, NDArray[np.float64]]]:
    """Return the call times of every rank, under a controller in observe mode."""
    async with Controller(folder / "data", PLANNER__MODE="observe") as controller:
        ranks = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.agent_rank",
                str(rank), str(RANKS), str(steps), str(folder), controller.address,
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
    """Return quantiles over all ranks; boundaries that begin or use a poll have separate rows."""
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
        what = f"us, {micros.size} calls" + (
            f", K {POLL_EVERY}, D {RESOLVE_AFTER}" if name == "poll" else ""
        )
        rows += [
            Row(f"{name}_p50_us", float(np.median(micros)), what),
            Row(f"{name}_p99_us", float(np.quantile(micros, 0.99)), what),
        ]
    return rows


@dataclass(slots=True)
class Side:
    """One of the two fleets and its turns."""

    fleet: Fleet
    turns: list[tuple[float, float]] = field(default_factory=list)
    """(start, end) Unix seconds of each turn."""

    def signal(self, number: int) -> None:
        for pid in self.fleet.supervisor.pids:
            # `run` reports a process that ended; the others must still get the signal.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def run(self, seconds: float) -> None:
        """Let the fleet run for one turn."""
        began = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        ended = time.time()
        self.signal(signal.SIGSTOP)
        if self.fleet.supervisor.poll() is not None:
            raise SystemExit("a fleet ended")
        self.turns.append((began, ended))

    def step_times(self) -> NDArray[np.float64]:
        """Return (turns,) mean seconds of the steps within each turn, after its first SETTLE_S."""
        log = FleetLog(RANKS)
        log.feed(read_new_lines(self.fleet.supervisor.folder, {}))
        ended = np.array([row.unix for row in log.rows])
        took = np.array([row.seconds for row in log.rows])
        return np.array(
            [
                took[(ended - took > began + SETTLE_S) & (ended < end)].mean()
                for began, end in self.turns
            ]
        )


def take_turns(pairs: int, folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (with agent, without agent), each (pairs,) seconds per step.

    The two fleets swap the first turn from pair to pair.
    """
    bare = Side(Fleet(folder / "bare", (), **ENGINE, agent=False))
    settings = {"PLANNER__MODE": "observe", "PLANNER__CYCLE_S": 3600}
    with whole(folder / "whole", settings, ENGINE) as (served, fleet):
        ours = Side(fleet)
        # In production a controller has its own machine; here it only gets what the ranks leave.
        for process in (
            controller := psutil.Process(served.pid),
            *controller.children(recursive=True),
        ):
            process.nice(19)
        try:
            bare.fleet.supervisor.start()
            for side in (bare, ours):
                served.wait(
                    lambda side=side: side.fleet.newest_step() >= WARM_STEPS, 120, "the first steps"
                )
            for side in (bare, ours):
                side.signal(signal.SIGSTOP)
            for pair in range(pairs):
                for side in (ours, bare) if pair % 2 else (bare, ours):
                    side.run(TURN_S)
            if not (served.status() or {}).get("window_steps"):
                raise SystemExit("the controller saw no step: nothing was measured")
            return ours.step_times(), bare.step_times()
        finally:
            for side in (bare, ours):
                side.signal(signal.SIGCONT)
            bare.fleet.supervisor.stop()


def overhead_rows(pairs: int) -> list[Row]:
    """Return the ratio of step times and its upper bound, over pairs of turns."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        ours, bare = take_turns(pairs, Path(folder))
    draws = np.random.default_rng(0).integers(0, pairs, (2000, pairs))
    ratios = ours[draws].sum(axis=1) / bare[draws].sum(axis=1)
    what = f"{pairs} pairs of turns of {TURN_S:g} s"
    return [
        Row("overhead_ratio", float(ours.sum() / bare.sum()), what),
        Row(
            "overhead_ratio_upper95",
            float(np.quantile(ratios, 0.975)),
            "paired bootstrap over pairs",
        ),
        Row("overhead_step_s", float(np.median(bare)), "s, median turn without the agent"),
    ]


def main() -> None:
    """Measure and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=4000, help="timed steps of the calls")
    arguments.add_argument(
        "--pairs", type=int, default=150, help="turns of the engine with, and as many without"
    )
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        rows = call_rows(asyncio.run(time_calls(chosen.steps, Path(folder))))
    rows += overhead_rows(chosen.pairs)
    write_report("agent", rows, ("torch", "grpcio"))


if __name__ == "__main__":
    main()
