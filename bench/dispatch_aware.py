"""Measures the gain from planning for the dispatch rule in use instead of for an even split."""

from dataclasses import replace

import numpy as np

from bench.dispatch_traces import Recorded, setup_of
from bench.planning_walk import upper95
from bench.report import Row
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.walk import walk_forward


def aware_rows(traces: list[Recorded]) -> list[Row]:
    """Compare keel planned for NEAREST and for OPTIMAL with keel planned for EVEN.

    Both placements are dispatched by the rule under test. A block is the horizon of one plan. Its
    time is divided by the fluid bound, so that each block weighs the same in every trace.
    """
    rows = []
    for dispatch in (DispatchModel.NEAREST, DispatchModel.OPTIMAL):
        aware_all, even_all, worst = [], [], 0.0
        print(f"\nplanned for {dispatch.value} over planned for even, under {dispatch.value}")
        for trace in traces:
            setup = setup_of(trace, dispatch)
            aware = walk_forward("aware", lambda replan: plan_keel(replan.problem), setup)
            even = walk_forward(
                "even",
                lambda replan: plan_keel(
                    replace(replan.problem, objective=Objective(dispatch=DispatchModel.EVEN))
                ),
                setup,
            )
            blocks = len(aware.steps)
            fluid = aware.fluid.reshape(blocks, -1).sum(axis=1)
            ours = aware.times.reshape(blocks, -1).sum(axis=1) / fluid
            theirs = even.times.reshape(blocks, -1).sum(axis=1) / fluid
            ratio = float(ours.sum() / theirs.sum())
            worst = max(worst, ratio)
            print(f"{trace.name:24}{ratio:9.4f}")
            aware_all.append(ours)
            even_all.append(theirs)
        ours, theirs = np.concatenate(aware_all), np.concatenate(even_all)
        rows += [
            Row(f"keel_for_{dispatch.value}_ratio", float(ours.sum() / theirs.sum()), "ratio"),
            Row(f"keel_for_{dispatch.value}_upper95", upper95(ours, theirs), "ratio"),
            Row(f"keel_for_{dispatch.value}_worst_trace", worst, "ratio"),
        ]
    return rows
