"""Rows that fill arrays up, tokens without a route, and prompts that were computed once."""

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.finding import doubts

B, T, H, K, E = 12, 80, 4, 4, 32
PADDED = pytest.mark.fault(
    "a user of evenkeel offline", "padding that looked like routes was planned for as load"
)
LOST = pytest.mark.fault(
    "a user of evenkeel offline", "a plan was judged on the tokens of one rank of eight"
)
PROMPTS = pytest.mark.fault(
    "a user of evenkeel offline", "prompts from the prefix cache counted once for each sample"
)


def routed(seed=0, *, sequences=B, layers=H, top_k=K):
    """Return (B, T, H, K) distinct experts of each token and layer."""
    rng = np.random.default_rng(seed)
    heat = rng.gumbel(size=(sequences, T, layers, E)) + rng.normal(0, 0.5, (1, 1, layers, E))
    return np.argsort(-heat, axis=3)[..., :top_k].astype(np.int32)


def lengths(seed=1, sequences=B):
    """Return (B, T) True for the real tokens of sequences of several lengths."""
    length = np.random.default_rng(seed).integers(20, T, sequences)
    length[:2] = T, T - 1
    return np.arange(T)[None] < length[:, None]


def read(tmp_path, ids, **arrays):
    np.savez(tmp_path / "routes.npz", routed_experts=ids, num_experts=E, **arrays)
    return read_trace(tmp_path / "routes.npz")


def told(trace, code):
    """Return (severity, amount) of the findings of one code."""
    return [(str(each.severity), each.amount) for each in trace.findings if each.code == code]


FILLS = {
    "first experts": np.arange(K),
    "other experts": np.array([7, 3, 30, 11]),
    "last experts": np.arange(E - K, E),
    "others in each layer": np.random.default_rng(5).permutation(E)[: H * K].reshape(H, K),
    "negative": np.array(-1),
    "zeros": np.array(0),
}
"""The ids that a program writes where there is no token."""


@PADDED
@pytest.mark.parametrize("fill", [*FILLS, "on the left"])
def test_padding_is_never_load_however_it_is_written(tmp_path, fill):
    ids, real = routed(), lengths()
    ids[~real] = FILLS.get(fill, FILLS["first experts"])
    if fill == "on the left":
        for row, is_real in zip(ids, real, strict=True):
            row[:] = np.roll(row, int((~is_real).sum()), axis=0)
    trace = read(tmp_path, ids)
    assert trace.counts.sum() == real.sum() * H * K
    assert not doubts(trace.findings)
    assert told(trace, "padding") == [("note", f"{(~real).sum()} of {B * T} rows")]


@PADDED
def test_a_last_token_that_is_repeated_counts_once(tmp_path):
    ids, real = routed(), lengths()
    for row, is_real in zip(ids, real, strict=True):
        row[~is_real] = row[is_real][-1]
    trace = read(tmp_path, ids)
    # Of a short sequence, a few repeated rows cannot be told from text.
    assert 0 <= trace.counts.sum() // (H * K) - real.sum() < 8 * 2
    assert told(trace, "padding")[0][0] == "note"


@PADDED
def test_padding_of_a_single_sequence_is_in_doubt(tmp_path):
    ids = routed(sequences=1)
    ids[0, 50:] = np.random.default_rng(5).permutation(E)[: H * K].reshape(H, K)
    trace = read(tmp_path, ids)
    assert [each.code for each in doubts(trace.findings)] == ["padding"]
    assert "attention_mask" in trace.findings[0].words


@pytest.mark.parametrize("seed", range(5))
def test_text_is_no_padding(tmp_path, seed):
    ids = routed(seed)
    ids[0, 30:34] = ids[0, 30]  # a token that is repeated in the middle of a text
    ids[1, -3:] = ids[1, -3]
    trace = read(tmp_path, ids)
    assert trace.counts.sum() == B * T * H * K
    assert [str(each.code) for each in trace.findings] == ["assumed"]


@PADDED
def test_rows_that_are_all_alike_are_no_routes(tmp_path):
    ids = routed()
    ids[:] = ids[:, :, :1]
    with pytest.raises(InvalidInput, match=f"{B * T} of {B * T} rows name the same experts"):
        read(tmp_path, ids)


