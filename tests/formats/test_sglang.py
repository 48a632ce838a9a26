import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import read_trace, write_trace
from evenkeel_moe.model.finding import doubts
from tests.formats.samples import make_trace, said

torch = pytest.importorskip("torch")


def _stat(path, counts):
    more = {"rank": 0, "average_utilization_rate_over_window": None}
    torch.save({"logical_count": torch.from_numpy(counts.astype(np.int32)), **more}, path)
    return path


PLACED = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 2]])


def _at_random(key, rank):
    return torch.tensor(np.random.default_rng([key, rank]).integers(1, 9, (2, 4), np.int32))


def _passes(folder, rank, ids, counted=_at_random, placed=PLACED):
    """Write the per-pass dump of a rank, with `counted(key, rank)` in each pass."""
    records = [
        {"forward_pass_id": key, "rank": rank, "global_physical_count": counted(key, rank)}
        for key in ids
    ]
    content = {"records": records, "last_physical_to_logical_map": placed}
    torch.save(content, folder / f"{rank}.pt")


def test_sglang_rows_are_hidden_layers_and_dense_ones_are_found(tmp_path):
    counts = np.zeros((5, 4, 4), np.int32)
    counts[:, [1, 3]] = make_trace().counts
    path = _stat(tmp_path / "expert_distribution_recorder_1.0.pt", counts)
    trace = read_trace(path)
    assert trace.layer_ids == (1, 3)
    np.testing.assert_array_equal(trace.counts, make_trace().counts)
    assert {each.code: each.where for each in trace.findings} == {
        "idle_layers": "layer 2 of 4",
        "step_order": "",
        "leading_idle_layers": "layer 0 of 4",
    }
    cut = read_trace(path, first_moe_layer=2)
    assert cut.layer_ids == (2, 3)
    named = [each.where for each in doubts(cut.findings) if each.code == "left_out"]
    assert named == ["layer 1"]
    with pytest.raises(InvalidInput, match="first MoE layer 4 is outside the 4 hidden layers"):
        read_trace(path, first_moe_layer=4)


def test_sglang_dumps_of_another_kind_are_refused(tmp_path):
    for content, message in (
        ([1, 2], "holds a list, must be a mapping"),
        ({"records": []}, "has no logical_count, only: records; to read per-pass dumps, give"),
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


def test_sglang_per_pass_dumps_are_summed_over_ranks_and_mapped_to_logical(tmp_path):
    def counted(key, rank):
        physical = torch.zeros(2, 4, dtype=torch.int32)
        physical[:, 2 * rank : 2 * rank + 2] = key
        return physical

    for rank in range(2):
        _passes(tmp_path, rank, (12, 11), counted)
    trace = read_trace(tmp_path)
    np.testing.assert_array_equal(trace.counts[0], [[22, 11, 11], [11, 11, 22]])
    np.testing.assert_array_equal(trace.counts[1], [[24, 12, 12], [12, 12, 24]])
    _passes(tmp_path, 1, [12], counted)
    left = read_trace(tmp_path)
    np.testing.assert_array_equal(left.counts, trace.counts[1:])
    assert ("left_out", "1 of 2 passes; rank 1 has 1, rank 0 2") in said(left)
    _passes(tmp_path, 1, (12, 11), counted, placed=PLACED[:1])
    with pytest.raises(
        ShapeMismatch, match=r"1.pt: its map \(1, 4\) is not the map of the other files"
    ):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        (torch.tensor([[0, 2**40]]), f"has expert {2**40}, 2 slots cannot hold so many"),
        (torch.zeros((0, 2), dtype=torch.int64), r"must be \(layers, slots\), .* got \(0, 2\)"),
        (torch.zeros((2, 0), dtype=torch.int64), r"must be \(layers, slots\), .* got \(2, 0\)"),
    ],
)
def test_an_impossible_map_is_refused_before_memory_is_allocated(tmp_path, placed, message):
    _passes(tmp_path, 0, [1], lambda *_: torch.ones(placed.shape), placed)
    with pytest.raises(InvalidInput, match=f"0.pt: .*{message}"):
        read_trace(tmp_path)


STEPS = np.random.default_rng(3).multinomial(18, [1 / 4] * 4, (5, 2)).astype(np.int32)


