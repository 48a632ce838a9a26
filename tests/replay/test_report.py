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


def _compare(setup: Setup, *policies: str) -> Comparison:
    trace = Trace(setup.load.astype(np.int64), (3, 4))
    return compare(trace, setup, choose_planners(policies, baselines=False))


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
    titles = re.findall("<caption>((?:before|after): [^<]*)<", page)
    assert [title.split(", worst")[0] for title in titles] == maps
    # The walk of the baseline `initial` scores the same loads.
    initial = _compare(setup, "initial").walks[0]
    load = initial.rank_load[-setup.horizon_steps :].sum(axis=0)
    worst = (load / load.mean(axis=1, keepdims=True)).max()
    assert titles[0] == f"before: initial, worst {worst:.2f}"


def test_equal_comparisons_give_equal_pages(setup):
    comparison = _compare(setup, "eplb")
    assert render_report(comparison) == render_report(comparison)


def test_cells_are_shaded_by_their_distance_from_an_even_share(setup):
    """A cell has its layer, rank and load in words; a layer without load is blank."""
    setup.load[-4:, 1] = 0.0
    comparison = _compare(setup, "initial")
    page = render_report(comparison)
    cells = re.findall(r'--side:([^"]*)" title="layer (\d) rank (\d): ([^"]*)"', page)
    load = comparison.walks[0].rank_load[-4:].sum(axis=0)
    share = load[0, 0] / load[0].mean()
    assert share != 1.0
    side, other = ("over", "under") if share > 1 else ("under", "over")
    assert [(*where, told) for _, *where, told in cells] == [
        ("3", "0", f"{share:.2f}"),
        ("3", "1", f"{2 - share:.2f}"),
        ("4", "0", "nan"),
        ("4", "1", "nan"),
    ]
    shades = [shade for shade, *_ in cells]
    assert side in shades[0] and other in shades[1]
    assert shades[2:] == ["var(--paper)"] * 2


def test_wide_charts_scroll_on_a_phone(setup):
    page = render_report(_compare(setup, "eplb"))
    assert "svg{width:100%;min-width:760px;" in page
    for label in ("balancedness by step", "time / fluid bound by step"):
        assert re.search(rf'<div class="scroll"><svg [^>]*aria-label="{label}', page), label
