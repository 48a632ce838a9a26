"""The page of a comparison: what it draws, whoever was compared."""

import re
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.formats import Trace
from evenkeel_moe.planning.problem.objective import CostCurves, DispatchModel, Objective
from evenkeel_moe.replay.compare import compare
from evenkeel_moe.replay.page import render_page
from evenkeel_moe.replay.planners import choose_planners


def _heat_maps(setup, *policies):
    """Titles of the heat maps, the worst rank in each."""
    trace = Trace(setup.load.astype(np.int64), (3, 4))
    page = render_page(compare(trace, setup, choose_planners(policies, baselines=False), 10))
    return re.findall(r'aria-label="((?:before|after): [^"]*)"', page)


@pytest.mark.parametrize(
    ("policies", "maps"),
    [
        (["eplb"], ["before: initial", "after: eplb"]),
        (["once"], ["before: initial", "after: once"]),
        (["ewma", "initial", "once"], ["before: initial", "after: ewma", "after: once"]),
        (["initial"], ["before: initial"]),
        (["once", "eplb"], ["before: initial", "after: eplb"]),
    ],
)
def test_rank_loads_are_shown_before_and_after_whoever_is_compared(setup, policies, maps):
    speeds = CostCurves.linear(np.array([1.0, 2.0]))
    setup = replace(setup, objective=Objective(costs=speeds, dispatch=DispatchModel.NEAREST))
    shown = _heat_maps(setup, *policies)
    assert [title.split(", worst")[0] for title in shown] == maps
    # The walk of the baseline scores the very same loads.
    walked = compare(
        Trace(setup.load.astype(np.int64), (3, 4)),
        setup,
        choose_planners(["initial"], baselines=False),
        10,
    ).walks[0]
    load = walked.rank_load[-setup.horizon_steps :].sum(axis=0)
    assert (
        shown[0] == f"before: initial, worst {(load / load.mean(axis=1, keepdims=True)).max():.2f}"
    )
