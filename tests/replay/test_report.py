import re
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.formats import Trace
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.compare import Comparison, compare
from evenkeel_moe.replay.planners import choose_planners
from evenkeel_moe.replay.report import render_report
from evenkeel_moe.replay.walk import Setup
from evenkeel_moe.replay.walk_metrics import copy_seconds


def _compare(setup: Setup, *policies: str) -> Comparison:
    trace = Trace(setup.load.astype(np.int64), (3, 4))
    return compare(trace, setup, choose_planners(policies, baselines=False), 10)


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
def test_rank_loads_are_shown_before_and_after_for_any_choice_of_policies(setup, policies, maps):
    speeds = CostCurves.linear(np.array([1.0, 2.0]))
    setup = replace(
        setup, objective=Objective(cost=CostModel(speeds), dispatch=DispatchModel.NEAREST)
    )
    page = render_report(_compare(setup, *policies))
    titles = re.findall(r'aria-label="((?:before|after): [^"]*)"', page)
    assert [title.split(", worst")[0] for title in titles] == maps
    # The walk of the baseline `initial` scores the same loads.
    initial = _compare(setup, "initial").walks[0]
    load = initial.rank_load[-setup.horizon_steps :].sum(axis=0)
    worst = (load / load.mean(axis=1, keepdims=True)).max()
    assert titles[0] == f"before: initial, worst {worst:.2f}"


def test_equal_comparisons_give_equal_pages(setup):
    comparison = _compare(setup, "eplb")
    assert render_report(comparison) == render_report(comparison)


def test_copies_are_told_as_time(setup):
    comparison = _compare(setup, "eplb")
    page = render_report(comparison)
    drawing = page[page.index('aria-label="time of copies so far"') :]
    walk, shape = comparison.walks[0], setup.shape
    seconds = copy_seconds(walk.copies.sum() * comparison.bytes_per_expert, shape.num_ranks)
    assert seconds > 0
    last = re.findall(r"<title>eplb: (\d+), (\S+)</title>", drawing)[len(walk.steps) - 1]
    assert last == (str(walk.steps[-1]), f"{seconds:.4g}")


def test_wide_charts_scroll_on_a_phone(setup):
    page = render_report(_compare(setup, "eplb"))
    assert ".scroll>svg{min-width:760px}" in page
    for label in ("balancedness by step", "p50, p90 and p99", "time of copies"):
        assert re.search(rf'<div class="scroll"><svg [^>]*aria-label="{label}', page), label
