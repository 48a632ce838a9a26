import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace, read_trace
from evenkeel_moe.model.finding import doubts
from tests.formats.samples import make_trace, said


def _write_tensors(path, tensors):
    save_file({name: values.astype(np.int64) for name, values in tensors.items()}, path)


def _write_rank(folder, trace, rank, kept=lambda step, layer: True):
    tensors = {
        f"{100 + step}_{layer}": trace.source[step, rank, row]
        for step in range(trace.num_steps)
        for row, layer in enumerate(trace.layer_ids)
        if kept(step, layer)
    }
    _write_tensors(folder / f"rank{rank}.safetensors", dict(reversed(tensors.items())))


def _statistics(folder, trace):
    meta = {"num_experts": trace.num_experts, "num_experts_per_token": 2}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank in range(trace.source.shape[1]):
        _write_rank(folder, trace, rank)


def test_tensorrt_llm_folder_is_summed_over_ranks_with_absolute_layers(tmp_path):
    trace = make_trace(ranks=3)
    _statistics(tmp_path, trace)
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.counts, trace.counts)
    np.testing.assert_array_equal(read.source, trace.source)
    assert (read.layer_ids, read.top_k) == ((1, 2), 2)
    with pytest.raises(InvalidInput, match="names its layers by absolute id"):
        read_trace(tmp_path, first_moe_layer=1)


def test_tensorrt_llm_meta_info_may_have_other_keys(tmp_path):
    _statistics(tmp_path, make_trace())
    meta = {"num_experts": 4, "num_experts_per_token": 2, "version": 1, "model": {"name": "m"}}
    (tmp_path / "meta_info.json").write_text(json.dumps(meta))
    assert read_trace(tmp_path).top_k == 2
    (tmp_path / "meta_info.json").write_text('{"num_experts": 4, "version": 1}')
    with pytest.raises(InvalidInput, match="meta_info.json: .*missing: num_experts_per_token$"):
        read_trace(tmp_path)


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_tensorrt_llm_ranks_are_cut_to_the_shortest_recording(tmp_path, stopped):
    trace = make_trace(ranks=3)
    _statistics(tmp_path, trace)
    for rank, steps in ((stopped, 3), ((stopped + 1) % 3, 4)):
        _write_rank(tmp_path, trace, rank, lambda step, _, steps=steps: step < steps)
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.source, trace.source[:3])
    np.testing.assert_array_equal(read.counts, trace.counts[:3])
    fewest = f"rank {stopped} has 3, rank {(stopped + 2) % 3} 5"
    assert said(read) == [("left_out", f"2 of 5 iterations; {fewest}"), ("assumed", "")]


def test_tensorrt_llm_tensors_that_do_not_fit_are_refused(tmp_path):
    _statistics(tmp_path, make_trace())
    ones = np.ones(4)
    for tensors, message in (
        (
            {"1_1": ones, "2_1": ones, "3_1": ones, "3_2": ones},
            "most iterations are not on all 2 layers: iterations 1..2, 2 of 3 iterations; layer 2",
        ),
        ({"a": ones}, "'a' is not named iteration_layer"),
        ({"1_1": np.ones(5)}, r"must be \(4,\), got \(5,\)"),
        ({"1_1": -ones}, "holds -1..-1"),
        ({}, "holds no tensor"),
    ):
        _write_tensors(tmp_path / "rank1.safetensors", tensors)
        with pytest.raises(InvalidInput, match=f"rank1.safetensors: .*{message}"):
            read_trace(tmp_path)


UNEVEN = pytest.mark.fault(
    "a user of evenkeel offline", "a recording that ended unevenly was refused whole"
)


