"""The page, the table and the sentences in which a comparison is shown."""

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.formats import Trace
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.charts import PALETTE, lines
from evenkeel_moe.replay.compare import Comparison, compare, write_plans
from evenkeel_moe.replay.offline import plan_newest
from evenkeel_moe.replay.planners import choose_planners
from evenkeel_moe.replay.report import render_report
from evenkeel_moe.replay.walk import Setup
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S
from evenkeel_moe.replay.words import COLUMNS, sentences


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


def test_scored_steps_and_a_newest_window_without_load_have_no_value(setup):
    setup.load[8:] = 0.0
    assert "after: eplb, no load" in render_report(_compare(setup, "eplb"))
    _, numbers = plan_newest("eplb", setup, None, POLICIES)
    assert "time_over_fluid" not in numbers


def test_wide_charts_scroll_on_a_phone(setup):
    page = render_report(_compare(setup, "eplb"))
    assert "svg{width:100%;min-width:760px;" in page
    for label in ("balancedness by step", "time / fluid bound by step"):
        assert re.search(rf'<div class="scroll"><svg [^>]*aria-label="{label}', page), label


def test_saved_plans_are_those_that_were_scored(setup, tmp_path):
    comparison = _compare(setup, "once", "eplb")
    write_plans(tmp_path / "plans.npz", comparison)
    with np.load(tmp_path / "plans.npz") as plans:
        assert list(plans) == ["once_steps", "once_phy2log", "eplb_steps", "eplb_phy2log"]
        for walk in comparison.walks:
            steps, rows = plans[f"{walk.policy}_steps"], plans[f"{walk.policy}_phy2log"]
            assert (steps.dtype, rows.dtype) == (np.int64, np.int32)
            assert steps.tolist() == walk.steps.tolist()
            assert [Placement(row, 2, 8) for row in rows] == list(walk.placements)


# --- sentences and columns ---


def test_the_best_policy_is_named_with_what_it_gains_and_costs(setup):
    comparison = _compare(setup, "eplb", "initial")
    comparison = replace(
        comparison,
        results=tuple(
            replace(one, time_over_fluid=over, bytes=4_000_000_000, copy_s=0.5, replans=3)
            for one, over in zip(comparison.results, (1.1, 1.375), strict=True)
        ),
    )
    verdict, copies, *_ = sentences(comparison)
    assert verdict == (
        "eplb has the least predicted MoE time (by tokens), 10.0% above a perfect split of tokens,"
        " 20.0% less than the initial placement."
    )
    assert copies == "A replan of eplb copies 2 GB between ranks, about 0.25 s at 5 GB/s per rank."
    worse = replace(comparison, results=tuple(reversed(comparison.results)))
    assert sentences(worse)[0].startswith("eplb ")
    still = replace(comparison.results[0], bytes=0, copies_per_layer=0.0)
    alone = replace(comparison, results=(still,))
    assert sentences(alone)[1] == "After its first plan eplb copies nothing."
    unknown = replace(comparison.results[0], time_over_fluid=np.nan)
    nothing = sentences(replace(comparison, results=(unknown,)))
    assert "no load" in nothing[0] and nothing[1].startswith("Cost model")


def test_a_baseline_with_less_time_than_every_policy_is_named(setup):
    comparison = _compare(setup, "eplb", "initial", "ewma")
    results = tuple(
        replace(one, time_over_fluid=over)
        for one, over in zip(comparison.results, (1.2, 1.5, 1.1), strict=True)
    )
    assert sentences(replace(comparison, results=results))[0] == (
        "eplb has the least predicted MoE time (by tokens) of the policies (the baseline ewma has"
        " less), 20.0% above a perfect split of tokens, 20.0% less than the initial placement."
    )


def test_experts_of_unknown_size_have_copies_and_no_bytes(setup):
    comparison = _compare(replace(setup, shape=replace(setup.shape, bytes_per_expert=0)), "eplb")
    (result,) = comparison.results
    assert np.isnan([result.bytes, result.copy_s, result.first_bytes]).all()
    copies = f"{result.copies_per_layer:.1f} experts of each layer between ranks, of unknown size."
    assert result.copies_per_layer > 0
    assert sentences(comparison)[1] == f"A replan of eplb copies {copies}"


def test_ranks_copy_at_the_same_time(setup):
    (result,) = _compare(setup, "eplb").results
    assert result.bytes > 0
    assert result.copy_s == result.bytes / 2 / COPY_BYTES_PER_S


def test_the_page_begins_with_the_sentence_and_names_its_command(setup):
    comparison = _compare(setup, "eplb")
    page = render_report(comparison, made_by="evenkeel replay compare --trace '<b>'")
    assert page.index(sentences(comparison)[0]) < page.index("<table>")
    assert "--trace &#x27;&lt;b&gt;&#x27;</code>" in page
    plain = render_report(comparison)
    assert "Made by" not in plain and plain == render_report(comparison)


def test_the_best_values_are_those_shown_alike_in_columns_with_an_order(setup):
    (result,) = _compare(setup, "initial").results

    def best(key, *values):
        column = next(column for column in COLUMNS if column.key == key)
        cells = column.cells([replace(result, **{key: value}) for value in values])
        return [text for text, is_best in cells if is_best]

    assert best("time_over_fluid", 1.30004, 1.3, 1.4) == ["1.3000", "1.3000"]
    assert best("balancedness_mean", 0.8, 0.9, float("nan")) == ["0.9000"]
    assert best("bytes", 1, 2) == []
    assert best("time_over_fluid", float("nan")) == []


# --- charts ---

STEPS = np.arange(4.0)


def _lines(**series):
    return lines("a < b", STEPS, {name: np.array(values) for name, values in series.items()})


def test_nan_leaves_a_gap_in_the_line():
    drawing = ET.fromstring(_lines(a=[1.0, math.nan, 2.0, 3.0]))
    assert drawing.get("aria-label") == "a < b by step"
    styled = [node for node in drawing.iter("path") if "var(--blue)" in node.get("style", "")]
    path = styled[0].get("d", "")
    assert (path.count("M"), path.count("L")) == (2, 1)


def test_the_legend_lists_lines_by_where_they_end():
    drawing = ET.fromstring(_lines(a=[0, 0, 0, 2], b=[0, 0, 0, 3], c=[4, 4, 1, math.nan]))
    texts = ["".join(node.itertext()).strip() for node in drawing.iter("text")]
    assert [text for text in texts if text in {"a", "b", "c"}] == ["b", "a", "c"]


def test_colours_are_left_to_the_page_and_equal_charts_are_equal_text():
    first, second = (_lines(a=[0.5, 1.0, 1.0, 1.0], b=[0.5, 1.0, 2.0, 1.0]) for _ in range(2))
    assert first == second
    assert not re.search("#[0-9a-f]{6}", first.replace("#m", ""))
    assert set(re.findall(r"var\(--(\w+)\)", first)) <= set(PALETTE)
