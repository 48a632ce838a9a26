import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import Trace, read_trace, write_trace
from evenkeel_moe.model.finding import FindingCode
from tests.formats.samples import make_trace


def _equal(a, b):
    for name in ("counts", "tokens", "source"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)
    for name in ("layer_ids", "top_k", "num_hidden_layers", "rank_files"):
        assert getattr(a, name) == getattr(b, name)


def test_npz_round_trip_keeps_everything_and_is_byte_stable(tmp_path):
    trace = replace(make_trace(), num_hidden_layers=9, rank_files=2)
    write_trace(tmp_path / "five.npz", trace)
    read = read_trace(tmp_path / "five.npz")
    _equal(read, trace)
    assert read.name == "five"
    write_trace(tmp_path / "again.npz", read)
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "five.npz").read_bytes()


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=f"{tmp_path}: cannot be written: Is a directory"):
        write_trace(tmp_path, make_trace())


@given(npst.arrays(np.int64, st.tuples(*[st.integers(1, 4)] * 3), elements=st.integers(0, 2**40)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_any_size_fit_their_smallest_type(tmp_path, counts):
    busy = counts.any(axis=(1, 2))
    trace = Trace(counts, tuple(range(counts.shape[1])), source=counts[:, None])
    write_trace(tmp_path / "t.npz", trace)
    if not busy.any():
        with pytest.raises(InvalidInput, match=f"none of the {len(counts)} steps routed a token"):
            read_trace(tmp_path / "t.npz")
        return
    kept = replace(trace, counts=counts[busy], source=counts[busy, None])
    _equal(read_trace(tmp_path / "t.npz"), kept)


def test_steps_that_pad_an_npz_are_left_out_with_a_note(tmp_path):
    trace = make_trace()
    pad = [(0, 3), (0, 0), (0, 0)]
    padded = replace(
        trace,
        counts=np.pad(trace.counts, pad),
        tokens=np.pad(trace.tokens, (0, 3)),
        source=np.pad(trace.source, [*pad, (0, 0)]),
    )
    write_trace(tmp_path / "t.npz", padded)
    read = read_trace(tmp_path / "t.npz")
    _equal(read, trace)
    (note,) = [each for each in read.findings if each.code is FindingCode.LEFT_OUT]
    assert note.amount == f"3 of {trace.num_steps + 3} steps"


def test_first_moe_layer_moves_the_layer_ids(tmp_path):
    np.savez(tmp_path / "t.npz", T=make_trace().counts)
    assert read_trace(tmp_path / "t.npz").layer_ids == (0, 1)
    assert read_trace(tmp_path / "t.npz", first_moe_layer=3).layer_ids == (3, 4)


COUNTS = np.ones((1, 2, 3), np.uint16)


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
        ({"T": np.full((1, 1, 2048), 2**53)}, r"1.84467e\+19 tokens in all, at most 2\^53"),
        ({"T": COUNTS, "topk": np.int32(9)}, "top-k is 9, must be 1..3"),
        ({"T": COUNTS, "topk": np.arange(2)}, "topk must be one number"),
        ({"T": COUNTS, "tokens": np.arange(2)}, r"tokens must be \(1,\), got \(2,\)"),
        (
            {"T": np.full((1, 2, 3), 5), "tokens": np.array([4])},
            "1 steps have .* more counts than tokens.* step 0 has 4 tokens and 5 counts",
        ),
        (
            {"T": np.full((1, 2, 3), 4096, np.float16)},
            "T holds .*, counts of type float16 are 0..2048",
        ),
        (
            {"T": COUNTS, "tokens": np.array([2]), "topk": np.int32(2)},
            r"2 \(step, layer\) sums .* counts 3, 2 tokens x 2 = 4",
        ),
        ({"T": COUNTS, "S": np.ones((1, 2, 3), np.uint16)}, r"\(1, ranks, 2, 3\)"),
        ({"T": COUNTS, "S": np.ones((1, 0, 2, 3))}, r"ranks, 2, 3\), got \(1, 0, 2, 3\)"),
        (
            {"T": COUNTS, "S": np.ones((1, 2, 2, 3), np.uint16)},
            "6 source counts do not sum to the counts, first: step 0 layer 0 expert 0: 2 against 1",
        ),
        ({"T": COUNTS, "layer_ids": np.array([1, 1])}, r"must rise .* got 1, 1"),
        ({"T": COUNTS, "layer_ids": np.array([1])}, "1 layer ids for 2 layers"),
    ],
)
def test_malformed_npz_is_refused_with_the_numbers(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InvalidInput, match=f"bad.npz: .*{message}"):
        read_trace(tmp_path / "bad.npz")


@pytest.mark.parametrize(("dtype", "most"), [(np.float16, 2048), (np.float32, 2**30)])
def test_floats_are_read_where_they_hold_whole_counts(tmp_path, dtype, most):
    np.savez(tmp_path / "total.npz", T=np.full((1, 2, 3), most, dtype))
    assert (read_trace(tmp_path / "total.npz").counts == most).all()


def test_pickles_are_never_opened(tmp_path):
    np.savez(tmp_path / "bad.npz", T=np.array([object()]))
    with pytest.raises(InvalidInput, match="allow_pickle=False"):
        read_trace(tmp_path / "bad.npz")


def test_a_decompression_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("evenkeel_moe.formats.array_files.MAX_ARRAY_BYTES", 1000)
    np.savez_compressed(tmp_path / "bomb.npz", T=np.zeros((10, 10, 10), np.int64))
    with pytest.raises(InvalidInput, match="T unpacks from .* to 8128 bytes, at most 1000"):
        read_trace(tmp_path / "bomb.npz")


def test_a_path_that_is_not_a_trace_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="no such file or folder"):
        read_trace(tmp_path / "absent.npz")
    with pytest.raises(InvalidInput, match=r"neither meta_info.json nor \*.pt"):
        read_trace(tmp_path)
    (tmp_path / "t.csv").write_text("1,2")
    with pytest.raises(InvalidInput, match=r"not \*.csv"):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize("header", [b"junk", b"(((", b"{'descr': '''x"])
def test_a_zip_file_that_is_not_npz_is_refused(tmp_path, header):
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        size = len(header).to_bytes(2, "little")
        archive.writestr("T.npy", b"\x93NUMPY\x01\x00" + size + header)
    with pytest.raises(InvalidInput, match="holds an array that cannot be read"):
        read_trace(tmp_path / "t.npz")


def test_a_file_whose_packed_data_is_damaged_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("T.npy", b"\x93NUMPY" * 100)
    content = bytearray((tmp_path / "t.npz").read_bytes())
    content[39] = 0xFF  # the first byte of the settings of LZMA
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(InvalidInput, match="not a readable npz file"):
        read_trace(tmp_path / "t.npz")


PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


def test_the_page_names_every_finding():
    section = PAGE.read_text(encoding="utf-8").split("## What is checked")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(FindingCode)
