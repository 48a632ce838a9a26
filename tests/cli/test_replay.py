"""`evenkeel replay compare` and `evenkeel replay inspect`."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from typer.testing import CliRunner

from evenkeel_moe.cli.exits import CliError
from evenkeel_moe.cli.replay import app
from evenkeel_moe.formats import Trace, read_placement, read_trace, write_trace
from evenkeel_moe.planning.policies import registry
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.replay.words import COLUMNS
from tests.cli.conftest import SMALL, replay_words, replayed, run_replay
from tests.replay.conftest import SHIPPED


def test_compare_works_on_the_shipped_trace_and_prints_what_it_promises():
    assert SHIPPED.stat().st_size <= 1_000_000
    answer = replayed("compare", SHIPPED, "--slots", 72, "--policies", "eplb")
    by_policy = {result["policy"]: result for result in answer["results"]}
    assert list(by_policy) == ["initial", "once", "ewma", "eplb"]
    promised = {
        *("policy", "balancedness_mean", "balancedness_worst", "time_over_fluid"),
        *("copies_per_layer", "bytes", "plan_ms"),
    }
    assert all(promised <= set(result) for result in answer["results"])
    assert answer["replans"] == 6
    # The recorded traffic changes twice, so replanning beats planning once, which beats nothing.
    times = [by_policy[name]["time_over_fluid"] for name in ("initial", "once", "eplb", "ewma")]
    assert times == sorted(times, reverse=True)
    assert by_policy["eplb"]["time_over_fluid"] == pytest.approx(1.2006, abs=0.0005)
    assert by_policy["eplb"]["copies_per_layer"] < by_policy["eplb"]["copies_per_layer_raw"]
    assert by_policy["initial"]["bytes"] == 0


def test_all_policies_are_compared_by_default_with_those_of_other_packages(small, monkeypatch):
    mine = replace(POLICIES["eplb"], name="mine")
    monkeypatch.setattr(registry, "added_policies", lambda: {"mine": mine})
    answer = replayed("compare", small, *SMALL)
    names = [result["policy"] for result in answer["results"]]
    assert names == ["initial", "once", "ewma", *POLICIES, "mine"]


def test_the_table_names_every_policy_and_stays_on_stdout(small):
    result = CliRunner().invoke(
        app, ["compare", str(small), *map(str, SMALL), "-p", "eplb"], catch_exceptions=False
    )
    lines = result.stdout.splitlines()
    assert "40 steps, 3 layers, 8 experts, 2 ranks, 10 slots" in lines[0]
    assert lines[1].split()[:3] == ["bal.", "bal.", "bal."]
    assert lines[2].split() == "policy mean p5 worst /fluid step /layer raw first bytes ms".split()
    assert [line.split()[0] for line in lines[3:7]] == ["initial", "once", "ewma", "eplb"]
    assert " has the least predicted MoE time (by tokens), " in lines[7]
    assert lines[8].startswith("A replan of eplb copies ")
    assert lines[9] == "Cost model: by tokens, because nothing is known of time."
    assert lines[10].startswith("On this trace the redundant replicas of the initial placement ")
    (told,) = result.stderr.splitlines()  # In a pipe there are no progress bars.
    assert told.startswith("comparing initial, once, ewma, eplb on 40 steps of small; ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut(small, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    args = ("compare", small, *SMALL, "-p", "eplb")
    lines = run_replay(*args, verdict=True, baselines=False).splitlines()
    (row,) = (line.split() for line in lines if line.startswith("eplb+verdict 0"))
    assert "…" not in "".join(lines)
    assert width < 80 or max(map(len, lines)) <= width
    assert all(re.fullmatch(r"[\d.,]+|[kMGT]?B", cell) for cell in row[1:])
    assert len(row) > len(COLUMNS)


def explained(lines):
    """Return the words that the legend at the end of the output explains."""
    return [line.split(": ")[0] for line in lines[lines.index("") + 1 :] if ": " in line]


def test_the_legend_explains_what_is_shown_and_nothing_else(small, monkeypatch):
    arguments = ("compare", small, *SMALL, "-p", "eplb,keel")
    wide = explained(run_replay(*arguments, verdict=True, baselines=False).splitlines())
    assert wide == [*(column.head for column in COLUMNS), "eplb", "keel", "+verdict"]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = explained(run_replay("compare", small, *SMALL, "-p", "eplb").splitlines())
    assert narrow[-4:] == ["initial", "once", "ewma", "eplb"]
    assert narrow[:-4] == [column.head for column in COLUMNS]


def test_the_page_stands_alone_and_its_drawings_are_well_formed(small, tmp_path):
    page = tmp_path / "page.html"
    run_replay("compare", small, *SMALL, "-p", "eplb", "--out", page)
    text = page.read_text("utf-8")
    assert not re.search(r"<script|<link|src=|url\(|@import|https?://", text)
    assert text.count("<svg") == text.count('role="img"')
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for drawing in drawings:
        ET.fromstring(drawing)
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Balancedness over time",
        "Predicted MoE time (by tokens) of each step",
        "Rank load per layer, before and after",
        "Extra replicas against KV cache, on one rank, placed by a simple rule",
    ]
    assert len(drawings) == 2
    maps = re.findall(r"<table class=\"map\">.*?</table>", text, re.DOTALL)
    assert len([ET.fromstring(drawing) for drawing in maps]) == 2
    assert "prefers-color-scheme: dark" in text
    assert "once: eplb on the first window, and never again" in text
    # Every colour variable that a drawing uses has a value; without one, a line would be invisible.
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {name for name in used if f"--{name}:" not in text} == set()


def test_a_roofline_tells_that_replicas_cost_time(tmp_path):
    page = tmp_path / "page.html"
    args = ("compare", SHIPPED, "--slots", 72, "-p", "eplb")
    roofline = {"cost": "roofline", "device": "h100", "bytes_per_expert": 44_040_192}
    answer = replayed(*args, "--out", page, verdict=True, **roofline)
    model, replicas = answer["cost_model"], answer["replicas"]
    assert (model["source"], model["unit"]) == ("derived", "s")
    # Nine experts a rank are read instead of eight, whatever the tokens are.
    assert replicas["time_change"] == pytest.approx(1 / 8, abs=0.01)
    assert re.fullmatch(
        r"On this trace the redundant replicas of the initial placement cost 12\.\d% of MoE time:"
        r" reading an expert's weights takes as long as computing \d+ tokens, and experts get 16"
        r" tokens per step on average\.",
        replicas["words"],
    )
    text = unescape(page.read_text("utf-8"))
    assert f"Cost model: {model['words']}." in text
    assert replicas["words"] in text
    # By tokens the same verdict finds a gain; under the roofline nothing is to be had.
    by_policy = {result["policy"]: result for result in answer["results"]}
    assert by_policy["eplb+verdict"]["first_copies_per_layer"] == 0
    tokens = replayed(*args, verdict=True)
    assert tokens["replicas"]["time_change"] < 0
    by_policy = {result["policy"]: result for result in tokens["results"]}
    assert by_policy["eplb+verdict"]["first_copies_per_layer"] > 0


def test_without_matplotlib_only_the_page_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "evenkeel_moe.replay.charts", raising=False)
    args = ("compare", small, *SMALL, "-p", "eplb")
    with pytest.raises(
        CliError, match=r"a page with charts needs `pip install 'evenkeel-moe\[plots\]'`"
    ):
        run_replay(*args, "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert replayed(*args)["replans"] == 4


def test_verdict_adds_every_policy_with_a_verdict(small, tmp_path):
    page = tmp_path / "page.html"
    answer = replayed("compare", small, *SMALL, "-p", "eplb", "--out", page, verdict=True)
    assert [result["policy"] for result in answer["results"]][3:] == ["eplb", "eplb+verdict"]
    assert "after: eplb+verdict" in page.read_text("utf-8")


def test_other_fleets_can_be_described(small):
    for options in (
        {"pooled": True},
        {"nodes": 2, "expert_groups": 2},
        {"rank_speeds": [1, 0.5]},
        {"dispatch": "nearest"},
        {"dispatch": "optimal"},
        {"allow_duplicates": True},
    ):
        answer = replayed("compare", small, *SMALL, "-p", "eplb", baselines=False, **options)
        assert [result["policy"] for result in answer["results"]] == ["eplb"]
        assert answer["results"][0]["time_over_fluid"] >= 1.0


def test_inspect_prints_tables_or_json(small):
    text = run_replay("inspect", small, "--ranks", 2)
    assert "40 steps, 3 MoE layers, 8 experts" in text
    assert "Most correlated pairs" in text
    answer = replayed("inspect", small, "--ranks", 2)
    assert [layer["layer_id"] for layer in answer["layers"]] == [2, 3, 4]
    assert set(answer["drift"]) == {
        "autocorrelation",
        "between_windows",
        "within_windows",
        "window_steps",
        "by_window",
    }


def test_an_assumption_about_source_ranks_is_reported(small, tmp_path):
    page = tmp_path / "page.html"
    few = (str(small), "--ranks", "4", "--slots", "12")
    replay = ("compare", *few, "--window", "8", "--horizon", "8", "-o", "json")
    note = (
        "the trace has source counts of 2 ranks, not of 4: tokens are assumed to start evenly on"
        " all ranks, which affects nearest dispatch and libra+verdict"
    )
    nearest = {"dispatch": "nearest", "baselines": False}
    args = replay_words(*replay, "-p", "libra+verdict", "--out", page, **nearest)
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert [each["what"] for each in json.loads(result.stdout)["findings"]] == [note]
    assert result.stderr.splitlines()[1:] == [f"note: {note}"]
    assert f"Note: {note}</p>" in page.read_text("utf-8")
    assert replayed(*replay, "-p", "eplb", baselines=False)["findings"] == []
    here = (small, *SMALL, "-p", "libra")
    assert replayed("compare", *here, dispatch="nearest")["findings"] == []
    write_trace(small, Trace(read_trace(small).counts, (2, 3, 4)))
    said = replayed("plan", *few, "-p", "libra", "--out", tmp_path / "b")["findings"]
    none = "the trace has no source counts: tokens are assumed to start evenly on all ranks"
    assert [each["what"] for each in said] == [f"{none}, which affects libra"]


def test_notes_of_the_reader_go_to_stderr(tmp_path):
    torch = pytest.importorskip("torch")
    counts = np.zeros((12, 3, 8), np.int32)
    counts[:9, 1:] = np.random.default_rng(0).multinomial(40, [1 / 8] * 8, (9, 2))
    torch.save({"logical_count": torch.tensor(counts)}, tmp_path / "d.pt")
    result = CliRunner().invoke(
        app, ["inspect", str(tmp_path / "d.pt"), "-o", "json"], catch_exceptions=False
    )
    assert json.loads(result.stdout)["num_steps"] == 9
    assert "note: steps that routed nothing are left out: 3 of 12 steps" in result.stderr
    assert "layer 0 of 3. If they are MoE layers" in result.stderr


def test_a_trace_with_a_silent_layer_is_planned_into_a_file_of_any_name(tmp_path):
    counts = np.zeros((40, 2, 8), np.int64)
    counts[:8, 0] = 5
    write_trace(tmp_path / "t.npz", Trace(counts, (0, 1)))
    words = ("plan", tmp_path / "t.npz", "--ranks", 2, "-p", "eplb", "--out", tmp_path / "[p]")
    run_replay(*words, window=8)
    assert read_placement(tmp_path / "[p]").info["planned_on_steps"] == 8
