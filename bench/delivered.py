"""Compares what plans promised with what they delivered, on the reference engine.

`make bench-delivered` (`python -m bench.delivered RUNS`) runs a controller in `auto` and 4 ranks,
several times with other weights. The experts of a rank take a given time per token and replica, so
that a plan changes the time of a step. In the second third of a run one rank takes 1.4 times as
long. Ranks report their seconds, and the controller measures every plan. The bench also measures
the plans from the lines that the ranks wrote, layer by layer, which the controller never sees.

It needs a machine that does nothing else: other processes delay the ranks.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench.report import Row, write_report
from evenkeel_moe.engines.demo.controller import DemoController
from evenkeel_moe.engines.demo.fleet_log import FleetLog
from evenkeel_moe.engines.demo.options import PACE_S_PER_REPLICA, PACE_S_PER_TOKEN, DemoOptions
from evenkeel_moe.engines.demo.processes import StopFlag, stop_flag
from evenkeel_moe.engines.demo.slow_rank import moe_s
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.lines import read_new_lines
from evenkeel_moe.engines.reference.supervisor import Supervisor

RUNS = 5
STEPS = 540
_RANKS = 4
_SLOW_FACTOR = 1.4
_PACE = 2.0
"""Times the pace of the demo: the longer a layer takes, the less other processes matter."""
_LARGE = 0.05
"""Promises from here on are shown apart: noise of a percent hides smaller ones."""
_TIMEOUT_S = 400.0
_COMPARED = 64
_LEAST, _MOST = 0.7, 1.3


class Measured(NamedTuple):
    """A plan that the controller measured."""

    run: int
    because: str
    delivered: Mapping[str, Any]
    """As REST returns it."""
    by_lines: float
    """Share of MoE time saved by the ranks' own lines; NaN with too few steps."""