@UNEVEN
@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ({(0, step, layer) for step in (0,) for layer in (1, 2)}, [1, 2, 3, 4]),  # started later
        ({(1, 2, 2)}, [0, 1, 3, 4]),  # one layer of one iteration
        ({(0, 0, 1), (0, 0, 2), (1, 4, 1), (1, 4, 2)}, [1, 2, 3]),
    ],
)
def test_iterations_that_are_not_whole_are_left_out(tmp_path, lost, left):
    trace = make_trace()
    _statistics(tmp_path, trace)
    for rank in range(2):
        _write_rank(tmp_path, trace, rank, lambda *at, rank=rank: (rank, *at) not in lost)
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.counts, trace.counts[left])
    named = [each.where for each in read.findings if each.code == "left_out"]
    assert named[-1].startswith("iteration")


@UNEVEN
def test_layers_that_some_ranks_lack_are_left_out_unless_most_are(tmp_path):
    trace = make_trace(layers=3)
    _statistics(tmp_path, trace)
    _write_rank(tmp_path, trace, 1, lambda _, layer: layer < 3)
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.counts, trace.counts[:, :2])
    assert [each.where for each in doubts(read.findings)] == ["layer 3"]
    _write_rank(tmp_path, trace, 1, lambda _, layer: layer == 2)
    with pytest.raises(ShapeMismatch, match="layers 1, 3, 2 of 3 layers; rank 1 has 1, rank 0 3"):
        read_trace(tmp_path)


@UNEVEN
def test_a_rank_without_a_file_is_in_doubt_and_most_iterations_must_be_whole(tmp_path):
    trace = make_trace(ranks=3)
    _statistics(tmp_path, trace)
    (tmp_path / "rank1.safetensors").unlink()
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.counts, trace.counts - trace.source[:, 1])
    assert [each.where for each in doubts(read.findings)] == ["rank 1"]
    _write_tensors(
        tmp_path / "rank1.safetensors",
        {f"{step}_{layer}": np.ones(4) for step in (100, 900) for layer in (1, 2)},
    )
    with pytest.raises(
        InvalidInput, match="most iterations are not on all 3 ranks: .* rank 1 has 2"
    ):
        read_trace(tmp_path)


def _header(dtype="I64", shape="[4]"):
    told = f'{{"1_1": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [0, 8]}}}}'
    return len(told).to_bytes(8, "little") + told.encode() + bytes(8)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "header too small"),
        (_header(), "invalid shape, data type, or offset"),
        (_header("BF16"), "tensor that numpy cannot hold: .*bfloat16"),
        (_header("F8_E4M3", "[8]"), "tensor that numpy cannot hold: .*float8"),
        (_header("C64", "[1]"), r"must be \(4,\), got \(1,\)"),
        (_header(shape=str([1] * 100)), "tensor that numpy cannot hold: .*found 100"),
    ],
)
def test_malformed_safetensors_are_refused(tmp_path, blob, message):
    _statistics(tmp_path, make_trace())
    (tmp_path / "rank1.safetensors").write_bytes(blob)
    with pytest.raises(InvalidInput, match=f"rank1.safetensors: .*{message}"):
        read_trace(tmp_path)


def test_a_rank_file_that_cannot_be_opened_is_named(tmp_path):
    _statistics(tmp_path, make_trace())
    (tmp_path / "rank1.safetensors").unlink()
    (tmp_path / "rank1.safetensors").mkdir()
    with pytest.raises(InvalidInput, match="rank1.safetensors: cannot be read"):
        read_trace(tmp_path)


def test_the_time_to_read_a_recording_grows_linearly_with_its_keys(tmp_path):
    # With 2,000 iterations of 58 layers, comparing all pairs of keys would take minutes.
    counts = np.ones((2_000, 1, 58, 1), np.int64)
    trace = Trace(counts[:, 0], tuple(range(3, 61)), top_k=1, source=counts)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 1, "num_experts_per_token": 1}')
    tensors = {f"{step}_{layer}": np.ones(1) for step in range(2_000) for layer in trace.layer_ids}
    _write_tensors(tmp_path / "rank0.safetensors", tensors)
    np.testing.assert_array_equal(read_trace(tmp_path).counts, trace.counts)
