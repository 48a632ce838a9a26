"""Compares policies by time under the roofline: python -m bench.time [NAME ...].

The time of a replica is the larger of reading its weights and computing its tokens. Reading takes
as long as computing k times the mean tokens of an expert. k = 0 is the balance of tokens; from
about k = 2 on, a further replica costs more than it relieves. Every policy walks forward over every
trace and is scored on steps that it has not seen, under three dispatchers; Waterfill also has the
work of one shared expert. `linear` has no replicas, `initial` is the placement that engines start
with.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from bench.planning_walk import Case, cases, drawn, setup_of, upper95
from bench.report import Row, print_parts
from bench.time_models import DISPATCHES, READS, parser_of, roofline
from bench.time_plans import plan_rows
from bench.time_verdict import verdict_rows
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.registry import POLICIES, warm_kernels
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.replay.planners import choose_planners
from evenkeel_moe.replay.walk import Setup, Walk, walk_forward

COSTED = "gem"
"""Plans by the time of ranks, under any dispatcher: it walks once for each cost of reading."""
RIVALS = tuple(name for name in POLICIES if name not in ("keel", COSTED))
"""Policies whose placements follow from tokens or activations alone: they walk once."""


def _walk(name: str, setup: Setup) -> Walk:
    return walk_forward(name, choose_planners([name], baselines=False)[name], setup)


def _scored(setup: Setup, steps: list[int], placements: list[Placement]) -> np.ndarray:
    """Return the (n * horizon,) times of placements that take effect at some steps."""
    parts = []
    for step, placement in zip(steps, placements, strict=True):
        last = step + setup.horizon_steps
        split = setup.split(step, last)
        load = setup.load[step:last]
        times = moe_time.step_times(load, placement, setup.objective.cost, split)
        parts.append(times.sum(axis=1))
    return np.concatenate(parts)


def time_rows(
    chosen: list[Case],
    reads: tuple[float, ...] = READS,
    dispatches: tuple[DispatchModel, ...] = DISPATCHES,
) -> Iterator[list[Row]]:
    """Yield the rows of each trace and fleet. Copies do not include the first plan."""
    for trace, ranks, slots in chosen:
        setup = setup_of(trace, ranks, slots)
        walks = {name: _walk(name, setup) for name in RIVALS}
        steps = walks["eplb"].steps.tolist()
        fixed = {"linear": Placement.linear(setup.shape), "initial": Placement.initial(setup.shape)}
        rows = []
        mean, top_k = float(setup.load.mean()), trace.top_k or 1
        for reading in reads:
            costed = roofline(mean, reading, DispatchModel.EVEN, top_k)
            walks[COSTED] = _walk(COSTED, replace(setup, objective=costed))
            for dispatch in dispatches:
                objective = roofline(mean, reading, dispatch, top_k)
                under = replace(setup, objective=objective)
                times = {
                    name: _scored(under, steps, list(walk.placements))
                    for name, walk in walks.items()
                }
                for name, placement in fixed.items():
                    times[name] = _scored(under, steps, [placement] * len(steps))
                keel = _walk("keel", under)
                ours = keel.times.sum(axis=1)
                best = min(times, key=lambda name: float(times[name].sum()))
                theirs = times[best]
                copies = keel.copies[1:].sum() / walks["eplb"].copies[1:].sum()
                base = f"time_{trace.name}_{ranks}x{slots}_k{reading:g}_{dispatch}"
                rows += [
                    Row(f"{base}_over_best", float(ours.sum() / theirs.sum()), "ratio"),
                    Row(f"{base}_upper95", upper95(ours, theirs), "ratio"),
                    Row(f"{base}_copies_over_eplb", float(copies), "ratio"),
                ]
                linear = times["linear"].sum()
                print(
                    f"{base}: keel {ours.sum() / linear:.4f}, copies {copies:.3f}, best {best};"
                    + ", ".join(f" {n} {t.sum() / linear:.4f}" for n, t in times.items()),
                    flush=True,
                )
        yield rows


def main() -> None:
    """Run all traces, or those that are named, and the sections that are asked for."""
    parser = parser_of(str(main.__doc__))
    parser.add_argument("--drawn", action="store_true", help="drawn traffic, in place of traces")
    parser.add_argument("--only", action="append", choices=("walks", "verdict", "plans"))
    given = parser.parse_args()
    warm_kernels()
    chosen, reads = cases(given.names, given.fleet), tuple(given.k or READS)
    if given.drawn:
        chosen = [case for case in drawn() if not given.names or case[0].name in given.names]
    dispatches = tuple(given.dispatch or DISPATCHES)
    sections: dict[str, Callable[[], Iterable[list[Row]]]] = {
        "walks": lambda: time_rows(chosen, reads, dispatches),
        "verdict": lambda: [verdict_rows(chosen, reads, dispatches)],
        "plans": plan_rows,
    }
    print_parts("time", (rows for name in given.only or sections for rows in sections[name]()))


if __name__ == "__main__":
    main()
