"""Measures choices within the policies on recorded routing: python -m bench.planning_setups.

The sections are GEM's set-ups of unequal ranks, the length of the window (GEM's Figure 10),
CRAFT's two objectives, and the largest possible gain from better forecasts. All are walk-forward.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from bench.gem_setups import gem_setup
from bench.planning_walk import FLEETS, RIVALS, recorded, setup_of, upper95
from bench.report import Row, print_row, write_report
from evenkeel_moe.formats import Trace
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.planning.policies.craft.policy import (
    CraftOptions,
    GainWeighting,
    ReplicaRule,
    plan_craft,
)
from evenkeel_moe.planning.policies.gem.policy import plan_gem
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.registry import warm_kernels
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal
from evenkeel_moe.replay.planners import choose_planners
from evenkeel_moe.replay.walk import Replan, Setup, Walk, walk_forward

__all__ = ["setup_rows"]

RANKS, SLOTS = 8, 72
WINDOWS = (4, 8, 16, 32, 64, 128, 256)
"""Window lengths in steps; each trace is used up to two thirds of its length."""
FACTORS = (4, 8, 16)
"""CRAFT's R: replicas per rank, over all layers."""
HORIZON = 16
"""Steps every plan of the sweep is scored on."""

Plan = Callable[[PlacementProblem], Proposal]


def _walk(name: str, plan: Plan, setup: Setup) -> Walk:
    def planner(replan: Replan) -> Proposal:
        return plan(replan.problem)

    return walk_forward(name, planner, setup)


def _over_fluid(walk: Walk) -> float:
    return float(walk.times.sum() / walk.fluid.sum())


def speed_rows(traces: list[Trace]) -> Iterator[list[Row]]:
    """Compare keel with GEM on ranks of unequal speed; a tile is 1/16 of a mean rank load."""
    for spread in ("moderate", "high"):
        ours, theirs = [], []
        for trace in traces:
            setup = setup_of(trace, RANKS, SLOTS)
            tokens = float(setup.load.sum(axis=2).mean()) / RANKS
            costs = gem_setup(spread, RANKS, tile_tokens=max(1, int(tokens / 16)), tiles=64)
            setup = replace(setup, objective=Objective(cost=CostModel(costs)))
            keel, gem = _walk("keel", plan_keel, setup), _walk("gem", plan_gem, setup)
            mine, other = keel.times.sum(axis=1), gem.times.sum(axis=1)
            name = f"gem_{spread}_{trace.name}"
            yield [
                Row(f"{name}_keel_over_gem", float(mine.sum() / other.sum()), "ratio"),
                Row(f"{name}_upper95", upper95(mine, other), "ratio"),
                Row(
                    f"{name}_copies_over_gem",
                    float(keel.copies[1:].sum() / gem.copies[1:].sum()),
                    "ratio",
                ),
            ]
            fluid = keel.fluid.sum(axis=1).mean()
            ours.append(mine / fluid)
            theirs.append(other / fluid)
        pooled = np.concatenate(ours), np.concatenate(theirs)
        yield [
            Row(f"gem_{spread}_keel_over_gem", float(pooled[0].sum() / pooled[1].sum()), "ratio"),
            Row(f"gem_{spread}_upper95", upper95(*pooled), "ratio"),
        ]


