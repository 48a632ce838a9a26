import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace, read_trace, write_trace

torch = pytest.importorskip("torch")


def _trace(steps=5, layers=2, experts=4, ranks=2):
    rng = np.random.default_rng(3)
    # Every token goes to two experts, so sums are tokens x 2.
    source = np.zeros((steps, ranks, layers, experts), np.int64)
    for index in np.ndindex(steps, ranks, layers):
        for _ in range(3):
            source[index][rng.permutation(experts)[:2]] += 1
    mix = rng.dirichlet(np.ones(3), steps).astype(np.float32).astype(np.float64)
    return Trace(
        source.sum(axis=1),
        tuple(range(1, 1 + layers)),
        "five",
        2,
        np.full(steps, 3 * ranks, np.int64),
        source,
        mix,
        ("a", "b", "c"),
    )


def _equal(a, b):
    for name in ("counts", "tokens", "source", "mix"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)
    assert (a.layer_ids, a.top_k, a.domains) == (b.layer_ids, b.top_k, b.domains)


def test_npz_round_trip_keeps_everything_and_is_byte_stable(tmp_path):
    trace = _trace()
    write_trace(tmp_path / "five.npz", trace)
    read = read_trace(tmp_path / "five.npz")
    _equal(read, trace)
    assert read.name == "five"
    write_trace(tmp_path / "again.npz", read)
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "five.npz").read_bytes()


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=f"{tmp_path}: cannot be written: Is a directory"):
        write_trace(tmp_path, _trace())


@given(npst.arrays(np.int64, st.tuples(*[st.integers(1, 4)] * 3), elements=st.integers(0, 2**40)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_any_size_survive_the_smallest_type(tmp_path, counts):
    trace = Trace(counts, tuple(range(counts.shape[1])))
    write_trace(tmp_path / "t.npz", trace)
    _equal(read_trace(tmp_path / "t.npz"), trace)


def test_first_moe_layer_moves_the_layer_ids(tmp_path):
    np.savez(tmp_path / "t.npz", T=_trace().counts)
    assert read_trace(tmp_path / "t.npz").layer_ids == (0, 1)
    assert read_trace(tmp_path / "t.npz", first_moe_layer=3).layer_ids == (3, 4)


def test_cut_takes_whole_steps_of_everything():
    part = _trace().cut(1, 3)
    assert part.num_steps == 2
    np.testing.assert_array_equal(part.counts, _trace().counts[1:3])
    np.testing.assert_array_equal(part.source, _trace().source[1:3])
    with pytest.raises(InvalidInput, match="cannot cut steps 3..9 from a trace of 5"):
        _trace().cut(3, 9)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros(3)}, "has no array T"),
        ({"T": np.zeros((3, 4), np.uint16)}, r"T must be \(steps, layers, experts\).*\(3, 4\)"),
        ({"T": np.zeros((0, 4, 2), np.uint16)}, r"none of them 0, got \(0, 4, 2\)"),
        ({"T": np.full((1, 2, 3), -1)}, r"T holds -1..-1"),
        ({"T": np.full((1, 2, 3), np.nan)}, "T holds 6 values that are not finite"),
        ({"T": np.full((1, 2, 3), 0.5)}, "T holds 6 counts that are not whole"),
        ({"T": np.full((1, 2, 3), "a")}, "T must hold numbers, holds <U1"),
        ({"T": np.ones((1, 2, 3), np.uint16), "topk": np.int32(9)}, "top-k is 9, must be 1..3"),
        ({"T": np.ones((1, 2, 3), np.uint16), "topk": np.arange(2)}, "topk must be one number"),
        ({"T": np.ones((1, 2, 3), np.uint16), "tokens": np.arange(2)}, r"tokens must be \(1,\), got \(2,\)"),
        (
            {"T": np.ones((1, 2, 3), np.uint16), "tokens": np.array([2]), "topk": np.int32(2)},
            r"2 \(step, layer\) sums .* counts 3, 2 tokens x 2 = 4",
        ),
        ({"T": np.ones((1, 2, 3), np.uint16), "S": np.ones((1, 2, 3), np.uint16)}, r"\(1, ranks, 2, 3\)"),
        (
            {"T": np.ones((1, 2, 3), np.uint16), "S": np.ones((1, 2, 2, 3), np.uint16)},
            "6 source counts do not sum to the counts, first: step 0 layer 0 expert 0: 2 against 1",
        ),
        ({"T": np.ones((1, 2, 3), np.uint16), "layer_ids": np.array([1, 1])}, r"must rise .*\[1, 1\]"),
        ({"T": np.ones((1, 2, 3), np.uint16), "layer_ids": np.array([1])}, "1 layer ids for 2 layers"),
        (
            {"T": np.ones((1, 2, 3), np.uint16), "mix": np.ones((2, 1), np.float32), "domains": np.array(["a"])},
            r"mix must be \(1, 1\), steps by domains, got \(2, 1\)",
        ),
    ],
)  # fmt: skip
def test_malformed_npz_is_refused_with_the_numbers(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InvalidInput, match=f"bad.npz: .*{message}"):
        read_trace(tmp_path / "bad.npz")


