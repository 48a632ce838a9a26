"""Compares rules of per-batch dispatch: python -m bench.dispatch [--quick] [--traces FOLDER]."""

import argparse
import time
from pathlib import Path

import torch

from bench.dispatch_aware import aware_rows
from bench.dispatch_fewest import fewest_speed_rows, fewest_time_rows
from bench.dispatch_lplb import lplb_rows
from bench.dispatch_rules import rule_rows, rule_table
from bench.dispatch_traces import read_all
from bench.report import write_report

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


def main() -> None:
    """Run every section and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--traces", type=Path, default=TRACES, help="folder of recorded .npz traces"
    )
    arguments.add_argument(
        "--max-evaluations", type=int, default=2_000_000, help="keel's budget per plan"
    )
    arguments.add_argument(
        "--quick", action="store_true", help="speed of LPLB and fewest only: no traces"
    )
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    rows = lplb_rows() + fewest_speed_rows()
    if not chosen.quick:
        traces = read_all(chosen.traces)
        if not traces:
            print(f"no traces in {chosen.traces}: tables left out; name a folder with --traces")
        else:

            def on_trace(name: str) -> None:
                print(f"  {time.perf_counter() - begun:6.1f} s {name}", flush=True)

            rows += fewest_time_rows(traces)
            rows += rule_rows(rule_table(traces, chosen.max_evaluations, on_trace))
            rows += aware_rows(traces, chosen.max_evaluations, on_trace)
    write_report("dispatch", rows, ("numpy", "numba", "scipy", "torch"))


if __name__ == "__main__":
    main()