def _ring(path, written_from, busy):
    """Write STEPS into a ring of 8 from a slot on; steps not in `busy` routed nothing."""
    ring = np.zeros((8, 2, 4), np.int32)
    for step in busy:
        ring[(written_from + step) % 8] = STEPS[step]
    _stat(path, ring)


@pytest.mark.parametrize("written_from", [0, 3])
def test_a_ring_is_read_as_stored_if_its_unwritten_part_lies_at_an_end(tmp_path, written_from):
    busy = [0, 1, 3, 4]
    _ring(tmp_path / "d.pt", written_from, busy)
    trace = read_trace(tmp_path / "d.pt")
    np.testing.assert_array_equal(trace.counts, STEPS[busy])
    assert said(trace) == [("left_out", "4 of 8 steps")]


@pytest.mark.parametrize("written_from", [4, 6, 7])
def test_a_ring_is_unrolled_from_its_only_empty_part_with_a_note(tmp_path, written_from):
    """A dump empties the ring and keeps the write position, so later steps may cross the end."""
    _ring(tmp_path / "d.pt", written_from, range(5))
    trace = read_trace(tmp_path / "d.pt")
    np.testing.assert_array_equal(trace.counts, STEPS)
    empty = f"slots {written_from - 3}..{written_from - 1}"
    assert said(trace) == [("left_out", "3 of 8 steps"), ("step_order", empty)]


@pytest.mark.parametrize(
    ("written_from", "busy", "stored", "places"),
    [(6, [0, 1, 3, 4], [3, 4, 0, 1], 2), (7, [0, 2, 4], [2, 4, 0], 3), (0, [0, 4], [0, 4], 2)],
)
def test_an_ambiguous_ring_is_read_as_stored_with_a_note(
    tmp_path, written_from, busy, stored, places
):
    _ring(tmp_path / "d.pt", written_from, busy)
    trace = read_trace(tmp_path / "d.pt")
    np.testing.assert_array_equal(trace.counts, STEPS[stored])
    assert said(trace)[1:] == [("step_order", f"empty in {places} places")]


def _routed(layers, steps=40):
    shares = np.random.default_rng(2).dirichlet(np.full(16, 2.0), layers)
    rng = np.random.default_rng(3)
    return np.array([[rng.multinomial(200, share) for share in shares] for _ in range(steps)])


BROKEN = pytest.mark.fault(
    "a user of evenkeel offline", "a recorder that counted wrongly led to a confident verdict"
)


@BROKEN
def test_a_dump_with_all_counts_in_one_row_is_refused_unless_it_is_accepted(tmp_path):
    counts = _routed(12)
    counts = np.concatenate([counts.sum(axis=1, keepdims=True), np.zeros_like(counts[:, 1:])], 1)
    path = _stat(tmp_path / "d.pt", counts)
    with pytest.raises(InvalidInput, match=r"layers 1\.\.11, 11 of 12; only layer 0 did"):
        read_trace(path)
    assert read_trace(path, accept=["mostly_idle_layers"]).num_layers == 1
    with pytest.raises(InvalidInput, match="first MoE layer 12 is outside the 12 hidden layers"):
        read_trace(path, first_moe_layer=12)


@BROKEN
def test_the_rows_of_one_stage_of_two_are_in_doubt_and_keep_the_size_of_the_model(tmp_path):
    counts = _routed(12)
    counts[:, 6:] = 0
    trace = read_trace(_stat(tmp_path / "d.pt", counts))
    assert (trace.num_layers, trace.num_hidden_layers) == (6, 12)
    assert [each.code for each in doubts(trace.findings)] == ["idle_layers"]
    write_trace(tmp_path / "t.npz", trace)
    again = read_trace(tmp_path / "t.npz")
    assert (again.findings, again.num_hidden_layers) == (trace.findings, 12)


@BROKEN
def test_layers_that_a_table_routes_are_named_with_the_option_that_keeps_them(tmp_path):
    counts = _routed(12)
    counts[:, :3] = 0
    path = _stat(tmp_path / "d.pt", counts)
    assert any("layers 0..2 of 12. If" in each.words for each in read_trace(path).findings)
    kept = read_trace(path, first_moe_layer=0)
    assert kept.layer_ids == tuple(range(12))
    assert [(each.code, each.where) for each in doubts(kept.findings)] == [
        ("idle_layers", "layers 0..2")
    ]


