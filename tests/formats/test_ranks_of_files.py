"""Numbers of ranks that files name, without trust in them."""

import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import read_trace
from evenkeel_moe.formats.rank_files import RankFiles
from evenkeel_moe.formats.reading import read_text
from evenkeel_moe.formats.recording import RecordedLoad, write_recorded

MANY = 2**31 - 1


def sglang(folder):
    record = {"forward_pass_id": 1, "rank": MANY - 1, "global_physical_count": torch.ones(1, 2)}
    held = torch.tensor([[0, 1]])
    torch.save({"records": [record], "last_physical_to_logical_map": held}, folder / "r.pt")


def trtllm(folder):
    (folder / "meta_info.json").write_text('{"num_experts": 2, "num_experts_per_token": 1}')
    save_file({"1_0": np.ones(2, np.int64)}, folder / f"rank{MANY - 1}.safetensors")


def ours(folder):
    load = RecordedLoad(0, MANY, 1, np.arange(2), np.ones((2, 1, 2), np.int64), 1e9)
    write_recorded(folder, "a1b2c3d4", load)


def totals(folder):
    content = {"ep_rank": 0, "ep_size": MANY, "logical_count": torch.ones(1, 2)}
    torch.save(content, folder / "p-TP0.pt")


@pytest.mark.fault(
    "whoever reads a damaged recording", "a number of ranks in a file took all memory"
)
@pytest.mark.parametrize("write", [sglang, trtllm, ours, totals])
def test_a_number_of_ranks_beyond_all_groups_is_refused_before_memory_is_asked_for(tmp_path, write):
    write(tmp_path)
    with pytest.raises(InvalidInput, match=f"is of {MANY} ranks, at most 65536 are read"):
        read_trace(tmp_path)


@pytest.mark.fault(
    "whoever reads the recording of a large group", "the counts of all ranks were in memory at once"
)
def test_the_files_of_ranks_are_read_one_at_a_time(tmp_path):
    ranks, steps = 32, 64
    counts = np.ones((steps, 8, 64), np.int64)
    for rank in range(ranks):
        load = RecordedLoad(rank, ranks, 2, np.arange(steps), counts, 1e9)
        write_recorded(tmp_path, "a1b2c3d4", load)
    read_trace(tmp_path)  # Imports and caches are no part of it.
    tracemalloc.start()
    try:
        trace = read_trace(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (trace.counts == ranks).all()
    assert most < 12 * counts.nbytes


@pytest.mark.fault(
    "whoever reads the folder of an engine that still records",
    "a file that the engine deleted after the folder was listed counted as damaged",
)
def test_a_file_that_is_deleted_before_it_is_read_is_not_damaged(tmp_path):
    paths = [tmp_path / name for name in ("oldest", "damaged", "a", "b", "c")]
    for path in paths[1:]:
        path.write_bytes(b"\xff" if path.name == "damaged" else b"text")
    files = RankFiles(paths, read_text)
    assert [path.name for path, _ in files] == ["a", "b", "c"]
    (doubt,) = files.damaged()
    assert (doubt.where, doubt.amount.split(";")[0]) == ("damaged", "1 of 4 files")
