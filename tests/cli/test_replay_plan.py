"""`evenkeel replay plan`."""

import json

import numpy as np
import pytest

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace, read_placement, read_trace, write_trace
from evenkeel_moe.planning.problem import moe_time
from tests.cli.conftest import FLEET, SMALL, replayed, run_replay


def test_the_figures_of_a_plan_are_named_in_words(small, tmp_path):
    out = run_replay("plan", small, *FLEET, "-p", "eplb", "--out", tmp_path / "placement")
    shown = " ".join(out.split())
    assert ", predicted MoE time / that of a perfect split of the tokens 1." in shown
    assert ", extra replicas 6; " in shown


def test_a_plan_of_keel_survives_the_loss_of_a_rank_if_asked(small, tmp_path):
    def planned(slots, **options):
        fleet = ("--ranks", 2, "--slots", slots, "--out", tmp_path / "b")
        return replayed("plan", small, *fleet, **options)

    twice = planned(16, survive="rank")
    assert (twice["survive_lost"], twice["survive_experts"]) == (0, 24)
    assert twice["replicas"] == 24
    # One spare slot on each rank: 2 of 8 experts in each of 3 layers are on both.
    some = planned(10, survive="rank")
    assert some["survive_lost"] == 9 and some["survive_price"] >= 0
    assert "survive_lost" not in planned(10)


@pytest.mark.parametrize("format_", ["neutral", "sglang", "trtllm", "ascend"])
def test_plan_writes_for_every_engine(small, tmp_path, format_):
    out = tmp_path / "placement"
    said = replayed("plan", small, *FLEET, "-p", "eplb", "-f", format_, "--out", out)
    file = read_placement(out, num_ranks=2, num_logical_experts=8, layer_ids=(2, 3, 4))
    load = read_trace(small).counts
    assert said["time_over_fluid"] == pytest.approx(moe_time.time_over_fluid(load, file.placement))
    assert "copies" not in said
    again = replayed(
        *("plan", small, *FLEET, "-p", "eplb", "--out", tmp_path / "b"), *("--current", out)
    )
    assert again["copies"] == 0.0


def test_plan_looks_only_at_the_newest_steps(small, tmp_path):
    run_replay("plan", small, *FLEET, "-p", "eplb", "--out", tmp_path / "new", window=10)
    placement = read_placement(tmp_path / "new").placement
    assert (placement.logcnt[:, 6] == 2).all()
    assert read_placement(tmp_path / "new").info["planned_on_steps"] == 10


def test_a_current_placement_of_another_fleet_is_refused(small, tmp_path):
    out = tmp_path / "placement"
    run_replay("plan", small, "--ranks", 2, "--slots", 12, "-p", "eplb", "--out", out)
    with pytest.raises(ShapeMismatch, match=r"\(3, 12, 2, 8\), the fleet has \(3, 10, 2, 8\)"):
        run_replay("plan", small, *FLEET, "-p", "eplb", "--out", tmp_path / "b", "--current", out)


@pytest.mark.parametrize("format_", ["neutral", "sglang", "trtllm", "ascend"])
def test_dense_layers_may_lie_between_moe_layers(tmp_path, format_):
    counts = np.random.default_rng(7).integers(0, 40, (20, 3, 8))
    for name, layer_ids in (("here", (1, 3, 5)), ("there", (1, 2, 3))):
        write_trace(tmp_path / f"{name}.npz", Trace(counts, layer_ids))
    plan = ("plan", *FLEET, "-p", "eplb")
    run_replay(*plan, tmp_path / "here.npz", "-f", format_, "--out", tmp_path / "placement")
    current = ("--current", tmp_path / "placement", "--out", tmp_path / "b")
    assert replayed(*plan, tmp_path / "here.npz", *current)["copies"] == 0.0
    if format_ in ("neutral", "trtllm"):
        with pytest.raises(
            ShapeMismatch, match="the file lacks layers 2, has layers 5 that are not expected"
        ):
            run_replay(*plan, tmp_path / "there.npz", *current)


def test_craft_chooses_its_replicas_by_memory_gain_or_knee(small, tmp_path):
    craft = ("plan", small, *FLEET, "-p", "craft", "--out", tmp_path / "b")

    def replicas(**options):
        return replayed(*craft, bytes_per_expert=10, **options)["replicas"]

    most = replicas()
    assert replicas(craft_replicas="memory") == most > 2
    assert replicas(free_bytes=10) == 2
    assert replicas(craft_replicas=1) == 0
    assert 0 < replicas(craft_replicas="knee") <= most
    replay = ("compare", small, *SMALL, "-p", "craft")
    free = [
        replayed(*replay, baselines=False, **more)["results"] for more in ({}, {"free_bytes": 0})
    ]
    assert free[0][0]["time_over_fluid"] < free[1][0]["time_over_fluid"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"seed": -1}, r"seed: -1: Input should be greater than or equal to 0"),
        ({"dispatch": "magic"}, r"dispatch: 'magic': Input should be 'even'"),
        ({"cost": "magic"}, r"cost: 'magic': Input should be 'tokens'"),
        ({"rank_speeds": "1,x"}, "rank_speeds: '1,x': Input should be a valid tuple"),
        ({"nodez": 2}, r"yaml: nodez: there is no such option"),
        ({"held_out": 2}, r"yaml: held_out: there is no such option"),
    ],
)
def test_keys_and_values_that_a_file_cannot_have_are_refused_by_name(small, tmp_path, wrong, words):
    with pytest.raises(InvalidInput, match=words):
        run_replay("plan", small, "--out", tmp_path / "x", **wrong)
    with pytest.raises(InvalidInput, match="--ranks: 0: Input should be greater"):
        run_replay("plan", small, "--ranks", 0, "--out", tmp_path / "x")


def test_the_command_line_wins_over_the_file(small, tmp_path):
    run_replay("plan", small, "-p", "eplb", *FLEET, "--out", tmp_path / "x", policy="gem", slots=9)
    placement = read_placement(tmp_path / "x")
    assert (placement.info["policy"], placement.placement.num_slots) == ("eplb", 10)


@pytest.mark.parametrize("text", ["- a", "a: [", "x: 1\nx: 2"])
def test_a_file_that_holds_no_options_is_refused(small, tmp_path, text):
    (tmp_path / "more.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=r"more\.yaml"):
        run_replay("plan", small, "--out", tmp_path / "x", "--config", tmp_path / "more.yaml")


def test_what_an_engine_cannot_read_is_not_written(small, tmp_path):
    out = tmp_path / "placement"
    with pytest.raises(InfeasiblePlan, match="cannot hold empty slots"):
        run_replay("plan", small, *FLEET, "-p", "craft", "-f", "trtllm", "--out", out, pooled=True)
    assert not out.exists()


def test_slots_that_a_policy_leaves_are_filled_for_engines_that_need_it(small, tmp_path):
    def plan(**more):
        out = tmp_path / "placement"
        run_replay("plan", small, *FLEET, "-p", "gem", "-f", "sglang", "--out", out, **more)
        return json.loads(out.read_text())["physical_to_logical_map"]

    with pytest.raises(InfeasiblePlan, match="cannot hold empty slots"):
        plan()
    assert all(expert >= 0 for row in plan(fill_slots=True) for expert in row)
