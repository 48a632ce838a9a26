"""Compares predicted MoE time of other numbers of ranks with what these then took.

`python -m bench.capacity` runs four ranks of the reference engine under a controller in `auto` and
asks it for the capacity at other sizes. Then it runs fleets of these sizes, which get as many
tokens a step, and lets their controllers plan. The experts of a rank take a given time per token
and replica, so that two cores can show it. The measured time is from the lines of the ranks.

It needs a machine that does nothing else: other processes delay the ranks.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from bench.delivered import paced_fleet
from bench.report import Row, write_report
from evenkeel_moe.engines.demo.fleet_log import FleetLog
from evenkeel_moe.engines.demo.slow_rank import moe_s
from evenkeel_moe.engines.reference.lines import read_new_lines

TODAY, SIZES = 4, (3, 6, 8)
TOKENS = 960
"""All ranks together route so many in a step."""
STEPS, COMPARED = 360, 96
_TIMEOUT_S = 300.0


def serve(ranks: int, sizes: tuple[int, ...] = ()) -> tuple[float, dict[int, Mapping[str, Any]]]:
    """Run a fleet under a controller that plans.

    Args:
        ranks: of the fleet.
        sizes: other numbers of ranks, for which the controller is asked at the end.

    Returns:
        (MoE seconds of a step in the last steps, the controller's row of each size).
    """
    # Twice the steps, so that the ranks still serve when the controller is asked.
    paced = paced_fleet(ranks, 2 * STEPS, tokens_per_step=TOKENS // ranks)
    with paced as (controller, supervisor, stop):
        fleet, offsets = FleetLog(ranks), dict[Path, int]()
        until = time.monotonic() + _TIMEOUT_S
        while not stop and (not fleet.rows or fleet.rows[-1].step < STEPS):
            if supervisor.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{ranks} ranks did not serve {STEPS} steps")
            fleet.feed(read_new_lines(supervisor.folder, offsets))
            stop.wait(0.2)
        rows: dict[int, Mapping[str, Any]] = {}
        if sizes:
            asked = "&".join(f"to_ranks={size}" for size in sizes)
            found = None
            while found is None and time.monotonic() < until:
                with suppress(httpx.TimeoutException):  # The controller is slow beside its ranks.
                    found = controller.get(f"deployments/demo/capacity?{asked}")
            if found is None:
                raise SystemExit(f"the controller told no capacity within {_TIMEOUT_S:.0f} s")
            rows = {w["ranks"]: w for w in found["rows"] if w["present"] or w["ranks"] != ranks}
    last = [row for row in fleet.rows if row.step > fleet.rows[-1].step - COMPARED]
    return moe_s(last), rows


def main() -> None:
    """Run all sizes, print the figures and write the report."""
    measured, predicted = serve(TODAY, (TODAY, *SIZES))
    print("ranks  predicted  measured  ratio")
    report = []
    for size in (TODAY, *SIZES):
        seconds = measured if size == TODAY else serve(size)[0]
        told = predicted[size]["moe_time"]
        print(f"{size:5d}  {1e3 * told:6.1f} ms  {1e3 * seconds:5.1f} ms  {told / seconds:.3f}")
        report.append(Row(f"capacity_{size}_predicted_over_measured", told / seconds, ""))
    write_report("capacity", report)


if __name__ == "__main__":
    main()
