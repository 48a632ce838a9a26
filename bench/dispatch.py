"""Compares rules of per-batch dispatch: python -m bench.dispatch [SECTION ...]."""

from collections.abc import Callable, Iterable

import torch

from bench.dispatch_aware import aware_rows
from bench.dispatch_fewest import fewest_speed_rows, fewest_time_rows
from bench.dispatch_lplb import lplb_rows
from bench.dispatch_rules import rule_rows
from bench.dispatch_traces import TRACES, read_all
from bench.report import Row, run_sections


def main() -> None:
    """Run every section, or those named; without recorded traces, those that measure speed."""
    known: dict[str, Callable[[], Iterable[list[Row]]]] = {
        "lplb": lambda: [lplb_rows()],
        "fewest": lambda: [fewest_speed_rows()],
    }
    if traces := read_all(TRACES):
        known |= {
            "fewest-time": lambda: [fewest_time_rows(traces)],
            "rules": lambda: [rule_rows(traces)],
            "aware": lambda: [aware_rows(traces)],
        }
    else:
        print(f"no traces in {TRACES}: tables left out; name their folder in EVENKEEL_TRACES")
    torch.set_num_threads(1)
    run_sections("dispatch", known, ("numpy", "numba", "scipy", "torch"))


if __name__ == "__main__":
    main()
