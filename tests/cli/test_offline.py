"""`evenkeel offline`."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput
from evenkeel_moe.formats import PlacementFormat, Trace, read_placement, read_trace, write_trace
from tests.cli.conftest import FLEET, run_command


@pytest.fixture
def steady(tmp_path):
    """Return a trace of 120 steps, 3 MoE layers after 2 dense ones, 2 hot experts."""
    counts = np.random.default_rng(7).multinomial(320, [1 / 8] * 8, (120, 3))
    counts[:, :, 2:4] += 200
    write_trace(tmp_path / "steady.npz", Trace(counts, (2, 3, 4)))
    return tmp_path / "steady.npz"


run = partial(run_command, "offline")


@pytest.mark.parametrize("format_", [f for f in PlacementFormat if f != "vllm-ranks"])
def test_one_command_leads_from_a_recording_to_the_file_of_every_engine(steady, tmp_path, format_):
    out = tmp_path / "map"
    said = " ".join(run(steady, *FLEET, "-f", format_, "--out", out).split())
    assert "steady: 120 steps, 3 MoE layers, 8 experts in 10 slots on 2 ranks" in said
    assert "It pays: on 20 steps that the plan had not seen, the plan saves" in said
    assert "% of MoE time (by tokens); in the next 20 steps" in said
    row = " Its row 0 is hidden layer 2." if format_.counts_moe_layers else ""
    assert f"Wrote {out}.{row} Start " in said and str(out) in said.split("Start ")[1]
    file = read_placement(out, num_ranks=2, num_logical_experts=8, layer_ids=(2, 3, 4))
    assert (file.placement.logcnt.sum(axis=1) == 10).all() or format_ == "neutral"


def test_experts_by_rank_need_neither_replicas_nor_a_number_of_slots(steady, tmp_path):
    run(steady, "--ranks", 2, "-f", "vllm-ranks", "--out", tmp_path / "map")
    ranks = json.loads((tmp_path / "map").read_text())["expert_to_ep_rank"]
    assert sorted(ranks) == [0] * 4 + [1] * 4
    assert ranks[2] != ranks[3], "the two hot experts are apart"


def test_json_has_the_verdict_and_its_cost_model(steady, tmp_path):
    cost = {"cost": "roofline", "device": "h100"}
    said = json.loads(run(steady, *FLEET, "--out", tmp_path / "map", "-o", "json", **cost))
    assert said["verdict"]["call"] == "recommend"
    assert said["verdict"]["steps"] == 20
    assert said["verdict"]["cost_model"]["source"] == "derived"
    assert said["planned_on_steps"] == 100
    assert said["words"].startswith("It pays")


def test_nothing_is_written_on_request_if_it_does_not_surely_pay(steady, tmp_path):
    out = tmp_path / "map"
    said = run(steady, *FLEET, "--only-if-it-pays", "--out", out, code=1, held_out=4)
    assert "It cannot be told whether it pays" in said and "Nothing was written." in said
    assert not out.exists()
    run(steady, *FLEET, "--only-if-it-pays", "--out", out)
    assert out.exists()


def test_the_placement_to_compare_with_is_the_one_named(steady, tmp_path):
    run(steady, *FLEET, "--out", tmp_path / "map")
    again = run(steady, *FLEET, "--out", tmp_path / "b", compare_with=tmp_path / "map")
    assert "saves 0.0% of MoE time" in again
    said = " ".join(again.split())
    assert "Start the engine without the file." in said and "To use it all the same, start" in said


def test_probabilities_belong_to_the_map_that_sglang_starts_with(steady, tmp_path):
    out, probabilities = tmp_path / "map.json", tmp_path / "mass.pt"
    more = {"num_hidden_layers": 6, "replica_probabilities": probabilities}
    run(steady, *FLEET, "-f", "sglang", "--out", out, **more)
    written = torch.load(probabilities, weights_only=True)
    rows = json.loads(out.read_text())["physical_to_logical_map"]
    assert written["physical_to_logical_map"].tolist() == rows
    mass = written["physical_mass"].double()
    assert mass.shape == (6, 10)
    assert torch.allclose(mass.sum(dim=1), torch.ones(6).double(), atol=1e-5)
    by_rank = mass[2:5].reshape(3, 2, 5).sum(dim=2)
    assert torch.allclose(by_rank, torch.full((3, 2), 0.5).double(), atol=1e-3)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (("-f", "trtllm", {"replica_probabilities": "x"}), InvalidInput, "belongs to -f sglang"),
        (({"pooled": True},), InvalidInput, "leave pooled out"),
        (("-f", "vllm-ranks", "--slots", 10), InfeasiblePlan, "10 slots for 8 experts are 2 too"),
        (("-f", "other"), InvalidInput, "known: neutral, sglang"),
    ],
)
def test_options_that_do_not_fit_are_refused(steady, tmp_path, more, error, words):
    with pytest.raises(error, match=words):
        words = [one for one in more if not isinstance(one, dict)]
        config = more[-1] if more[-1] not in words else {}
        run(steady, "--ranks", 2, *words, "--out", tmp_path / "map", **config)
    assert not (tmp_path / "map").exists()


DOUBTED = pytest.mark.fault(
    "a user of evenkeel offline", "a recorder that counted wrongly led to a confident verdict"
)


@DOUBTED
def test_no_verdict_stands_on_a_doubt_that_nobody_accepted(steady, tmp_path):
    trace = read_trace(steady)
    trace.counts[:, 1] //= 2
    write_trace(steady, trace)
    out = tmp_path / "map"
    said = run(steady, *FLEET, "--out", out)
    assert said.index("Doubt: layers of one step") < said.index("It cannot be told whether it pays")
    assert "layer 3 in 120 of 120 steps" in " ".join(said.split())
    assert "It pays" not in said
    out.unlink()
    answer = json.loads(
        run(steady, *FLEET, "--out", out, "-o", "json", "--only-if-it-pays", code=1)
    )
    assert answer["verdict"]["call"] == "insufficient_evidence"
    assert [each["code"] for each in answer["findings"]] == ["uneven_layers"]
    assert not out.exists()
    assert (answer["file"], answer["start"]) == (None, None)
    said = run(steady, *FLEET, "--out", out, "--only-if-it-pays", "--accept", "uneven_layers")
    assert "It pays" in said and "Doubt" not in said


@DOUBTED
@pytest.mark.parametrize(
    ("busy", "where", "code"),
    [
        ([0, 1, 2, 4, 5], r"layers 3, 6\.\.7 of 8", "idle_layers"),
        ([4, 5, 6, 7], r"layers 0\.\.3 of 8", "leading_idle_layers"),
    ],
)
def test_a_file_that_counts_moe_layers_needs_all_of_them(tmp_path, busy, where, code):
    torch = pytest.importorskip("torch")
    counts = np.zeros((40, 8, 8), np.int32)
    loads = np.random.default_rng(7).multinomial(320, [1 / 8] * 8, (40, len(busy)))
    counts[:, busy] = loads
    torch.save({"logical_count": torch.tensor(counts)}, tmp_path / "d.pt")
    out = tmp_path / "map"
    for format_ in ("ascend", "vllm", "vllm-mapping"):
        with pytest.raises(InvalidInput, match=f"{where}.*--accept {code}"):
            run(tmp_path / "d.pt", *FLEET, "-f", format_, "--out", out)
    run(tmp_path / "d.pt", *FLEET, "-f", "sglang", "--out", out)
    assert len(json.loads(out.read_text())["physical_to_logical_map"]) == 8
    run(tmp_path / "d.pt", *FLEET, "-f", "vllm", "--accept", code, "--out", out)


def test_what_a_failure_loses_and_a_plan_without_replicas_are_told(steady, tmp_path):
    def said(*args, **config):
        return " ".join(run(steady, *args, "--out", tmp_path / "map", **config).split())

    fleet = ("--ranks", 2, "--slots", 10)
    assert "Losing any one rank loses at most 9 of 24 experts." in said(*fleet, survive="rank")
    told = (
        "no replica: run again with --slots {} for a file that leaves the memory of the other {} "
    )
    dear = {"cost": "roofline", "read_tokens": 100_000}
    assert told.format(8, 2) in said(*fleet, **dear)
    assert "no replica" not in said(*fleet) and "Losing" not in said(*fleet)
    assert told.format(9, 3) in said("--ranks", 3, "--slots", 12, **dear)
    assert "no replica" not in said("--ranks", 3, "--slots", 9, **dear)
