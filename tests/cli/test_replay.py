import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from evenkeel_moe.cli.replay import app
from evenkeel_moe.errors import EvenkeelError, InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace, read_placement, read_trace, write_trace
from evenkeel_moe.planning.problem import metrics
from tests.replay.conftest import SHIPPED


def _run(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def small(tmp_path):
    """Return a trace of 3 MoE layers after 2 dense ones, with source counts of 2 ranks."""
    source = np.random.default_rng(7).integers(0, 40, (40, 2, 3, 8))
    source[:, :, :, 2] += 60
    source[20:, :, :, 6] += 90
    path = tmp_path / "small.npz"
    write_trace(path, Trace(source.sum(axis=1), (2, 3, 4), source=source))
    return path


FLEET = ("--ranks", 2, "--slots", 10)
SMALL = (*FLEET, "--window", 8, "--horizon", 8)


def test_compare_works_on_the_shipped_trace_and_prints_what_it_promises():
    assert SHIPPED.stat().st_size <= 1_000_000
    answer = json.loads(
        _run("compare", "--trace", SHIPPED, "--slots", 72, "--policies", "eplb", "--json")
    )
    by_policy = {result["policy"]: result for result in answer["results"]}
    assert list(by_policy) == ["initial", "once", "ewma", "eplb"]
    promised = {
        "policy",
        "balancedness_mean",
        "balancedness_worst",
        "time_over_fluid",
        "copies_per_layer",
        "bytes",
        "plan_ms",
    }
    assert all(promised <= set(result) for result in answer["results"])
    assert answer["replans"] == 6
    # The recorded traffic changes twice, so replanning beats planning once, which beats nothing.
    times = [by_policy[name]["time_over_fluid"] for name in ("initial", "once", "eplb", "ewma")]
    assert times == sorted(times, reverse=True)
    assert by_policy["eplb"]["time_over_fluid"] == pytest.approx(1.2006, abs=0.0005)
    assert by_policy["eplb"]["copies_per_layer"] < by_policy["eplb"]["copies_per_layer_raw"]
    assert by_policy["initial"]["bytes"] == 0


def test_saved_plans_score_the_same_in_a_plain_recount(small, tmp_path):
    saved = tmp_path / "plans.npz"
    answer = json.loads(
        _run("compare", "-t", small, *SMALL, "-p", "eplb", "--save-plans", saved, "--json")
    )
    load = read_trace(small).counts
    with np.load(saved) as plans:
        assert sorted(plans) == sorted(
            f"{r['policy']}_{kind}" for r in answer["results"] for kind in ("phy2log", "steps")
        )
        for result in answer["results"]:
            steps, rows = plans[f"{result['policy']}_steps"], plans[f"{result['policy']}_phy2log"]
            assert (steps.dtype, rows.dtype, rows.shape) == (np.int64, np.int32, (4, 3, 10))
            slowest = fluid = 0.0
            for start, phy2log in zip(steps, rows, strict=True):
                for t in range(start, start + 8):
                    for layer in range(3):
                        copies = np.bincount(phy2log[layer][phy2log[layer] >= 0], minlength=8)
                        share = np.where(
                            phy2log[layer] >= 0, (load[t, layer] / copies)[phy2log[layer]], 0
                        )
                        slowest += share.reshape(2, 5).sum(axis=1).max()
                        fluid += load[t, layer].sum() / 2
            assert slowest / fluid == pytest.approx(result["time_over_fluid"])


def test_the_table_names_every_policy_and_stays_on_stdout(small):
    result = CliRunner().invoke(
        app, ["compare", "-t", str(small), *map(str, SMALL), "-p", "eplb"], catch_exceptions=False
    )
    lines = result.stdout.splitlines()
    assert "40 steps, 3 layers, 8 experts, 2 ranks, 10 slots" in lines[0]
    assert lines[1].split()[:3] == ["bal.", "bal.", "bal."]
    assert lines[2].split() == [
        "policy",
        "mean",
        "p5",
        "worst",
        "/fluid",
        "step",
        "/layer",
        "raw",
        "first",
        "bytes",
        "ms",
    ]
    assert [line.split()[0] for line in lines[3:]] == ["initial", "once", "ewma", "eplb"]
    assert result.stderr == ""


def test_the_page_stands_alone_and_its_drawings_are_well_formed(small, tmp_path):
    page = tmp_path / "page.html"
    _run("compare", "-t", small, *SMALL, "-p", "eplb", "--html", page)
    text = page.read_text("utf-8")
    assert not re.search(r"<script|<link|src=|url\(|@import|https?://", text)
    assert text.count("<svg") == text.count('role="img"')
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for drawing in drawings:
        ET.fromstring(drawing)
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Balancedness over time",
        "Predicted MoE time over time",
        "Tail of the predicted step time",
        "Copies paid",
        "Rank load per layer, before and after",
        "Replicas per layer",
        "What replicas gain and cost",
    ]
    assert len(drawings) == 10
    assert "prefers-color-scheme: dark" in text
    # Every colour variable that a drawing uses has a value; without one, a line would be invisible.
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {name for name in used if f"--{name}:" not in text} == set()