def test_pickles_are_never_opened(tmp_path):
    np.savez(tmp_path / "bad.npz", T=np.array([object()]))
    with pytest.raises(InvalidInput, match="allow_pickle=False"):
        read_trace(tmp_path / "bad.npz")


def test_a_member_that_unpacks_to_more_than_it_may_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("evenkeel_moe.formats.traces.MAX_ARRAY_BYTES", 1000)
    np.savez_compressed(tmp_path / "bomb.npz", T=np.zeros((10, 10, 10), np.int64))
    with pytest.raises(InvalidInput, match="T.npy unpacks to 8128 bytes, at most 1000 are read"):
        read_trace(tmp_path / "bomb.npz")


def test_paths_that_are_no_trace(tmp_path):
    with pytest.raises(InvalidInput, match="no such file or folder"):
        read_trace(tmp_path / "absent.npz")
    with pytest.raises(InvalidInput, match=r"neither meta_info.json nor \*.pt"):
        read_trace(tmp_path)
    (tmp_path / "t.csv").write_text("1,2")
    with pytest.raises(InvalidInput, match=r"not \*.csv"):
        read_trace(tmp_path / "t.csv")


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_npz_is_read_or_refused_in_our_own_words(tmp_path, data):
    path = tmp_path / "t.npz"
    np.savez(path, T=_trace().counts.astype(np.uint16), topk=np.int32(2))
    _damage_and_read(path, path, data)


def _damage_and_read(damaged: Path, path: Path, data):
    blob = bytearray(damaged.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    damaged.write_bytes(
        bytes(blob[: data.draw(st.sampled_from([len(blob), len(blob) // 2, len(blob) - 1]))])
    )
    try:
        trace = read_trace(path)
    except EvenkeelError as error:
        assert str(path) in str(error)
    else:
        assert trace.counts.min() >= 0


# SGLang


def _dump(path, counts, **more):
    torch.save(
        {
            "rank": 0,
            "logical_count": torch.tensor(counts),
            "average_utilization_rate_over_window": None,
            **more,
        },
        path,
    )


def test_sglang_rows_are_hidden_layers_and_dense_ones_are_found(tmp_path):
    counts = np.zeros((5, 4, 4), np.int32)
    counts[:, [1, 3]] = _trace().counts
    _dump(tmp_path / "expert_distribution_recorder_1.0.pt", counts)
    trace = read_trace(tmp_path / "expert_distribution_recorder_1.0.pt")
    assert trace.layer_ids == (1, 3)
    np.testing.assert_array_equal(trace.counts, _trace().counts)
    assert "2 of 4 hidden layers never counted a token" in " ".join(trace.notes)
    assert "full" in " ".join(trace.notes)
    assert read_trace(
        tmp_path / "expert_distribution_recorder_1.0.pt", first_moe_layer=2
    ).layer_ids == (2, 3)
    with pytest.raises(InvalidInput, match="first MoE layer 4 is outside the 4 hidden layers"):
        read_trace(tmp_path / "expert_distribution_recorder_1.0.pt", first_moe_layer=4)


def test_sglang_dumps_of_another_kind_are_refused(tmp_path):
    for content, message in (
        ([1, 2], "holds a list, must be a mapping"),
        ({"records": []}, "has no logical_count, only: records; per-pass dumps are read by naming"),
        ({"logical_count": "abc"}, "must hold numbers"),
        ({"logical_count": torch.zeros(2, 2, 2, 2)}, r"must be \(steps, hidden layers, experts\)"),
        ({"logical_count": torch.zeros(2, 2, 2)}, "none of the 2 steps routed a token"),
        ({"logical_count": torch.full((2, 2, 2), -1)}, "holds -1..-1"),
        (
            {"logical_count": torch.ones(2, 2, 2, dtype=torch.bfloat16)},
            "logical_count is bfloat16, which rounds counts above 256: dump it as int32 or float32",
        ),
    ):
        torch.save(content, tmp_path / "d.pt")
        with pytest.raises(InvalidInput, match=message):
            read_trace(tmp_path / "d.pt")


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_a_damaged_sglang_dump_is_read_or_refused_in_our_own_words(tmp_path, data):
    _dump(tmp_path / "d.pt", _trace().counts)
    _damage_and_read(tmp_path / "d.pt", tmp_path / "d.pt", data)


def test_sglang_per_pass_dumps_are_summed_over_ranks_and_mapped_to_logical(tmp_path):
    placed = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 2]])
    for rank in range(2):
        records = []
        for key in (12, 11):
            physical = torch.zeros(2, 4, dtype=torch.int32)
            physical[:, 2 * rank : 2 * rank + 2] = key
            records.append(
                {
                    "forward_pass_id": key,
                    "rank": rank,
                    "gatherer_key": "primary",
                    "global_physical_count": physical,
                }
            )
        torch.save(
            {"records": records, "last_physical_to_logical_map": placed}, tmp_path / f"r_{rank}.pt"
        )
    trace = read_trace(tmp_path)
    np.testing.assert_array_equal(trace.counts[0], [[22, 11, 11], [11, 11, 22]])
    np.testing.assert_array_equal(trace.counts[1], [[24, 12, 12], [12, 12, 24]])
    torch.save(
        {"records": records[:1], "last_physical_to_logical_map": placed}, tmp_path / "r_1.pt"
    )
    with pytest.raises(InvalidInput, match="passes have records of 1 to 2 ranks"):
        read_trace(tmp_path)
    torch.save(
        {"records": records, "last_physical_to_logical_map": placed[:1]}, tmp_path / "r_1.pt"
    )
    with pytest.raises(
        ShapeMismatch, match=r"r_1.pt: its map \(1, 4\) is not the map of the other files"
    ):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        (torch.tensor([[0, 2**40]]), f"names expert {2**40}, 2 slots cannot hold so many"),
        (
            torch.zeros((0, 2), dtype=torch.int64),
            r"must be \(layers, slots\), none of them 0, got \(0, 2\)",
        ),
        (
            torch.zeros((2, 0), dtype=torch.int64),
            r"must be \(layers, slots\), none of them 0, got \(2, 0\)",
        ),
    ],
)
def test_a_map_no_model_has_is_refused_before_memory_is_asked_for(tmp_path, placed, message):
    record = {"forward_pass_id": 1, "rank": 0, "global_physical_count": torch.ones(placed.shape)}
    torch.save({"records": [record], "last_physical_to_logical_map": placed}, tmp_path / "r_0.pt")
    with pytest.raises(InvalidInput, match=f"r_0.pt: .*{message}"):
        read_trace(tmp_path)


# TensorRT-LLM


def _safetensors(path, tensors):
    header, data = {}, bytearray()
    for name, values in tensors.items():
        blob = values.astype("<i8").tobytes()
        header[name] = {
            "dtype": "I64",
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(blob)],
        }
        data += blob
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def _statistics(folder, trace):
    (folder / "meta_info.json").write_text(
        json.dumps({"num_experts": trace.num_experts, "num_experts_per_token": 2})
    )
    for rank in range(trace.source.shape[1]):
        tensors = {
            f"{100 + step}_{layer}": trace.source[step, rank, row]
            for step in range(trace.num_steps)
            for row, layer in enumerate(trace.layer_ids)
        }
        _safetensors(folder / f"rank{rank}.safetensors", dict(reversed(tensors.items())))