@PADDED
@pytest.mark.parametrize(("rows", "severity"), [(1, "note"), (B * T // 20, "doubt")])
def test_a_row_that_lacks_some_experts_is_left_out_with_a_count(tmp_path, rows, severity):
    ids = routed()
    ids.reshape(-1, H, K)[:rows, 1, 2:] = -1
    trace = read(tmp_path, ids)
    assert trace.counts.sum() == (B * T * H - rows) * K
    among = f"{rows} of {B * T * H} rows of a token in a layer"
    assert (severity, among) in told(trace, "routes_missing")


@LOST
@pytest.mark.parametrize(
    ("where", "fill"),
    [
        (np.s_[2:], "zeros"),
        (np.s_[:, T // 8 :], "zeros"),
        (np.s_[2:], "first experts"),
        (np.s_[2:], "negative"),
    ],
)
def test_tokens_that_the_mask_calls_real_and_that_have_no_route_are_counted(tmp_path, where, fill):
    ids = routed()
    before = ids.copy()
    ids[where] = FILLS[fill]
    missing = int((ids != before).any(axis=(2, 3)).sum())
    trace = read(tmp_path, ids, attention_mask=np.ones((B, T), np.int64))
    assert told(trace, "routes_missing") == [("doubt", f"{missing} of {B * T} tokens")]


@LOST
@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_that_is_lost_in_some_sequences_is_named(tmp_path, masked):
    ids = routed()
    ids[6:, :, 2] = 0
    mask = {"attention_mask": np.ones((B, T), np.int64)} if masked else {}
    trace = read(tmp_path, ids, **mask)
    assert ("doubt", f"{6 * T} of {B * T} tokens") in told(trace, "routes_missing")
    assert any("none in layer 2" in each.words for each in trace.findings)


@LOST
def test_with_one_expert_for_each_token_lost_tokens_are_found_too(tmp_path):
    ids = routed(top_k=1)
    ids[3:] = 0
    trace = read(tmp_path, ids, attention_mask=np.ones((B, T), np.int64))
    ((severity, amount),) = told(trace, "routes_missing")
    assert severity == "doubt"
    assert abs(int(amount.split()[0]) - (B - 3) * T) < 0.01 * B * T


def test_the_last_token_of_a_sequence_has_no_route(tmp_path):
    ids = routed()
    ids[:, -1] = 0
    trace = read(tmp_path, ids, attention_mask=np.ones((B, T), np.int64))
    assert told(trace, "routes_missing") == []


def groups_of(sizes, prompt):
    """Return sequences in groups that begin with the same tokens, and the tokens computed."""
    ids, at = routed(3, sequences=sum(sizes)), 0
    for size, length in zip(sizes, prompt, strict=True):
        ids[at : at + size, :length] = ids[at, :length]
        at += size
    computed = sum(T * size - (size - 1) * part for size, part in zip(sizes, prompt, strict=True))
    return ids, computed


@PROMPTS
@pytest.mark.parametrize(
    ("sizes", "prompt"),
    [((4, 4, 4), (30, 30, 30)), ((2, 5, 1, 8), (10, 50, 20, 31)), ((12,), (24,))],
)
@pytest.mark.parametrize("left", [0, 9])
def test_a_prompt_counts_once_for_all_its_samples(tmp_path, sizes, prompt, left):
    ids, computed = groups_of(sizes, prompt)
    mask = np.ones(ids.shape[:2], np.int64)
    if left:
        ids, mask = np.roll(ids, left, axis=1), np.roll(mask, left, axis=1)
        ids[:, :left], mask[:, :left] = 0, 0
        computed -= left * len(ids)
    trace = read(tmp_path, ids, attention_mask=mask)
    assert trace.counts.sum() == computed * H * K
    repeated = int(mask.sum()) - computed
    ((severity, amount),) = told(trace, "repeated_prompts")
    assert severity == "note" and amount.startswith(f"{repeated} of {mask.sum()} tokens")


@PROMPTS
def test_a_prompt_within_a_prompt_counts_once(tmp_path):
    ids = routed(4, sequences=6)
    ids[:, :20] = ids[0, :20]  # what all have in common
    ids[3:, 20:40] = ids[3, 20:40]  # and what the second half has in common beside that
    trace = read(tmp_path, ids)
    assert trace.counts.sum() == (6 * T - 5 * 20 - 2 * 20) * H * K


def test_a_beginning_that_chance_can_make_alike_keeps_its_load(tmp_path):
    ids = routed(5, layers=1, top_k=2)
    ids[:, :2] = ids[0, :2]
    trace = read(tmp_path, ids)
    assert trace.counts.sum() == B * T * 2
    few = np.zeros((30, T, 1, 2), np.int32)  # two experts, so that many tokens are alike
    few[..., 1] = 1
    few[np.random.default_rng(0).random(few.shape[:3]) < 0.5] = [1, 0]
    assert read(tmp_path, few).counts.sum() == 30 * T * 2


def ones(seed=0, *, layers=H, experts=E, sequences=B):
    """Return (B, T, H, 1) routes of a model that chooses one expert, of which some are hot."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(experts, 1.0), layers)
    rows = [rng.choice(experts, (sequences, T), p=share[layer]) for layer in range(layers)]
    return np.stack(rows, axis=2)[..., None].astype(np.int32)


ALL = np.ones((B, T), np.int64)
ONE = pytest.mark.fault(
    "a user of a model that chooses one expert for each token",
    "the ids that a program wrote for lost routes and dense layers were load",
)


@ONE
@pytest.mark.parametrize("fill", [0, 9, E - 1])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("where", [np.s_[B // 3 :], np.s_[:, 30:60], np.s_[::2, 8:]])
def test_ids_that_were_written_for_lost_routes_are_counted_as_missing(
    tmp_path, fill, layers, where
):
    ids, kept = ones(layers=layers), np.ones((B, T), bool)
    kept[where] = False
    ids[~kept] = fill
    trace = read(tmp_path, ids, attention_mask=ALL)
    assert abs(trace.counts.sum() - kept.sum() * layers) < 0.02 * ids.size
    (severity, amount), *_ = told(trace, "routes_missing")
    assert severity == "doubt"
    assert abs(int(amount.split()[0]) - (~kept).sum()) < 0.02 * B * T


@ONE
@pytest.mark.parametrize("fill", [0, 9, -1])
def test_a_layer_whose_ids_are_lost_in_some_sequences_is_named(tmp_path, fill):
    ids = ones()
    ids[4:, :, 2] = fill
    trace = read(tmp_path, ids, attention_mask=ALL)
    load = np.bincount(ids[:4, :, 2].reshape(-1), minlength=E)
    assert np.abs(trace.counts[:, 2].sum(axis=0) - load).sum() < 0.02 * B * T
    assert any("none in layer 2" in each.words for each in doubts(trace.findings))


@ONE
@pytest.mark.parametrize("dense", [[0], [0, 2], [1, 3]])
def test_dense_layers_that_hold_one_id_are_no_load(tmp_path, dense):
    ids, real = ones(), lengths()
    before = ids.copy()
    ids[:, :, dense] = 0
    trace = read(tmp_path, ids, attention_mask=real)
    busy = [layer for layer in range(H) if layer not in dense]
    assert trace.layer_ids == tuple(busy)
    for row, layer in enumerate(busy):
        load = np.bincount(before[real][:, layer, 0], minlength=E)
        assert trace.counts[:, row].sum(axis=0).tolist() == load.tolist()


@ONE
@pytest.mark.parametrize("experts", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_an_expert_that_is_hot_keeps_its_load(tmp_path, experts, seed):
    ids = ones(seed, experts=experts, sequences=40)
    trace = read(tmp_path, ids, attention_mask=np.ones((40, T)))
    assert trace.counts.sum() == ids.size and told(trace, "routes_missing") == []


HOLES = pytest.mark.fault(
    "a user of evenkeel offline", "lost routes in the middle of sequences were load, or not counted"
)


@HOLES
@pytest.mark.parametrize("fill", [name for name in FILLS if name != "others in each layer"])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("dense", [0, 1])
def test_routes_that_are_lost_within_sequences_are_counted_as_missing(
    tmp_path, fill, layers, dense
):
    ids, kept = routed(layers=layers), np.ones((B, T), bool)
    kept[:, 20:50] = False
    ids[~kept] = FILLS[fill]
    ids = np.concatenate([np.zeros((B, T, dense, K), np.int32), ids], axis=2)
    trace = read(tmp_path, ids, attention_mask=ALL)
    assert trace.counts.sum() == kept.sum() * layers * K
    assert told(trace, "routes_missing") == [("doubt", f"{30 * B} of {B * T} tokens")]


@HOLES
@pytest.mark.parametrize("fill", ["zeros", "negative"])
@pytest.mark.parametrize("where", [np.s_[5:], np.s_[:, 20:50]])
def test_rows_without_a_route_are_in_doubt_also_without_a_mask(tmp_path, fill, where):
    ids, kept = routed(), np.ones((B, T), bool)
    kept[where] = False
    ids[~kept] = FILLS[fill]
    trace = read(tmp_path, ids)
    assert trace.counts.sum() == kept.sum() * H * K
    assert told(trace, "routes_missing") == [("doubt", f"{(~kept).sum()} of {B * T} tokens")]
    assert any("add attention_mask" in each.words for each in doubts(trace.findings))


@HOLES
def test_a_token_that_really_repeats_is_load_where_the_mask_says_so(tmp_path):
    ids = routed()
    ids[3, 40:] = ids[3, 40]
    ids[5, 10:30] = ids[5, 10]
    trace = read(tmp_path, ids, attention_mask=ALL)
    assert trace.counts.sum() == B * T * H * K
    assert [str(each.code) for each in trace.findings] == ["assumed"]


@HOLES
def test_a_few_repeated_tokens_are_no_doubt(tmp_path):
    ids = routed(sequences=48)
    ids[3, -12:] = ids[3, -12]
    trace = read(tmp_path, ids)
    assert told(trace, "padding") == [("note", f"11 of {48 * T} rows")]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.where(lengths(), 0.0, -1e9), r"attention_mask holds -1000000000\.0\.\.0\.0"),
        (np.where(lengths(), 0.0, -np.inf), "attention_mask holds .* not finite"),
        (np.where(lengths(), 1.0, np.nan), "attention_mask holds .* not finite"),
        (np.where(lengths(), "1", "0"), "attention_mask must hold numbers, holds <U1"),
    ],
    ids=["added to scores", "infinite", "NaN", "text"],
)
def test_a_mask_that_does_not_count_tokens_is_refused(tmp_path, mask, words):
    with pytest.raises(InvalidInput, match=words):
        read(tmp_path, routed(), attention_mask=mask)