def test_without_matplotlib_only_the_page_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "evenkeel_moe.replay.charts", raising=False)
    args = ("compare", "-t", small, *SMALL, "-p", "eplb", "--json")
    with pytest.raises(
        InvalidInput, match=r"needs matplotlib: run `pip install 'evenkeel-moe\[plots\]'`$"
    ):
        _run(*args, "--html", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert json.loads(_run(*args))["replans"] == 4


def test_verdict_adds_every_policy_with_a_verdict(small, tmp_path):
    page = tmp_path / "page.html"
    answer = json.loads(
        _run("compare", "-t", small, *SMALL, "-p", "eplb", "--verdict", "--json", "--html", page)
    )
    assert [result["policy"] for result in answer["results"]][3:] == ["eplb", "eplb+verdict"]
    assert "after: eplb+verdict" in page.read_text("utf-8")


def test_other_fleets_can_be_described(small):
    for options in (
        ("--pooled",),
        ("--nodes", 2, "--expert-groups", 2),
        ("--rank-speeds", "1,0.5"),
        ("--dispatch", "nearest"),
        ("--dispatch", "optimal"),
        ("--allow-duplicates",),
    ):
        answer = json.loads(
            _run("compare", "-t", small, *SMALL, "-p", "eplb", "--no-baselines", "--json", *options)
        )
        assert [result["policy"] for result in answer["results"]] == ["eplb"]
        assert answer["results"][0]["time_over_fluid"] >= 1.0


@pytest.mark.parametrize("format_", ["neutral", "sglang", "trtllm", "ascend"])
def test_plan_writes_for_every_engine(small, tmp_path, format_):
    out = tmp_path / "placement"
    said = json.loads(
        _run("plan", "-t", small, *FLEET, "-p", "eplb", "-f", format_, "-o", out, "--json")
    )
    file = read_placement(out, num_ranks=2, num_logical_experts=8, first_moe_layer=2)
    assert file.layer_ids == (2, 3, 4)
    load = read_trace(small).counts
    assert said["time_over_fluid"] == pytest.approx(metrics.time_over_fluid(load, file.placement))
    assert "copies" not in said
    again = json.loads(
        _run(
            "plan",
            "-t",
            small,
            *FLEET,
            "-p",
            "eplb",
            "-o",
            tmp_path / "b",
            "--current",
            out,
            "--json",
        )
    )
    assert again["copies"] == 0.0


def test_plan_looks_only_at_the_newest_steps(small, tmp_path):
    _run("plan", "-t", small, *FLEET, "-p", "eplb", "--window", 10, "-o", tmp_path / "new")
    placement = read_placement(tmp_path / "new").placement
    assert (placement.logcnt[:, 6] == 2).all()
    assert read_placement(tmp_path / "new").info["planned_on_steps"] == 10


def test_inspect_prints_tables_or_json(small):
    text = _run("inspect", "-t", small, "--ranks", 2)
    assert "40 steps, 3 MoE layers, 8 experts" in text
    assert "Most correlated pairs" in text
    answer = json.loads(_run("inspect", "-t", small, "--ranks", 2, "--json"))
    assert [layer["layer_id"] for layer in answer["layers"]] == [2, 3, 4]
    assert set(answer["drift"]) == {
        "autocorrelation",
        "between_windows",
        "within_windows",
        "window_steps",
        "by_window",
    }


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            ("compare", "--ranks", 2, "--window", 20),
            InvalidInput,
            r"\(40 - window 20\) // horizon 50 = 0, at least 4",
        ),
        (
            ("compare", *SMALL, "-p", "eplb,nobody"),
            InvalidInput,
            "unknown policies nobody; known: initial",
        ),
        (
            ("compare", *SMALL, "--dispatch", "magic"),
            InvalidInput,
            "unknown dispatch model 'magic'; known: even",
        ),
        (
            ("compare", *SMALL, "--html", "/tmp"),
            InvalidInput,
            "/tmp is a folder: name a file in it",
        ),
        (("compare", *SMALL, "--save-plans", "/tmp"), InvalidInput, "/tmp is a folder"),
        (("compare", *SMALL, "--rank-speeds", "1e-320,1"), ShapeMismatch, "2 positive rank speeds"),
        (
            ("compare", *SMALL, "--rank-speeds", "1,x"),
            InvalidInput,
            "could not convert string to float",
        ),
        (
            ("compare", *SMALL, "--rank-speeds", "1"),
            ShapeMismatch,
            "2 positive rank speeds are needed, got 1",
        ),
        (("compare", *SMALL, "--nodes", 3), ShapeMismatch, "2 ranks do not divide over 3 nodes"),
        (
            ("compare", "--ranks", 3, "--slots", 10),
            ShapeMismatch,
            "10 slots do not divide over 3 ranks",
        ),
        (("compare", "--ranks", 2, "--slots", 6), ShapeMismatch, "cannot hold 8 experts"),
        (
            ("compare", "--ranks", 2, "--slots", 18),
            ShapeMismatch,
            "9 per rank, the model has 8 experts; at most 16",
        ),
        (
            ("compare", *SMALL, "--html", "/nowhere/at/all.html"),
            InvalidInput,
            "there is no folder /nowhere/at",
        ),
        (
            ("compare", *SMALL, "-p", "eplb", "--free-bytes", 5),
            InvalidInput,
            "are for craft, which is not among the policies",
        ),
        (
            ("plan", "-o", "x", *FLEET, "-p", "craft", "--craft-replicas", "most"),
            InvalidInput,
            "--craft-replicas most is neither memory, knee nor a number",
        ),
        (
            ("plan", "-o", "x", *FLEET, "-p", "keel+verdict"),
            InvalidInput,
            r"keel\+verdict compares its plan with the current placement: give it with --current",
        ),
        (
            ("plan", "-o", "x", "-f", "vllm"),
            InvalidInput,
            "unknown placement format 'vllm'; known: neutral",
        ),
        (
            ("plan", "-o", "x", *FLEET, "-p", "eplb", "--first-moe-layer", 2**31 - 2),
            InvalidInput,
            r"layer ids must rise within 0..2147483647, got \[2147483646, 2147483647, 2147483648\]",
        ),
        (
            ("plan", "-o", "x", "--ranks", 2, "--window", 99),
            InvalidInput,
            "--window 99: the trace has 40 steps",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_numbers(small, args, error, message):
    with pytest.raises(error, match=message):
        _run(args[0], "-t", small, *args[1:])


def test_a_current_placement_of_another_fleet_is_refused(small, tmp_path):
    out = tmp_path / "placement"
    _run("plan", "-t", small, "--ranks", 2, "--slots", 12, "-p", "eplb", "-o", out)
    with pytest.raises(ShapeMismatch, match=r"\(3, 12, 2, 8\), the fleet has \(3, 10, 2, 8\)"):
        _run("plan", "-t", small, *FLEET, "-p", "eplb", "-o", tmp_path / "b", "--current", out)


@pytest.mark.parametrize("format_", ["neutral", "sglang", "trtllm", "ascend"])
def test_dense_layers_may_lie_between_moe_layers(tmp_path, format_):
    counts = np.random.default_rng(7).integers(0, 40, (20, 3, 8))
    for name, layer_ids in (("here", (1, 3, 5)), ("there", (1, 2, 3))):
        write_trace(tmp_path / f"{name}.npz", Trace(counts, layer_ids))
    plan = ("plan", *FLEET, "-p", "eplb", "-t")
    _run(*plan, tmp_path / "here.npz", "-f", format_, "-o", tmp_path / "placement")
    current = ("--current", tmp_path / "placement", "-o", tmp_path / "b", "--json")
    assert json.loads(_run(*plan, tmp_path / "here.npz", *current))["copies"] == 0.0
    if format_ in ("neutral", "trtllm"):
        with pytest.raises(
            ShapeMismatch, match=r"placement: the file is for layers \[1, 3, 5\], \[1, 2, 3\] are"
        ):
            _run(*plan, tmp_path / "there.npz", *current)


def test_results_are_printed_even_if_the_disk_is_full(small, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    page = str(tmp_path / "page.html")
    for option in ("--html", "--save-plans"):
        args = ["compare", "-t", str(small), *map(str, SMALL), "-p", "eplb", "--json", option, page]
        result = CliRunner().invoke(app, args)
        assert json.loads(result.stdout)["replans"] == 4
        assert isinstance(result.exception, InvalidInput)
        assert str(result.exception) == f"{page}: cannot be written: No space left on device"
    with pytest.raises(InvalidInput, match="b: cannot be written: No space left"):
        _run("plan", "-t", small, *FLEET, "-p", "eplb", "-o", tmp_path / "b")


def test_output_paths_are_checked_before_the_trace_is_read(tmp_path):
    one, same = tmp_path / "one", tmp_path / "." / ".." / tmp_path.name / "one"
    with pytest.raises(InvalidInput, match="one is named for two files"):
        _run("compare", "-t", tmp_path / "absent.npz", "--html", one, "--save-plans", same)
    for name, message in (
        ("no/where", "there is no folder"),
        ("a" * 300, "cannot be written: File name too long"),
    ):
        with pytest.raises(InvalidInput, match=message):
            _run("plan", "-t", tmp_path / "absent.npz", "-o", tmp_path / name)


def test_an_assumption_about_source_ranks_is_reported(small, tmp_path):
    page = tmp_path / "page.html"
    few = ("-t", str(small), "--ranks", "4", "--slots", "12")
    replay = ("compare", *few, "--window", "8", "--horizon", "8", "--no-baselines", "--json")
    note = (
        "the trace has source counts of 2 ranks, not of 4: tokens are assumed to start evenly on"
        " all ranks, which affects nearest dispatch and libra+verdict"
    )
    args = [*replay, "-p", "libra+verdict", "--dispatch", "nearest", "--html", str(page)]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert json.loads(result.stdout)["notes"] == [note]
    assert result.stderr == f"note: {note}\n"
    assert f"Note: {note}." in page.read_text("utf-8")
    assert json.loads(_run(*replay, "-p", "eplb"))["notes"] == []
    here = ("-t", small, *SMALL, "--json", "-p", "libra", "--dispatch", "nearest")
    assert json.loads(_run("compare", *here))["notes"] == []
    write_trace(small, Trace(read_trace(small).counts, (2, 3, 4)))
    said = json.loads(_run("plan", *few, "-p", "libra", "-o", tmp_path / "b", "--json"))["notes"]
    none = "the trace has no source counts: tokens are assumed to start evenly on all ranks"
    assert said == [f"{none}, which affects libra"]


def test_craft_chooses_its_replicas_by_memory_gain_or_knee(small, tmp_path):
    craft = (
        "plan",
        "-t",
        small,
        *FLEET,
        "--bytes-per-expert",
        10,
        "-p",
        "craft",
        "-o",
        tmp_path / "b",
        "--json",
    )
    most = json.loads(_run(*craft))["replicas"]
    assert json.loads(_run(*craft, "--craft-replicas", "memory"))["replicas"] == most > 2
    assert json.loads(_run(*craft, "--free-bytes", 10))["replicas"] == 2
    assert json.loads(_run(*craft, "--craft-replicas", "1"))["replicas"] == 0
    assert 0 < json.loads(_run(*craft, "--craft-replicas", "knee"))["replicas"] <= most
    replay = ("compare", "-t", small, *SMALL, "-p", "craft", "--no-baselines", "--json")
    free = [json.loads(_run(*replay, *more))["results"] for more in ((), ("--free-bytes", 0))]
    assert free[0][0]["time_over_fluid"] < free[1][0]["time_over_fluid"]


def test_a_seed_is_not_negative(small):
    result = CliRunner().invoke(app, ["plan", "-t", str(small), "--seed", "-1", "-o", "x"])
    assert result.exit_code == 2
    assert "--seed" in result.stderr


def test_what_an_engine_cannot_read_is_not_written(small, tmp_path):
    out = tmp_path / "placement"
    with pytest.raises(InfeasiblePlan, match="cannot hold empty slots"):
        _run("plan", "-t", small, *FLEET, "--pooled", "-p", "craft", "-f", "trtllm", "-o", out)
    assert not out.exists()


def test_notes_of_the_reader_go_to_stderr(tmp_path):
    torch = pytest.importorskip("torch")
    counts = np.zeros((12, 3, 8), np.int32)
    counts[:9, 1:] = np.random.default_rng(0).integers(1, 9, (9, 2, 8))
    torch.save({"logical_count": torch.tensor(counts)}, tmp_path / "d.pt")
    result = CliRunner().invoke(
        app, ["inspect", "-t", str(tmp_path / "d.pt"), "--json"], catch_exceptions=False
    )
    assert json.loads(result.stdout)["num_steps"] == 9
    assert "note: left out 3 of 12 steps" in result.stderr
    assert "note: 1 of 3 hidden layers never counted" in result.stderr


def test_the_module_imports_nothing_heavy():
    import subprocess
    import sys

    heavy = "{'numpy', 'torch', 'scipy', 'numba'}"
    code = f"import sys, evenkeel_moe.cli.replay; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_missing_trace_is_a_typed_error(tmp_path):
    with pytest.raises(EvenkeelError, match="no such file"):
        _run("inspect", "-t", tmp_path / "absent.npz")


def test_a_page_about_a_trace_without_load_says_so(tmp_path):
    counts = np.zeros((40, 2, 8), np.int64)
    counts[:8, 0] = 5
    write_trace(tmp_path / "t.npz", Trace(counts, (0, 1)))
    _run(
        "compare", "-t", tmp_path / "t.npz", *SMALL, "-p", "eplb", "--html", tmp_path / "page.html"
    )
    _run(
        "plan",
        "-t",
        tmp_path / "t.npz",
        "--ranks",
        2,
        "--window",
        9,
        "-p",
        "eplb",
        "-o",
        tmp_path / "[p]",
    )
    assert "time_over_fluid" not in read_placement(tmp_path / "[p]").info
    assert "after: eplb, no load" in (tmp_path / "page.html").read_text("utf-8")
