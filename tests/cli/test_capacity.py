"""`evenkeel capacity`, of a deployment and of a recording."""

import json

import pytest

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.planning.decision.capacity import CapacityRequest
from tests.cli.conftest import FLEET, run_command, run_replay

SIZES = {"ranks": 2, "slots": 10, "bytes_per_expert": 1000}
KV = {"kv_bytes_per_token": 10, "kv_free_bytes": 50_000}


def of_recording(*args, **config):
    return run_command("capacity", *args, **(SIZES | config))


def test_a_deployments_widths_are_a_table_and_sentences(run, operations):
    code, out, _ = run("capacity", "-d", "demo", "--to-ranks", "1", "--to-ranks", "4")
    assert code == 0
    assert operations.calls == [("capacity", "demo", CapacityRequest((1, 4)))]
    row = next(line for line in out.splitlines() if line.lstrip().startswith("2 (now)"))
    assert "5,000" in row
    assert "Retire rank 1: " in out
    assert "Cost model: by tokens" in out


def test_json_of_a_deployment_and_of_a_recording_have_the_same_rows(run, small):
    asked = ("--to-ranks", "1", "-o", "json")
    live = json.loads(run("capacity", "-d", "demo", *asked)[1])
    recorded = json.loads(of_recording(small, *asked, **KV))
    assert recorded.keys() >= {"trace", "policy", "words", "rows", "cost_model", "findings"}
    assert recorded["rows"][0].keys() == live["rows"][0].keys()
    assert recorded["cost_model"].keys() == live["cost_model"].keys()
    now, one = recorded["rows"]
    assert (now["kv_tokens"], one["kv_tokens"]) == (5000, 5000 - 3 * 3000 // 10)
    assert one["moe_time"] > now["moe_time"] > 0


def test_a_recording_says_what_today_is_unless_a_placement_is_named(small, tmp_path):
    start = "today's is the planner's own start"
    assert start in " ".join(of_recording(small, "--to-ranks", 4).split())
    run_replay("plan", small, *FLEET, "--out", tmp_path / "now.json")
    named = of_recording(small, "--to-ranks", 4, current=tmp_path / "now.json")
    assert start not in " ".join(named.split())


def test_a_recording_without_kv_sizes_says_that_tokens_are_unknown(small):
    out = of_recording(small, "--to-ranks", 4)
    assert "KV tokens are unknown" in out
    assert "MoE time (by tokens)" in out


@pytest.mark.parametrize(
    ("kv", "fits"), [(KV, True), (KV | {"kv_free_bytes": 8_999}, False), ({}, None)]
)
def test_a_recording_fits_a_width_if_the_kv_cache_has_room_for_its_experts(small, kv, fits):
    # One rank holds 3 slots more in each of 3 layers, of 1000 bytes.
    row = json.loads(of_recording(small, "--to-ranks", 1, "-o", "json", **kv))["rows"][1]
    assert row["fits"] is fits
    assert ("more than the memory of a rank holds" in row["words"]) == (fits is False)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("--to-ranks", 1, "--to-slots", 7), ShapeMismatch, "cannot hold 8 experts"),
        (("--retire", 2), InvalidInput, "ranks 2 do not exist"),
        (("--to-ranks", 3, "--whole-nodes"), ShapeMismatch, "not whole nodes of 2"),
    ],
)
def test_widths_that_cannot_be_are_refused_before_any_plan(small, args, error, words):
    with pytest.raises(error, match=words):
        of_recording(small, *args)


@pytest.mark.parametrize(
    ("policy", "key", "value"),
    [
        ("keel", "copy_price", 1.0),
        ("keel", "survive", "rank"),
        ("craft", "craft_replicas", 1.0),
        ("craft", "free_bytes", 0),
    ],
)
def test_a_recording_is_planned_with_the_options_of_its_policy(small, policy, key, value):
    def planned(**config):
        answer = of_recording(small, "--to-ranks", 2, "-o", "json", policy=policy, **config)
        return json.loads(answer)["rows"][1]

    assert planned(**{key: value}) != planned()
    other = "eplb" if policy == "keel" else "keel"
    if key != "copy_price":
        with pytest.raises(InvalidInput, match=f"for {policy}, which is not among the policies"):
            of_recording(small, policy=other, **{key: value})


def test_sizes_of_a_recording_are_not_for_a_deployment(run, tmp_path):
    (tmp_path / "sizes.yaml").write_text("ranks: 2")
    code, _, err = run("capacity", "-d", "demo", "-c", str(tmp_path / "sizes.yaml"))
    assert code == 2 and "--config belongs to a recording" in err
