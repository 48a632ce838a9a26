"""Walks a policy forward over recorded loads, and compares it with walks that were saved.

To measure a change of a policy::

    python -m bench.walks --save old.json       # before it
    python -m bench.walks --against old.json    # after it

A row is one trace on one fleet under one dispatcher, where reading an expert takes as long as
computing k times its mean tokens. The policy plans on a window and is scored on the steps after it.
The table gives, for each dispatcher and k, the ratio of times (mean and worst row) and the copies
of a layer and replan, without those of the first plan.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.planning_walk import cases, setup_of
from bench.time_models import READS, parser_of, roofline
from evenkeel_moe.formats import Trace
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.registry import find_policy, warm_kernels
from evenkeel_moe.replay.walk import Setup, walk_forward

REPLANS = 12
"""Most replans of a walk."""


def setup_under(trace: Trace, ranks: int, slots: int, k: float, rule: DispatchModel) -> Setup:
    """Return the set-up of one row; nearest dispatch has two nodes and the trace's origins."""
    setup = setup_of(trace, ranks, slots)
    steps = setup.window_steps + REPLANS * setup.horizon_steps
    load = setup.load[:steps]
    objective = roofline(float(load.mean()), k, rule, trace.top_k or 1)
    setup = replace(setup, load=load, objective=objective)
    if rule is not DispatchModel.NEAREST:
        return setup
    nodes = Topology(tuple(2 * rank // ranks for rank in range(ranks)))
    source = trace.source
    if source is None or source.shape[1] != ranks:
        return replace(setup, topology=nodes)
    return replace(setup, topology=nodes, source=source[:steps].astype(np.float64))


def walk_rows(policy: str, given: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the figures of each row."""
    plan = find_policy(policy)
    rows = product(
        cases(given.names, given.fleet), given.dispatch or DispatchModel, given.k or READS
    )
    for (trace, ranks, slots), rule, k in rows:
        setup = setup_under(trace, ranks, slots, k, rule)
        walk = walk_forward(policy, lambda replan: plan(replan.problem), setup)
        first = setup.horizon_steps
        yield (
            f"{rule} k={k:g} {trace.name} {ranks}x{slots}",
            {
                "time": float(walk.times.sum() / walk.fluid.sum()),
                "first": float(walk.times[:first].sum() / walk.fluid[:first].sum()),
                "copies": float(walk.copies[1:].mean() / trace.num_layers),
                "plan_s": float(np.median(walk.plan_s)),
            },
        )


def table(rows: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Return a line for each dispatcher and k: time over that of the saved walks, and copies."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in rows:
        if name in saved:
            groups[" ".join(name.split()[:2])].append(name)
    lines = []
    for group, names in groups.items():
        ratio = {name: rows[name]["time"] / saved[name]["time"] for name in names}
        first = [rows[name]["first"] / saved[name]["first"] for name in names]
        worst = max(ratio, key=lambda name: ratio[name])
        ours, theirs = (sum(table[n]["copies"] for n in names) for table in (rows, saved))
        seconds = sum(rows[n]["plan_s"] for n in names) / sum(saved[n]["plan_s"] for n in names)
        lines.append(
            f"{group:18s} {len(names):3d} rows: mean {np.mean(list(ratio.values())):.4f}, worst"
            f" {ratio[worst]:.4f} ({' '.join(worst.split()[2:])}), first {np.mean(first):.4f},"
            f" copies {ours / len(names):.2f} against {theirs / len(names):.2f},"
            f" time of a plan {seconds:.2f}"
        )
    return lines


def main() -> None:
    """Walk all traces, or those that are named."""
    parser = parser_of(str(__doc__).splitlines()[0])
    parser.add_argument("--policy", default="keel")
    parser.add_argument("--save", type=Path, help="file for the figures of the rows")
    parser.add_argument("--against", type=Path, help="file of saved rows to compare with")
    given = parser.parse_args()
    warm_kernels()
    saved = json.loads(given.against.read_text()) if given.against else {}
    begin, rows = time.perf_counter(), {}
    for name, figures in walk_rows(given.policy, given):
        rows[name] = figures
        beside = f", {figures['time'] / saved[name]['time']:.4f}" if name in saved else ""
        print(f"{name}: {figures['time']:.4f}{beside}, copies {figures['copies']:.2f}", flush=True)
    if given.save:
        given.save.write_text(json.dumps(rows, indent=1))
    print(*table(rows, saved), sep="\n")
    print(f"{len(rows)} rows in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