def test_tensorrt_llm_folder_is_summed_over_ranks_with_absolute_layers(tmp_path):
    trace = _trace(ranks=3)
    _statistics(tmp_path, trace)
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.counts, trace.counts)
    np.testing.assert_array_equal(read.source, trace.source)
    assert (read.layer_ids, read.top_k) == ((1, 2), 2)
    with pytest.raises(InvalidInput, match="names its layers by absolute id"):
        read_trace(tmp_path, first_moe_layer=1)


def test_tensorrt_llm_meta_info_may_say_more(tmp_path):
    _statistics(tmp_path, _trace())
    meta = {"num_experts": 4, "num_experts_per_token": 2, "version": 1, "model": {"name": "m"}}
    (tmp_path / "meta_info.json").write_text(json.dumps(meta))
    assert read_trace(tmp_path).top_k == 2
    (tmp_path / "meta_info.json").write_text('{"num_experts": 4, "version": 1}')
    with pytest.raises(
        InvalidInput, match="meta_info.json: .*missing: num_experts_per_token; unknown: none"
    ):
        read_trace(tmp_path)


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_tensorrt_llm_ranks_that_stopped_earlier_cut_the_others(tmp_path, stopped):
    trace = _trace(ranks=3)
    _statistics(tmp_path, trace)
    for rank, steps in ((stopped, 3), ((stopped + 1) % 3, 4)):
        tensors = {
            f"{100 + step}_{layer}": trace.source[step, rank, row]
            for step in range(steps)
            for row, layer in enumerate(trace.layer_ids)
        }
        _safetensors(tmp_path / f"rank{rank}.safetensors", tensors)
    read = read_trace(tmp_path)
    np.testing.assert_array_equal(read.source, trace.source[:3])
    np.testing.assert_array_equal(read.counts, trace.counts[:3])
    assert read.notes == (
        "ranks recorded 3 to 5 iterations: cut to the first 3, which all of them have",
    )


