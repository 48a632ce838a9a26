"""Loads that engines record in other ways: vLLM's statistics, routed experts, our plugins."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import read_trace, write_trace
from evenkeel_moe.formats.recording import RecordedLoad, newest_step, read_recording, write_recorded
from evenkeel_moe.model.finding import doubts
from tests.formats.samples import said

# --- vLLM's load statistics --------------------------------------------------------------------


def stats(step, load, held, **changes):
    record = {
        "record_type": "eplb_load_stats",
        "version": 1,
        "step": step,
        "num_ranks": 2,
        "expert_load": load,
        "p2l_map": held,
    }
    return record | changes


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_vllms_statistics_become_tokens_of_experts_under_the_map_of_each_step(tmp_path):
    path = written(
        tmp_path / "stats.jsonl",
        {"record_type": "session_metadata", "host": "a"},
        stats(9, [[1, 2, 3, 4]], [[2, 1, 0, 2]]),
        stats(7, [[10, 1, 5, 2]], [[0, 1, 2, 0]]),
        stats(8, [[0, 0, 0, 0]], [[0, 1, 2, 0]]),
    )
    trace = read_trace(path, first_moe_layer=3)
    assert trace.counts.tolist() == [[[12, 1, 5]], [[3, 2, 5]]]
    assert trace.layer_ids == (3,)
    assert said(trace) == [("left_out", "1 of 3 steps")]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"record_type": "other"}], "no line of the type eplb_load_stats"),
        ([{"step": 1}], "line 1: .* missing: record_type"),
        ([stats(1, [[1, 2]], [[0, 1]], version=2)], "line 1: version is 2"),
        ([stats(1, [[1, 2, 3]], [[0, 1]])], r"expert_load is \(1, 3\), p2l_map \(1, 2\)"),
        ([stats(1, [[1, 2]], [[0, 5]])], "has expert 5, 2 slots cannot hold so many"),
        ([stats(1, [[1, -2]], [[0, 1]])], "slot 1 is -2"),
        (
            [stats(1, [[1, 2]], [[0, 1]]), stats(2, [[1]], [[0]])],
            r"line 2 has \(1, 1\) layers and slots, the first step \(1, 2\)",
        ),
    ],
)
def test_statistics_that_do_not_fit_are_refused_with_the_line(tmp_path, records, words):
    with pytest.raises((InvalidInput, ShapeMismatch), match=words):
        read_trace(written(tmp_path / "stats.jsonl", *records))


# --- experts of each token ---------------------------------------------------------------------

# Two sequences of 3 and 2 tokens, padded to 4; layer 0 is dense; 2 of 5 experts for each token.
ROUTES = np.zeros((2, 4, 3, 2), np.int16)
ROUTES[0, 0:2, 1:] = [[[0, 4], [1, 2]], [[3, 4], [2, 1]]]
ROUTES[1, 0:1, 1:] = [[[0, 1], [3, 1]]]


@pytest.mark.parametrize("kind", ["npz", "pt"])
def test_positions_of_sequences_are_steps_and_padding_counts_nothing(tmp_path, kind):
    path = tmp_path / f"routes.{kind}"
    if kind == "npz":
        np.savez(path, routed_experts=ROUTES)
    else:
        torch.save({"routed_experts": torch.from_numpy(ROUTES)}, path)
    trace = read_trace(path)
    assert trace.layer_ids == (1, 2)
    assert trace.top_k == 2
    assert trace.counts.tolist() == [
        [[2, 1, 0, 0, 1], [0, 2, 1, 1, 0]],
        [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]],
    ]
    assert said(trace) == [
        ("padding", "5 of 8 rows"),
        ("left_out", "2 of 4 steps"),
        ("leading_idle_layers", ""),
        ("assumed", ""),
        ("assumed", "5 experts"),
    ]


def test_a_mask_tells_the_real_tokens_where_one_expert_is_chosen(tmp_path):
    path = tmp_path / "routes.npz"
    arrays: Any = {"routed_experts": ROUTES[:, :, 1:, :1], "num_experts": np.array(8)}
    with pytest.raises(InvalidInput, match="padding cannot be told apart: add attention_mask"):
        np.savez(path, **arrays)
        read_trace(path)
    np.savez(path, **arrays, attention_mask=np.array([[1, 1, 0, 0], [1, 0, 0, 0]]))
    trace = read_trace(path)
    assert trace.counts.shape == (2, 2, 8)
    assert trace.counts.sum(axis=2).tolist() == [[2, 2], [1, 1]]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"routed_experts": ROUTES[0, 0]}, r"got \(3, 2\)"),
        ({"routed_experts": ROUTES * 0.5}, "holds float64"),
        ({"routed_experts": ROUTES * 0}, "none of the 2 sequences routed a token"),
        ({"routed_experts": ROUTES, "num_experts": np.array(4)}, "the id 4, num_experts is 4"),
        (
            {"routed_experts": ROUTES, "attention_mask": np.ones((2, 3))},
            r"must be \(2, 4\), got \(2, 3\)",
        ),
    ],
)
def test_routes_that_do_not_fit_are_refused_with_the_numbers(tmp_path, arrays, words):
    np.savez(tmp_path / "routes.npz", **arrays)
    with pytest.raises((InvalidInput, ShapeMismatch), match=words):
        read_trace(tmp_path / "routes.npz")


LINES = pytest.mark.fault(
    "a user of evenkeel offline", "token sums were bound as ids, and one line cost all others"
)


def many(steps, load=1, held=((0, 1, 2, 0),)):
    rng = np.random.default_rng(0)
    lines = [rng.integers(1, 9, (len(held), 4)) * load for _ in steps]
    return [stats(step, line.tolist(), held) for step, line in zip(steps, lines, strict=True)]


@LINES
def test_sums_above_the_bound_of_ids_and_whole_floats_are_read(tmp_path):
    records = many(range(9), load=100_000_000)
    trace = read_trace(written(tmp_path / "a.jsonl", *records))
    assert trace.counts.sum() == sum(np.sum(record["expert_load"]) for record in records)
    for record in records:
        record["expert_load"] = [[float(tokens) for tokens in row] for row in record["expert_load"]]
    np.testing.assert_array_equal(
        read_trace(written(tmp_path / "b.jsonl", *records)).counts, trace.counts
    )
    records[0]["expert_load"][0][0] = 2.5
    left = read_trace(written(tmp_path / "c.jsonl", *records))
    np.testing.assert_array_equal(left.counts, trace.counts[1:])
    assert [each.where for each in left.findings if each.code == "left_out"] == ["line 1"]


@LINES
@pytest.mark.parametrize("broken", ['{"record_type": "eplb_load_st', "not json", '{"a": NaN}'])
def test_a_line_that_cannot_be_read_is_left_out_by_number(tmp_path, broken):
    path = written(tmp_path / "a.jsonl", *many(range(9)))
    path.write_text(path.read_text() + broken)
    trace = read_trace(path, first_moe_layer=0)
    assert trace.num_steps == 9
    assert [each.where for each in trace.findings] == ["line 10"]
    path.write_text("\n".join([broken] * 9) + "\n" + path.read_text())
    with pytest.raises(InvalidInput, match="10 of 19 lines cannot be read; line 1: "):
        read_trace(path)


@LINES
def test_a_server_that_was_started_again_is_read_on_and_several_at_once_are_not(tmp_path):
    path = written(tmp_path / "a.jsonl", *many([*range(9), *range(5)]))
    trace = read_trace(path, first_moe_layer=0)
    assert trace.num_steps == 14
    assert [each.where for each in trace.findings] == ["after 9 steps"]
    both = [step for pair in zip(range(30), range(30), strict=True) for step in pair]
    with pytest.raises(InvalidInput, match="fall 30 times in 60 lines.*: is the file of several"):
        read_trace(written(tmp_path / "b.jsonl", *many(both)))


@LINES
def test_an_empty_slot_has_no_tokens(tmp_path):
    records = many(range(9), held=((0, 1, 2, -1),))
    lost = sum(record["expert_load"][0][3] for record in records)
    trace = read_trace(written(tmp_path / "a.jsonl", *records))
    total = sum(np.sum(record["expert_load"]) for record in records)
    assert trace.counts.sum() == total - lost
    assert ("routes_missing", f"{lost} of {total} tokens") in said(trace)
    for record in records:
        record["expert_load"][0][3] = 0
    assert said(read_trace(written(tmp_path / "b.jsonl", *records), first_moe_layer=0)) == []


@LINES
@pytest.mark.parametrize("starts", [((1000, 40), (0, 30)), ((500, 9), (90, 8), (3, 20))])
def test_a_restart_keeps_the_order_of_lines_where_no_step_occurs_twice(tmp_path, starts):
    """The file was begun late in the first start, so its steps lie above those of the next."""
    numbers = [first + index for first, steps in starts for index in range(steps)]
    records = many(numbers)
    trace = read_trace(written(tmp_path / "a.jsonl", *records), first_moe_layer=0)
    loads = [record["expert_load"][0] for record in records]
    assert trace.counts[:, 0, 1].tolist() == [load[1] for load in loads]
    (found,) = trace.findings
    assert (found.where, found.amount) == (
        f"after {starts[0][1]} steps",
        f"{len(starts) - 1} times",
    )


@LINES
def test_lines_out_of_order_are_sorted(tmp_path):
    numbers = sorted(range(40), key=str)
    records = many(numbers)
    trace = read_trace(written(tmp_path / "a.jsonl", *records), first_moe_layer=0)
    load = {record["step"]: record["expert_load"][0][1] for record in records}
    assert trace.counts[:, 0, 1].tolist() == [load[step] for step in range(40)]
    assert trace.findings == ()


@LINES
@pytest.mark.parametrize(("tokens", "severity"), [(1, "note"), (90, "doubt")])
def test_tokens_of_an_empty_slot_are_in_doubt_if_they_are_many(tmp_path, tokens, severity):
    records = many(range(40), load=10, held=((0, 1, 2, -1),))
    for record in records:
        record["expert_load"][0][3] = 0
    records[7]["expert_load"][0][3] = tokens
    (found,) = read_trace(written(tmp_path / "a.jsonl", *records), first_moe_layer=0).findings
    assert (found.code, found.severity) == ("routes_missing", severity)


# --- recordings of our plugins -----------------------------------------------------------------


def record(
    folder, rank, first, *, start="a1b2c3d4-77", steps=2, ranks=2, experts=3, top_k=3, began=1.7e9
):
    counts = np.full((steps, 1, experts), 1 + rank, np.int64)
    numbers = np.arange(first, first + steps)
    return write_recorded(folder, start, RecordedLoad(rank, ranks, top_k, numbers, counts, began))


@pytest.mark.fault(
    "a user of evenkeel offline", "a plan was written for the dense layers, and nothing said it"
)
def test_hidden_layers_that_nothing_names_are_said_to_be_taken_for_the_first(tmp_path):
    (tmp_path / "loads").mkdir()
    for rank in (0, 1):
        record(tmp_path / "loads", rank, 0)
    np.savez(tmp_path / "t.npz", T=np.arange(24).reshape(4, 1, 6))
    written(tmp_path / "s.jsonl", *many(range(9)))
    for name in ("loads", "t.npz", "s.jsonl"):
        trace = read_trace(tmp_path / name)
        (note,) = trace.findings
        assert (note.code, note.severity, note.where) == ("assumed", "note", "layer 0")
        assert "give first_moe_layer" in note.advice
        assert read_trace(tmp_path / name, first_moe_layer=3).findings == ()
        write_trace(tmp_path / "again.npz", trace)
        assert read_trace(tmp_path / "again.npz").findings == (note,)
        assert read_trace(tmp_path / "again.npz", first_moe_layer=3).findings == ()


def test_the_loads_of_all_ranks_add_up_and_steps_that_one_lacks_are_left_out(tmp_path):
    for rank, first in ((0, 0), (1, 0), (0, 2)):
        record(tmp_path, rank, first)
    assert newest_step(tmp_path) == ("a1b2c3d4", 3)
    trace = read_trace(tmp_path, first_moe_layer=4)
    assert trace.counts.tolist() == [[[3, 3, 3]]] * 2
    assert (trace.layer_ids, trace.top_k) == ((4,), 3)
    assert said(trace) == [("left_out", "2 of 4 steps; rank 1 has 2, rank 0 4")]


def test_only_the_newest_start_of_the_group_is_read(tmp_path):
    for rank in (0, 1):
        record(tmp_path, rank, 5, start="00000001", steps=1, began=1.7e9 + 60 + rank)
        record(tmp_path, rank, 0, start="ffffffff", began=1.7e9 + rank)
    trace = read_trace(tmp_path, first_moe_layer=0)
    assert trace.num_steps == 1
    assert [each.code for each in trace.findings] == ["left_out"]
    assert read_trace(tmp_path, start="ffffffff").num_steps == 2
    with pytest.raises(InvalidInput, match="there is no start 0; starts: 00000001, ffffffff"):
        read_trace(tmp_path, start="0")


@pytest.mark.fault(
    "a user who copied a recording", "the older of two starts was planned on, by the time of copies"
)
@pytest.mark.parametrize("began", [(math.nan, math.nan), (1.0, math.nan), (1.0, 1.0)])
def test_starts_that_do_not_say_when_they_began_are_asked_for(tmp_path, began):
    for start, at in zip(("00000001", "ffffffff"), began, strict=True):
        for rank in (0, 1):
            record(tmp_path, rank, 0, start=start, began=at)
    asked = r"holds 2 starts.*: 00000001 \(2 steps\), ffffffff \(2 steps\). Name one as start"
    for ask in (read_trace, newest_step):
        with pytest.raises(InvalidInput, match=asked):
            ask(tmp_path)
    assert read_trace(tmp_path, start="ffffffff").num_steps == 2
    assert newest_step(tmp_path, "ffffffff") == ("ffffffff", 1)


CUT = pytest.mark.fault(
    "a user who copied a recording", "one file that was cut cost the steps of all ranks"
)


@CUT
@pytest.mark.parametrize("cut", [0, 3])
def test_a_rank_whose_only_file_is_cut_is_in_doubt_and_the_others_are_read(tmp_path, cut):
    paths = [record(tmp_path, rank, 0, ranks=4) for rank in range(4)]
    paths[cut].write_bytes(paths[cut].read_bytes()[:200])
    trace = read_trace(tmp_path)
    assert (trace.counts == 1 + 2 + 3 + 4 - (1 + cut)).all()
    missing = [each for each in doubts(trace.findings) if each.code == "parts_missing"]
    assert [(each.where, each.amount.split(";")[0]) for each in missing] == [
        (paths[cut].name, "1 of 4 files"),
        (f"rank {cut}", "1 of 4 ranks"),
    ]


@CUT
def test_half_of_the_ranks_are_refused_and_named_unless_it_is_accepted(tmp_path):
    for rank in (0, 2):
        record(tmp_path, rank, 0, ranks=4)
    with pytest.raises(InvalidInput, match="ranks 1, 3, 2 of 4 ranks.*--accept parts_missing"):
        read_trace(tmp_path)
    assert (read_trace(tmp_path, accept=["parts_missing"]).counts == 4).all()


@CUT
@pytest.mark.parametrize("cut", range(4))
def test_the_newest_start_is_known_also_if_one_of_its_files_is_cut(tmp_path, cut):
    paths = [
        record(tmp_path, rank, first, start="00000001", began=1.8e9)
        for rank in (0, 1)
        for first in (0, 2)
    ]
    for rank in (0, 1):
        record(tmp_path, rank, 9, start="ffffffff", began=1.7e9)
    paths[cut].write_bytes(paths[cut].read_bytes()[:200])
    trace = read_trace(tmp_path)
    assert trace.num_steps == 2 and (trace.counts == 3).all()


def test_a_recording_that_does_not_fit_is_refused(tmp_path):
    record(tmp_path, 0, 0)
    with pytest.raises(InvalidInput, match="are missing: rank 1, 1 of 2 ranks"):
        read_trace(tmp_path)
    path = record(tmp_path, 1, 0, experts=4)
    with pytest.raises(ShapeMismatch, match=r"is for \(1, 4\) layers and experts of 2 ranks"):
        read_trace(tmp_path)
    path = record(tmp_path, 1, 0, top_k=2)
    with pytest.raises(ShapeMismatch, match="layers and experts of 2 ranks, top-k 2, others for"):
        read_trace(tmp_path)
    path.write_bytes(b"PK")
    with pytest.raises(InvalidInput, match="not a readable npz file"):
        read_trace(tmp_path)
    path.unlink()
    record(tmp_path, 1, 0)
    with pytest.raises(InvalidInput, match="no step is complete"):
        read_recording(tmp_path, None, from_step=9)


@pytest.mark.fault("a user who copied a recording", "a file that was cut cost the whole recording")
def test_a_file_that_is_cut_is_left_out_by_name(tmp_path):
    for rank in (0, 1):
        for first in (0, 2, 4):
            path = record(tmp_path, rank, first)
    path.write_bytes(path.read_bytes()[:300])
    trace = read_trace(tmp_path)
    assert trace.num_steps == 4
    (doubt,) = doubts(trace.findings)
    assert (str(doubt.code), doubt.where) == ("parts_missing", path.name)
    for path in tmp_path.glob("*rank1*"):
        path.write_bytes(b"")
    with pytest.raises(InvalidInput, match="3 of 6 files are damaged"):
        read_trace(tmp_path)
