"""`evenkeel replay plan`."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from evenkeel_moe.cli.replay import app
from evenkeel_moe.errors import InfeasiblePlan, ShapeMismatch
from evenkeel_moe.formats import Trace, read_placement, read_trace, write_trace
from evenkeel_moe.planning.problem import moe_time
from tests.cli.conftest import FLEET, SMALL, run_replay


def test_the_figures_of_a_plan_are_named_in_words(small, tmp_path):
    out = run_replay("plan", "-t", small, *FLEET, "-p", "eplb", "-o", tmp_path / "placement")
    shown = " ".join(out.split())
    assert ", predicted MoE time / that of a perfect split of the tokens 1." in shown
    assert ", extra replicas 6; " in shown


@pytest.mark.parametrize("format_", ["neutral", "sglang", "trtllm", "ascend"])
def test_plan_writes_for_every_engine(small, tmp_path, format_):
    out = tmp_path / "placement"
    said = json.loads(
        run_replay("plan", "-t", small, *FLEET, "-p", "eplb", "-f", format_, "-o", out, "--json")
    )
    file = read_placement(out, num_ranks=2, num_logical_experts=8, first_moe_layer=2)
    assert file.layer_ids == (2, 3, 4)
    load = read_trace(small).counts
    assert said["time_over_fluid"] == pytest.approx(moe_time.time_over_fluid(load, file.placement))
    assert "copies" not in said
    again = json.loads(
        run_replay(
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
    run_replay("plan", "-t", small, *FLEET, "-p", "eplb", "--window", 10, "-o", tmp_path / "new")
    placement = read_placement(tmp_path / "new").placement
    assert (placement.logcnt[:, 6] == 2).all()
    assert read_placement(tmp_path / "new").info["planned_on_steps"] == 10


def test_a_current_placement_of_another_fleet_is_refused(small, tmp_path):
    out = tmp_path / "placement"
    run_replay("plan", "-t", small, "--ranks", 2, "--slots", 12, "-p", "eplb", "-o", out)
    with pytest.raises(ShapeMismatch, match=r"\(3, 12, 2, 8\), the fleet has \(3, 10, 2, 8\)"):
        run_replay(
            "plan", "-t", small, *FLEET, "-p", "eplb", "-o", tmp_path / "b", "--current", out
        )


@pytest.mark.parametrize("format_", ["neutral", "sglang", "trtllm", "ascend"])
def test_dense_layers_may_lie_between_moe_layers(tmp_path, format_):
    counts = np.random.default_rng(7).integers(0, 40, (20, 3, 8))
    for name, layer_ids in (("here", (1, 3, 5)), ("there", (1, 2, 3))):
        write_trace(tmp_path / f"{name}.npz", Trace(counts, layer_ids))
    plan = ("plan", *FLEET, "-p", "eplb", "-t")
    run_replay(*plan, tmp_path / "here.npz", "-f", format_, "-o", tmp_path / "placement")
    current = ("--current", tmp_path / "placement", "-o", tmp_path / "b", "--json")
    assert json.loads(run_replay(*plan, tmp_path / "here.npz", *current))["copies"] == 0.0
    if format_ in ("neutral", "trtllm"):
        with pytest.raises(
            ShapeMismatch, match="the file lacks layers 2, has layers 5 that are not expected"
        ):
            run_replay(*plan, tmp_path / "there.npz", *current)


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
    most = json.loads(run_replay(*craft))["replicas"]
    assert json.loads(run_replay(*craft, "--craft-replicas", "memory"))["replicas"] == most > 2
    assert json.loads(run_replay(*craft, "--free-bytes", 10))["replicas"] == 2
    assert json.loads(run_replay(*craft, "--craft-replicas", "1"))["replicas"] == 0
    assert 0 < json.loads(run_replay(*craft, "--craft-replicas", "knee"))["replicas"] <= most
    replay = ("compare", "-t", small, *SMALL, "-p", "craft", "--no-baselines", "--json")
    free = [json.loads(run_replay(*replay, *more))["results"] for more in ((), ("--free-bytes", 0))]
    assert free[0][0]["time_over_fluid"] < free[1][0]["time_over_fluid"]


@pytest.mark.parametrize("wrong", ["--seed=-1", "--dispatch=magic", "--cost=magic"])
def test_values_that_an_option_cannot_have_are_refused(small, wrong):
    result = CliRunner().invoke(app, ["plan", "-t", str(small), wrong, "-o", "x"])
    assert result.exit_code == 2
    assert f"'{wrong.split('=')[0]}'" in result.stderr


def test_what_an_engine_cannot_read_is_not_written(small, tmp_path):
    out = tmp_path / "placement"
    with pytest.raises(InfeasiblePlan, match="cannot hold empty slots"):
        run_replay(
            "plan", "-t", small, *FLEET, "--pooled", "-p", "craft", "-f", "trtllm", "-o", out
        )
    assert not out.exists()


def test_slots_that_a_policy_leaves_are_filled_for_engines_that_need_it(small, tmp_path):
    def plan(*more):
        out = tmp_path / "placement"
        run_replay("plan", "-t", small, *FLEET, "-p", "gem", "-f", "sglang", "-o", out, *more)
        return json.loads(out.read_text())["physical_to_logical_map"]

    with pytest.raises(InfeasiblePlan, match="cannot hold empty slots"):
        plan()
    assert all(expert >= 0 for row in plan("--fill-slots") for expert in row)
