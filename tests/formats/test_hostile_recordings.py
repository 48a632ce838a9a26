"""Recordings whose few bytes claim much, or that are cut short."""

import io
import json
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from safetensors.numpy import save_file

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import read_trace

COUNTS = np.random.default_rng(1).poisson(5, (6, 2, 4))
ROUTES = np.array([[[[0, 1], [2, 3]], [[1, 2], [3, 0]]]])

fault = pytest.mark.fault(
    "a user who got a recording from elsewhere",
    "a few bytes led to a traceback, tens of seconds or gigabytes",
)


def refusal(path):
    """Return the words with which a recording is refused, within bounds of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput) as caught:
            read_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    return str(caught.value)


def add_array(archive, name, shape, dtype, data):
    """Add an array of a claimed shape and the data that there is of it to an npz file."""
    header = io.BytesIO()
    fields = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(header, fields)
    archive.writestr(f"{name}.npy", header.getvalue() + data)


@fault
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"num_experts": np.array(2**40)}, "1099511627776 experts in a layer, at most 65536"),
        ({"num_experts": np.array(2**30)}, "1073741824 experts in a layer, at most 65536"),
        ({"routed_experts": ROUTES + 2**30}, "1073741828 experts in a layer"),
        ({"routed_experts": ROUTES + 2**60}, "1152921504606846980 experts in a layer"),
        ({"routed_experts": ROUTES.astype(np.uint64) - np.uint64(1)}, "18446744073709551616 exp"),
    ],
)
@pytest.mark.parametrize("suffix", ["npz", "pt"])
def test_more_experts_than_any_model_has_are_refused(tmp_path, arrays, words, suffix):
    arrays = {"routed_experts": ROUTES, **arrays}
    path = tmp_path / f"t.{suffix}"
    if suffix == "npz":
        np.savez(path, **arrays)
    else:
        tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
        torch.save(tensors, path)
    assert words in refusal(path)


@fault
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [
        ("T", (128, 1024, 1024), "|u1", "T unpacks from "),
        ("T", (16, 1024, 1024), "<i8", "T unpacks from "),
        ("routed_experts", (1, 128, 1024, 1024), "|u1", "routed_experts unpacks from "),
        ("layer_ids", (20 << 20,), "|u1", "bytes of layer_ids: 2097"),
        ("findings", (5 << 20,), "<U1", "bytes of findings: 2097"),
    ],
)
def test_arrays_of_zeros_are_not_unpacked(tmp_path, name, shape, dtype, words):
    zeros = bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        add_array(archive, name, shape, dtype, zeros)
        if name in ("layer_ids", "findings"):
            add_array(archive, "T", COUNTS.shape, "<i8", COUNTS.astype(np.int64).tobytes())
    del zeros
    assert words in refusal(tmp_path / "t.npz")


@fault
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2**40, 2, 2), "<i8"), ((2**63, 2, 2), "<i8"), ((2, 2, 2), "<U99999999"), ((2, 2, 3), "|u1")],
)
def test_an_array_that_claims_more_than_there_is_is_refused(tmp_path, shape, dtype):
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        add_array(archive, "T", shape, dtype, b"")
    assert "T claims " in refusal(tmp_path / "t.npz")


def repeated(shape, strides, held=1):
    return torch.ones(held, dtype=torch.int32).as_strided(shape, strides)


def nested(depth):
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value] * 10
    return value


@fault
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (repeated((2**20, 2**20, 2**10), (0, 0, 0)), "1125899906842624, at most 536870912"),
        (repeated((2**9, 2**10, 2**10), (0, 0, 0)), "claims 2147483648 bytes, the file holds 4"),
        (repeated((2**9, 2**10, 2**10), (1, 1, 1), 3000), "claims 2147483648 bytes, the file h"),
        (torch.ones(2, 2, 2).to_sparse(), "is not an array"),
        (torch.ones(2, 2, 2, device="meta"), "is not an array"),
        (nested(9), "must hold numbers, is a list"),
        ("abc", "must hold numbers, is a str"),
    ],
)
def test_a_tensor_holds_what_it_claims(tmp_path, value, words):
    torch.save({"logical_count": value}, tmp_path / "t.pt")
    assert words in refusal(tmp_path / "t.pt")
    map_and_counts = {
        "last_physical_to_logical_map": value,
        "records": [{"forward_pass_id": 1, "rank": 0, "global_physical_count": value}],
    }
    folder = tmp_path / "passes"
    folder.mkdir()
    torch.save(map_and_counts, folder / "t.pt")
    assert words in refusal(folder)


def packed_again(path, change=lambda data: data, compression=zipfile.ZIP_STORED):
    """Write the members of a file of torch again, its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


@fault
def test_a_dump_of_torch_that_is_packed_or_has_a_long_pickle_is_not_unpacked(tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"logical_count": torch.zeros(80, 1024, 1024, dtype=torch.uint8)}, path)
    packed_again(path, compression=zipfile.ZIP_DEFLATED)
    assert "which torch never packs, unpacks from " in refusal(path)
    torch.save({"logical_count": torch.from_numpy(COUNTS)}, path)
    packed_again(path, lambda data: b"\x80\x02}" + b"]" * (17 << 20) + b".")
    assert "17825796 bytes beside its tensors, at most 16777216 are read" in refusal(path)


@fault
def test_a_dump_that_is_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"logical_count": torch.from_numpy(COUNTS)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("t/data.pkl")
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidInput, match="no archive as torch writes, or cut short"):
            read_trace(path)
    for cut in range(len(pickled)):
        path.write_bytes(whole)
        packed_again(path, lambda data, cut=cut: data[:cut])
        with pytest.raises(InvalidInput, match="torch cannot read it: "):
            read_trace(path)


def statistics(folder, tensors, experts=4):
    folder.mkdir(exist_ok=True)
    meta = {"num_experts": experts, "num_experts_per_token": 2}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    save_file(tensors, folder / "rank0.safetensors")
    return folder


@fault
@pytest.mark.parametrize("name", ["9" * 5000 + "_3", "01_3", "1_" + "9" * 30, "\uff11_3"])
def test_names_of_tensors_are_short_numbers(tmp_path, name):
    folder = statistics(tmp_path / "s", {name: np.ones(4, np.int32)})
    assert "is not named iteration_layer" in refusal(folder)


@fault
def test_statistics_that_are_cut_anywhere_or_claim_too_much_are_refused(tmp_path):
    one = {"1_3": np.ones(4, np.int32)}
    folder = statistics(tmp_path / "s", one, 2**40)
    assert "num_experts is 1099511627776, must be 1..65536" in refusal(folder)
    path = statistics(folder, one) / "rank0.safetensors"
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert "rank0.safetensors: not a readable safetensors file" in refusal(folder)