def window_rows(traces: list[Trace]) -> Iterator[list[Row]]:
    """Yield time over fluid of keel and GEM by window length, always scored on the same steps."""
    for trace in traces:
        windows = [window for window in WINDOWS if window <= trace.num_steps * 2 // 3]
        setup = setup_of(trace, RANKS, SLOTS)
        horizon = min(HORIZON, (trace.num_steps - windows[-1]) // 4)
        rows = []
        for window in windows:
            part = replace(
                setup,
                load=setup.load[windows[-1] - window :],
                window_steps=window,
                horizon_steps=horizon,
            )
            for name, plan in (("keel", plan_keel), ("gem", plan_gem)):
                walk = _walk(name, plan, part)
                rows.append(Row(f"window_{window}_{trace.name}_{name}", _over_fluid(walk), "ratio"))
        yield rows


def craft_objective_rows(traces: list[Trace]) -> Iterator[list[Row]]:
    """Compare CRAFT by a layer's plain gain with CRAFT by the gain times its replicas.

    The figure is the mean balancedness out of sample, with pooled slots.
    """
    for trace in traces:
        setup = setup_of(trace, RANKS, SLOTS)
        single = trace.num_experts // RANKS
        rows = []
        for factor in FACTORS:
            shape = replace(
                setup.shape,
                slots_per_rank=single + factor,
                pool_slots_per_rank=trace.num_layers * single + factor,
            )
            for weighting in GainWeighting:
                plan = partial(plan_craft, options=CraftOptions(weighting, ReplicaRule.MEMORY))
                walk = _walk("craft", plan, replace(setup, shape=shape))
                balance = metrics.balancedness_mean(walk.rank_load)
                rows.append(
                    Row(
                        f"craft_{trace.name}_R{factor}_{weighting.value}_balancedness", balance, "1"
                    )
                )
        yield rows


def _foresee(replan: Replan) -> Proposal:
    """Plan with keel, given the mean load of each expert over the steps it is scored on."""
    problem, setup = replan.problem, replan.setup
    past = problem.load.mean(axis=0)
    coming = setup.load[replan.step : replan.step + setup.horizon_steps].mean(axis=0)
    told = problem.load * np.where(past > 0, coming / np.maximum(past, 1e-9), 1.0)
    # The means are known, so keel must not forecast them.
    return plan_keel(replace(problem, load=told), KeelOptions(foresight=0.999))


def foresight_rows(traces: list[Trace]) -> Iterator[list[Row]]:
    """Compare keel, and keel with foresight of means, with the best of the others.

    The difference is the largest gain that better forecasts could bring.
    """
    for ranks, slots in FLEETS:
        for trace in traces:
            setup = setup_of(trace, ranks, slots)
            rivals = [
                walk_forward(name, planner, setup).times.sum(axis=1)
                for name, planner in choose_planners(list(RIVALS), baselines=False).items()
            ]
            best = min(rivals, key=lambda times: float(times.sum()))
            keel = _walk("keel", plan_keel, setup).times.sum(axis=1)
            told = walk_forward("foresight", _foresee, setup).times.sum(axis=1)
            name = f"foresight_{ranks}x{slots}_{trace.name}"
            yield [
                Row(f"{name}_keel_over_best", float(keel.sum() / best.sum()), "ratio"),
                Row(f"{name}_told_over_best", float(told.sum() / best.sum()), "ratio"),
                Row(f"{name}_told_upper95", upper95(told, best), "ratio"),
            ]


def cadence_rows(traces: list[Trace]) -> Iterator[list[Row]]:
    """Compare keel by the steps between its plans with keel told the means of every 8 steps."""
    for ranks, slots in FLEETS:
        for trace in traces:
            if trace.name != "dsv2lite_prefill_phased":
                continue
            setup = setup_of(trace, ranks, slots)
            told = walk_forward("foresight", _foresee, setup)
            scored = len(told.times)
            part = replace(setup, load=setup.load[: setup.window_steps + scored])
            rows = []
            for every in (8, 4, 2, 1):
                walk = _walk("keel", plan_keel, replace(part, horizon_steps=every))
                copies = float(walk.copies[1:].sum()) / trace.num_layers / scored
                name = f"cadence_{ranks}x{slots}_every_{every}"
                rows += [
                    Row(
                        f"{name}_over_told",
                        float(walk.times.sum() / told.times.sum()),
                        "ratio",
                    ),
                    Row(f"{name}_copies", copies, "copies/layer/step"),
                ]
            yield rows


def setup_rows(traces: list[Trace]) -> Iterator[list[Row]]:
    """Yield the rows of every section."""
    yield from foresight_rows(traces)
    yield from cadence_rows(traces)
    yield from speed_rows(traces)
    yield from craft_objective_rows(traces)
    yield from window_rows(traces)


def main() -> None:
    """Run every section and write the report."""
    warm_kernels()
    rows = []
    for part in setup_rows(recorded()):
        for row in part:
            print_row(row)
        rows += part
    write_report("planning_setups", rows, ("numpy", "numba"))


if __name__ == "__main__":
    main()