def share_rows(start: str, delivered: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the share of plans that delivered what they promised, of all and of large ones.

    A share of no plan is unknown: it has no row.
    """
    ratios = np.array([one["over_promised"] for one in delivered], float)
    kept = (_LEAST <= ratios) & (ratios <= _MOST)
    large = np.array([one["promised"] >= _LARGE for one in delivered], bool)
    rows = [Row(f"{start}large_plans", float(large.sum()), f"promised {_LARGE:.0%} or more")]
    if len(ratios):
        share = float(kept.mean())
        rows += [
            Row(f"{start}within_share", share, "of the measured, from 0.7 to 1.3"),
            Row(f"{start}over_promised_median", float(np.median(ratios)), ""),
        ]
    if large.any():
        rows.append(Row(f"{start}large_within_share", float(kept[large].mean()), "of the large"))
    return rows


@contextmanager
def paced_fleet(
    ranks: int, steps: int, **config: Any
) -> Iterator[tuple[DemoController, Supervisor, StopFlag]]:
    """Run a controller in `auto` and ranks whose experts take a given time, until the end.

    Args:
        ranks: of the fleet.
        steps: after which the ranks end.
        config: further fields of `RankConfig`.
    """
    options = DemoOptions(ranks=ranks, steps=steps, by_time=True)
    with stop_flag() as stop, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenkeel-bench-")))
        controller = DemoController(options, folder)
        stack.callback(controller.stop)
        if not controller.wait_ready(stop):
            raise SystemExit(f"the controller did not start:\n{controller.log_tail()}")
        controller.wait_planner(stop)
        supervisor = Supervisor(
            RankConfig(
                run_folder=str(folder / "ranks"),
                num_ranks=ranks,
                steps=steps,
                deployment="demo",
                controllers=(controller.grpc_address,),
                pace_s_per_token=_PACE * PACE_S_PER_TOKEN,
                pace_s_per_replica=_PACE * PACE_S_PER_REPLICA,
                verify_every=0,
                **config,
            ),
            max_restarts=0,
        )
        stack.callback(supervisor.stop)
        supervisor.start()
        yield controller, supervisor, stop


def run_once(run: int) -> list[Measured]:
    """Run the controller and the ranks once; return the plans that were measured."""
    paced = paced_fleet(
        _RANKS,
        STEPS,
        seed=3 + run,
        slow_rank=1,
        slow_factor=_SLOW_FACTOR,
        slow_from=STEPS // 3,
        slow_until=2 * STEPS // 3,
    )
    with paced as (controller, supervisor, stop):
        fleet, offsets = FleetLog(_RANKS), dict[Path, int]()
        plans: list[Mapping[str, Any]] = []
        until = time.monotonic() + _TIMEOUT_S
        while supervisor.poll() is None and not stop and time.monotonic() < until:
            fleet.feed(read_new_lines(supervisor.folder, offsets))
            plans = _plans(controller) or plans
            stop.wait(0.5)
        fleet.feed(read_new_lines(supervisor.folder, offsets))
    return [
        Measured(
            run, plan["planned_because"], plan["delivered"], gain_by_lines(fleet, plan["plan_id"])
        )
        for plan in plans
        if plan["delivered"] is not None and plan["delivered"]["over_promised"] is not None
    ]


def _plans(controller: DemoController) -> list[Mapping[str, Any]]:
    """Return the plans, oldest first; none without an answer."""
    try:
        page = controller.get("deployments/demo/plans")
    except httpx.HTTPError:
        return []
    return [] if page is None else list(reversed(page["items"]))


def gain_by_lines(fleet: FleetLog, plan_id: str) -> float:
    """Return the share of MoE time that a plan saved, by the seconds of each layer in the lines.

    Every step has the same number of tokens. Steps before the rank's speed changed do not count.
    """
    mine = [swap.step for swap in fleet.swaps if swap.plan_id == plan_id]
    others = [swap.step for swap in fleet.swaps if swap.plan_id != plan_id]
    if not mine:
        return float("nan")
    changes = [step for step in (STEPS // 3, 2 * STEPS // 3) if step < min(mine)]
    from_step = max([step for step in others if step < min(mine)] + changes, default=-1)
    to_step = min([step for step in others if step > max(mine)], default=STEPS)
    before = [row for row in fleet.rows if from_step < row.step < min(mine)][-_COMPARED:]
    after = [row for row in fleet.rows if max(mine) < row.step < to_step][:_COMPARED]
    if min(len(before), len(after)) < _COMPARED // 4:
        return float("nan")
    return 1.0 - moe_s(after) / moe_s(before)


def rows_of(found: list[Measured]) -> list[Row]:
    """Return the figures of all runs."""
    delivered = [one.delivered for one in found]
    gain, promised = (sum(one[key] for one in delivered) for key in ("gain", "promised"))
    inside = [one["lower"] <= one["promised"] <= one["upper"] for one in delivered]
    apart = [one.delivered["gain"] - one.by_lines for one in found if np.isfinite(one.by_lines)]
    rows = [
        Row("delivered_plans", float(len(found)), "measured plans"),
        *share_rows("delivered_", delivered),
        Row("delivered_over_promised_sum", gain / promised, "sum of gains"),
        Row("delivered_promise_in_interval_share", float(np.mean(inside)), "of the plans"),
    ]
    if apart:
        rows.append(Row("delivered_minus_lines_mean", float(np.mean(np.abs(apart))), "absolute"))
    return rows


def main() -> None:
    """Run, print every plan, and write the report."""
    found: list[Measured] = []
    print("run  promised  delivered  (95 %)          modelled  by lines  ratio  because")
    for run in range(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS):
        for one in run_once(run):
            found.append(one)
            told = one.delivered
            print(
                f"{run:3d}  {told['promised']:8.1%}  {told['gain']:9.1%}  ({told['lower']:6.1%},"
                f" {told['upper']:6.1%})  {told['modelled']:8.1%}  {one.by_lines:8.1%}"
                f"  {told['over_promised']:5.2f}  {one.because}",
                flush=True,
            )
    if len(found) == len({one.run for one in found}):
        raise SystemExit("at most one plan of each run was measured, none for the slow rank")
    write_report("delivered", rows_of(found))


if __name__ == "__main__":
    main()
