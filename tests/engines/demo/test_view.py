"""The live view and the plain line of a snapshot."""

import io

import pytest
from rich.console import Console

from evenkeel_moe.engines.demo.view import Snapshot, chart, plain_line, render
from tests.engines.demo.lines import plan

STATUS = {
    "epoch": 2,
    "mode": "auto",
    "policy": "eplb",
    "state": "migrating",
    "active_plan": plan("p1", 1.0, phase="migrating", waves=4, waves_committed=1),
    "staging_bytes_done": 500_000,
    "staging_bytes_total": 2_000_000,
    "last_decision": {
        "reason": "balance_below_threshold",
        "numbers": {"balancedness": 0.61, "name": "x"},
    },
}


def snapshot(**changes):
    values = {
        "elapsed_s": 12.34,
        "step": 120,
        "steps": 400,
        "domain": "prose",
        "shares": [[0.6, 0.2], [0.2, 0.4], [0.1, 0.3], [0.1, 0.1]],
        "balancedness": 0.625,
        "history": [0.6] * 100 + [0.9] * 20,
        "marks": {100: "▲"},
        "status": STATUS,
        "events": ["plan p1 started"],
    }
    return Snapshot(**{**values, **changes})


def text_of(renderable, width=100):
    file = io.StringIO()
    Console(file=file, width=width, legacy_windows=False).print(renderable)
    return file.getvalue()


def test_the_view_shows_what_an_operator_asks_for():
    text = text_of(render(snapshot()))
    for part in (
        "step 120/400",
        "serving prose",
        "epoch 2",
        "auto/eplb",
        "rank 3",
        "40.0%",
        "0.625",
        "p1 migrating  wave 1/4",
        "500 kB of 2 MB",
        "balance_below_threshold",
        "plan p1 started",
        "every output so far equals",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_longest_bar_belongs_to_the_most_loaded_rank():
    bars = [
        line.split("│")[1].split("%")[0].count("█")
        for line in text_of(render(snapshot())).splitlines()
        if "rank " in line and "%" in line
    ]
    assert bars == sorted(bars, reverse=True)
    assert len(set(bars)) == 4


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_view_fits_its_terminal(width):
    text = text_of(render(snapshot(history=[0.7] * 1000), width), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert len(text.splitlines()) <= (24 if width >= 96 else 34)


def test_the_view_before_anything_is_known():
    empty = snapshot(
        step=None,
        domain="",
        shares=None,
        balancedness=None,
        history=[],
        marks={},
        status=None,
        events=[],
    )
    text = text_of(render(empty))
    assert "the ranks are starting" in text
    assert "step 0/400" in text
    assert plain_line(empty) == "  12.3 s | step - | balancedness -"


def test_wrong_outputs_are_shown_at_once():
    assert "3 outputs differ" in text_of(render(snapshot(mismatches=3)))
    assert "WRONG OUTPUTS 3" in plain_line(snapshot(mismatches=3))


def test_plain_line_is_one_line_of_ascii():
    assert plain_line(snapshot()) == (
        "  12.3 s | step 120/400 | prose | balancedness 0.625 | ranks 40% 30% 20% 10%"
        " | epoch 2 migrating | plan p1 migrating 1/4 copied 500 kB/2 MB"
        " | last decision balance_below_threshold"
    )


def test_chart_rises_with_balance_and_marks_the_swap():
    lines = chart([0.6] * 30 + [0.98] * 30, {30: "▲"}, columns=30, rows=4)
    assert len(lines) == 5
    top, bottom, under = lines[0][5:], lines[3][5:], lines[4][5:]
    assert len(top) == 30
    assert not top[:15].strip()
    assert top[15:].strip()
    assert bottom[:15].strip()
    assert under.index("▲") == 15
    assert lines[0].startswith("1.00")


def test_chart_without_steps_and_of_steps_without_load():
    assert chart([], {}, rows=2) == ["1.00 ", "0.50 ", "     "]
    nan = float("nan")
    assert chart([nan, nan], {}, rows=2)[0] == "1.00   "
    assert len(chart([0.0, 1.0], {}, rows=2)[0]) == 7


def test_layers_show_an_imbalance_that_their_sum_hides():
    hidden = snapshot(shares=[[1.0, 0.0], [0.0, 1.0]])
    rows = [line for line in text_of(render(hidden)).splitlines() if "50.0%" in line]
    assert [row.split("%")[1].split("│")[0].strip() for row in rows] == ["█▁", "▁█"]


def test_a_layer_without_tokens_is_blank():
    nan = float("nan")
    text = text_of(render(snapshot(shares=[[nan, 0.5], [nan, 0.5]])))
    assert "50.0%" in text
    assert "nan" not in text