def test_tensorrt_llm_folders_with_holes_are_refused(tmp_path):
    _statistics(tmp_path, _trace())
    ones = np.ones(4)
    for tensors, message in (
        ({"1_1": ones}, "has 1 iterations x 1 layers .*, rank 0 has 5 x 2"),
        (
            {f"{step}_{layer}": ones for step in range(101, 105) for layer in (1, 2)},
            r"has 4 iterations x 2 layers \(101..104\), rank 0 has 5 x 2 \(100..104\)",
        ),
        (
            {f"{step}_{layer}": ones for step in (100, 101, 103) for layer in (1, 2)},
            r"has 3 iterations x 2 layers \(100..103\), rank 0 has 5 x 2",
        ),
        ({"1_1": ones, "2_1": ones, "2_2": ones}, "3 tensors for 2 iterations x 2 layers = 4"),
        ({"a": ones}, "'a' is not named iteration_layer"),
        ({"1_1": np.ones(5)}, r"must be \(4,\), got \(5,\)"),
        ({"1_1": -ones}, "holds -1..-1"),
        ({}, "0 tensors"),
    ):
        _safetensors(tmp_path / "rank1.safetensors", tensors)
        with pytest.raises(InvalidInput, match=f"rank1.safetensors: .*{message}"):
            read_trace(tmp_path)
    (tmp_path / "rank1.safetensors").rename(tmp_path / "rank2.safetensors")
    with pytest.raises(InvalidInput, match=r"must be rank0..rank\{R-1\}, found \[0, 2\]"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"abc", "3 bytes, a safetensors file has at least 8"),
        ((100).to_bytes(8, "little") + b"{}", "header of 100 bytes announced, 2 bytes follow"),
        ((2).to_bytes(8, "little") + b"[]", "header must be a mapping, is list"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "header is not UTF-8"),
        (
            b'{"1_1": {"dtype": "I64", "shape": [4], "data_offsets": [0, 8]}}',
            "needs 32 bytes, offsets 0..8 give 8",
        ),
        (
            b'{"1_1": {"dtype": "I64", "shape": [1], "data_offsets": [0, 99]}}',
            "data offset is 99, must be 0..8",
        ),
        (b'{"1_1": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}', "has dtype 'BF16'"),
        (
            b'{"1_1": {"dtype": "I64", "shape": [1], "data_offsets": [8]}}',
            "has 1 data offsets, must be 2",
        ),
        (b'{"1_1": {"dtype": "I64", "shape": [1]}}', "missing: data_offsets"),
        (
            b'{"1_1": {"dtype": "I64", "shape": [' + b"1," * 99 + b'1], "data_offsets": [0, 8]}}',
            "has 100 dimensions, at most 32",
        ),
    ],
)
def test_malformed_safetensors_are_refused_with_the_numbers(tmp_path, blob, message):
    _statistics(tmp_path, _trace())
    if blob.startswith(b'{"'):
        blob = len(blob).to_bytes(8, "little") + blob + bytes(8)
    (tmp_path / "rank1.safetensors").write_bytes(blob)
    with pytest.raises(InvalidInput, match=message):
        read_trace(tmp_path)


def test_a_long_recording_is_read_in_time_that_grows_with_its_keys(tmp_path):
    # 2,000 iterations of 58 layers: comparing every key with every other would take minutes.
    counts = np.ones((2_000, 1, 58, 1), np.int64)
    trace = Trace(counts[:, 0], tuple(range(3, 61)), top_k=1, source=counts)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 1, "num_experts_per_token": 1}')
    tensors = {f"{step}_{layer}": np.ones(1) for step in range(2_000) for layer in trace.layer_ids}
    _safetensors(tmp_path / "rank0.safetensors", tensors)
    np.testing.assert_array_equal(read_trace(tmp_path).counts, trace.counts)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_damaged_statistics_folder_is_read_or_refused_in_our_own_words(tmp_path, data):
    _statistics(tmp_path, _trace())
    name = data.draw(st.sampled_from(["rank0.safetensors", "rank1.safetensors", "meta_info.json"]))
    _damage_and_read(tmp_path / name, tmp_path, data)


def test_source_counts_of_no_rank_are_refused(tmp_path):
    np.savez(tmp_path / "t.npz", T=np.ones((5, 2, 4)), S=np.ones((5, 0, 2, 4)))
    with pytest.raises(
        ShapeMismatch, match=r"source counts must be \(5, ranks, 2, 4\), got \(5, 0, 2, 4\)"
    ):
        read_trace(tmp_path / "t.npz")


def test_zip_that_is_no_npz(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("T.npy", b"\x93NUMPY\x01\x00\x04\x00junk")
    with pytest.raises(InvalidInput, match="holds an array that cannot be read"):
        read_trace(tmp_path / "t.npz")