UNEVEN = pytest.mark.fault(
    "a user of evenkeel offline", "a recording that ended unevenly was refused whole"
)


@UNEVEN
@pytest.mark.parametrize(
    ("lost", "where"),
    [
        ({2: {19}, 3: {19}}, "pass 19"),
        ({3: {7}}, "pass 7"),
        ({1: {0, 1}, 3: {18, 19}}, "passes 0..1, 18..19"),
        ({3: set(range(1, 20, 2))}, "passes 1, 3, 5, 7, 9, 11 and 4 more"),
    ],
)
def test_passes_that_some_ranks_lack_are_left_out_by_name(tmp_path, lost, where):
    for rank in range(4):
        _passes(tmp_path, rank, [key for key in range(20) if key not in lost.get(rank, ())])
    trace = read_trace(tmp_path)
    missing = set().union(*lost.values())
    assert trace.num_steps == 20 - len(missing)
    assert where in [each.where for each in trace.findings if each.code == "left_out"]


@UNEVEN
def test_a_recording_of_which_too_little_is_whole_is_refused_with_the_rank(tmp_path):
    for rank in range(4):
        _passes(tmp_path, rank, range(5 if rank == 2 else 20))
    with pytest.raises(InvalidInput, match=r"passes 5\.\.19, 15 of 20 passes; rank 2 has 5"):
        read_trace(tmp_path)


@pytest.mark.fault("a user of evenkeel offline", "the files of one machine of two were the whole")
def test_files_of_some_ranks_are_said_and_in_doubt_where_ranks_are_missing(tmp_path):
    for rank in (0, 1):
        _passes(tmp_path, rank, range(20))
    trace = read_trace(tmp_path)
    assert trace.rank_files == 2
    assert "ranks 0..1" in [each.where for each in trace.findings]
    _passes(tmp_path, 3, range(20))
    assert "rank 2" in [each.where for each in doubts(read_trace(tmp_path).findings)]


TOTALS = pytest.mark.fault("a user of evenkeel offline", "the totals of one rank of four were all")


def _totals(folder, rank, counts, *, ranks=4):
    content = {"ep_rank": rank, "ep_size": ranks, "logical_count": torch.from_numpy(counts)}
    torch.save(content, folder / f"p-TP{rank}.expert-load.pt")
    return folder / f"p-TP{rank}.expert-load.pt"


@TOTALS
def test_totals_of_all_ranks_add_up_and_those_of_some_are_refused(tmp_path):
    counts = _routed(3, steps=4)
    paths = [_totals(tmp_path, rank, counts[rank]) for rank in range(4)]
    trace = read_trace(tmp_path)
    np.testing.assert_array_equal(trace.counts, counts.sum(axis=0, keepdims=True))
    assert "no verdict is possible" in " ".join(each.what for each in trace.findings)
    with pytest.raises(InvalidInput, match=r"ranks 0, 2\.\.3, 3 of 4 ranks; read: rank 1\. Give"):
        read_trace(paths[1])
    assert read_trace(paths[1], accept=["parts_missing"]).counts.sum() == counts[1].sum()
    paths[2].unlink()
    with pytest.raises(InvalidInput, match="totals of some ranks are missing: rank 2, 1 of 4"):
        read_trace(tmp_path)


@TOTALS
def test_totals_that_do_not_fit_each_other_are_refused(tmp_path):
    counts = _routed(3, steps=2)
    _totals(tmp_path, 0, counts[0], ranks=2)
    path = _totals(tmp_path, 1, counts[1], ranks=3)
    with pytest.raises(ShapeMismatch, match="is of 3 ranks, other files are of 2"):
        read_trace(tmp_path)
    _totals(tmp_path, 0, counts[0], ranks=2).rename(path)
    with pytest.raises(InvalidInput, match="no file|is of rank 0"):
        _totals(tmp_path, 0, counts[0], ranks=2)
        read_trace(tmp_path)
    path.unlink()
    assert read_trace(_totals(tmp_path, 0, counts[0], ranks=1)).counts.sum() == counts[0].sum()
