import json
import re

import pytest

from evenkeel_moe.cli.heat import heat_map
from evenkeel_moe.cli.insight_tables import recommendation_view
from tests.api.fakes import NOW
from tests.cli.conftest import drawn


def answer(rows, **changes):
    found = {
        "deployment": "demo",
        "phase": None,
        "steps": 5,
        "newest_step": 4,
        "newest_step_unix": NOW,
        "ranks_connected": 2,
        "first_layer": 0,
        "ranks": rows,
        "experts": None,
    }
    return found | changes


def test_the_recommendation_answers_in_words_first(run):
    code, out, _ = run("recommend", "-d", "demo")
    assert code == 0
    assert out.splitlines()[0] == (
        "demo: A plan is recommended. A cycle would start a plan, if the gates before planning are"
        " open."
    )
    assert "eplb would make 2 copies." in out
    wide = run("recommend", "-d", "demo", "-o", "wide")[1]
    row = next(line for line in wide.splitlines() if line.startswith("eplb  "))
    assert "20.0%" in row and "15.0% to 25.0%" in row and "10 steps" in row
    assert "2 (now)" in out
    assert "the row (now) is not the present placement" in " ".join(out.split())


def test_a_plan_that_a_recommendation_imagines_has_not_started(run):
    out = run("recommend", "-d", "demo")[1]
    row = next(line for line in out.splitlines() if line.startswith("eplb  "))
    assert "Would start a plan." in row
    assert "plan_started" not in out


def test_one_number_of_replicas_is_advised_and_the_others_are_told_apart(run, operations):
    words = " ".join(run("recommend", "-d", "demo")[1].split())
    advised, others = words.split("Other rules for the number of extra replicas")
    assert "Extra replicas per layer: 2 now, 2 advised" in advised and "CRAFT" not in advised
    assert others.index("advised above is by predicted MoE time alone") < others.index("R = 2")
    assert "R: the extra replicas that a rank holds, counted over all layers" in others


def test_the_replicas_of_craft_are_told_by_layer_with_their_gains(run):
    out = run("recommend", "-d", "demo")[1]
    shown = [line.split() for line in out.splitlines() if re.match(r" *[01] +[02] +0\.", line)]
    assert shown == [["0", "2", "0.500", "0.900", "▄", "█"], ["1", "0", "0.900", "0.900", "▁"]]
    assert "CRAFT with R = 1, layer by layer" in out


@pytest.mark.parametrize("gain", [0.0, -0.1])
def test_replicas_that_gain_nothing_are_told_too(run, gain):
    answer = json.loads(run("recommend", "-d", "demo", "-o", "json")[1])
    answer["redundancy"]["craft_allocation"]["gain"] = [[gain, gain], [gain, gain]]
    shown = "\n".join(drawn(recommendation_view(answer), width=120))
    assert f"the highest is {gain:.3f}" in shown


def test_the_heat_map_names_its_largest_cells(run):
    code, out, _ = run("heatmap", "-d", "demo", "--experts")
    assert code == 0
    assert "largest: 2.00 (expert 0 in layer 0)" in out
    assert re.search(r"^ +rank\nlayer +0 1$", run("heatmap", "-d", "demo")[1], re.MULTILINE)


def test_an_unknown_load_is_told_and_not_drawn(run, operations):
    assert "no complete step is known yet" in run("heatmap", "-d", "fresh")[1]
    operations.views["demo"].placed = None
    assert "the placement is unknown" in run("heatmap", "-d", "demo")[1]


@pytest.mark.parametrize("width", [80, 120])
def test_a_large_heat_map_fits_the_terminal_and_keeps_its_worst_cell(width):
    rows: list[list[float | None]] = [[1.0] * 320 for _ in range(92)]
    rows[77][301] = 9.5
    rows[3][5] = None
    lines = drawn(heat_map(answer(rows), False, NOW), width)
    assert max(len(line) for line in lines) <= width
    cells = [line for line in lines if re.match(r"\d+(-\d+)? +[=@.#+?-]+$", line)]
    assert len(cells) <= 40
    assert sum(line.count("@") for line in cells) == 1
    assert any("9.50 (rank 301 in layer 77)" in line for line in lines)


def test_the_audit_tells_who_did_what(run):
    assert "no request for a change" in run("audit", "-d", "demo")[1]
    run("pause", "-d", "demo", "--for", "60")
    run("policy", "set", "-d", "demo", "mode=observe")
    run("plan", "cancel", "nope", "-d", "demo")
    lines = run("audit", "-d", "demo", "-o", "wide")[1].splitlines()
    assert re.search(r"alice +operate +Reject or cancel plan nope +404", lines[1])
    assert re.search(r"Change the policy: mode=observe +200 done", lines[2])
    assert re.search(r"Pause for 60 s +204 done", lines[3])


def test_recorded_placements_are_listed_with_their_state(run):
    out = run("placement", "list", "-d", "demo")[1]
    states = [line.split()[2] for line in out.splitlines()[1:3]]
    assert states == ["present", "replaced"]
    assert "--to-placement" in out and "another history" in out
    rows = json.loads(run("placement", "list", "-d", "demo", "-o", "json")[1])
    assert [row["epoch"] for row in rows] == [3, 8]


def test_rejected_reports_are_shown_with_samples(run, operations):
    out = run("deployment", "quarantine", "-d", "demo")[1]
    assert re.search(r"sum_mismatch +12 +rank 1: rank 1: 7 tokens, counts sum to 9", out)
    operations.rejected = []
    assert "no report was rejected" in run("deployment", "quarantine", "-d", "demo")[1]


@pytest.mark.parametrize(
    ("ranks", "head"),
    [
        (4, "layer     0 1 2 3"),
        (16, "layer     0   2   4   6   8   10  12  14"),
        (64, "layer     " + "".join(str(rank).ljust(4) for rank in range(0, 64, 4)).rstrip()),
    ],
)
def test_the_head_of_a_heat_map_names_ranks_above_their_columns(ranks, head):
    lines = drawn(heat_map(answer([[1.0] * ranks]), False, NOW), 80)
    assert lines[3:5] == ["          rank", head]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "last reported 4 min ago, 2 ranks are connected"),
        ({"ranks_connected": 1}, "last reported 4 min ago, 1 rank is connected"),
        ({"ranks_connected": 0}, "last reported 4 min ago, no rank is connected"),
        (
            {"newest_step_unix": None},
            "it is unknown when it was last reported, 2 ranks are connected",
        ),
    ],
)
def test_a_heat_map_tells_how_old_its_load_is(told, words):
    shown = drawn(heat_map(answer([[1.0]], **told), False, NOW + 240), 80)
    assert shown[1] == words
