import math
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.kv_promise import KvHistory, KvReport
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory, kv_tradeoff
from evenkeel_moe.planning.decision.replica_levels import (
    CraftFactors,
    CraftLevel,
    LevelInputs,
    LevelPart,
    Redundancy,
    ReplicaLevel,
    compare_levels,
)
from evenkeel_moe.planning.problem.token_split import SplitModel

KV = KvMemory(bytes_per_token=10, free_bytes=10_000)
"""1000 tokens."""


def level(replicas, gain, extra):
    return ReplicaLevel(replicas, gain, gain, gain, None, extra, None, 0.9)


def comparison(*levels, craft=(), moe_share=None):
    return Redundancy(2, 2, levels, 3, tuple(craft), None, None, moe_share)


NOW = level(2, 0.0, 0)


def test_goodput_is_the_batch_that_fits_over_the_time_of_a_step():
    """1000 of 10,000 bytes: 9 of 10 sequences fit. Half of a step is 20 % shorter."""
    found = kv_tradeoff(comparison(NOW, level(4, 0.2, 1000)), KV, 100, 0.5)
    now, more = found.rows
    assert (now.present, now.kv_tokens_lost, now.sequences, now.goodput_lower) == (True, 0, 10, 0.0)
    assert (more.kv_tokens_lost, more.kv_tokens, more.sequences) == (100, 900, 9)
    assert more.goodput_lower == more.goodput_upper == pytest.approx(0.9 / 0.9 - 1)
    assert more.replicas == 12


def test_an_unknown_moe_share_gives_the_interval_of_all_shares():
    found = kv_tradeoff(comparison(NOW, level(4, 0.2, 1000)), KV, 100)
    assert found.rows[1].goodput_lower == pytest.approx(0.9 - 1)
    assert found.rows[1].goodput_upper == pytest.approx(0.9 / 0.8 - 1)
    told = kv_tradeoff(comparison(NOW, level(4, 0.2, 1000), moe_share=0.5), KV, 100)
    assert told.moe_share == 0.5
    assert kv_tradeoff(comparison(NOW, moe_share=0.5), KV, 100, 0.1).moe_share == 0.1


def test_only_whole_sequences_fit_and_without_a_length_tokens_are_compared():
    lost = level(4, 0.0, 10)
    whole = kv_tradeoff(comparison(NOW, lost), KV, 1000, 1.0).rows[1]
    assert (whole.sequences, whole.goodput_lower) == (0, -1.0)
    tokens = kv_tradeoff(comparison(NOW, lost), KV, None, 1.0).rows[1]
    assert tokens.sequences is None
    assert tokens.goodput_lower == pytest.approx(-0.001)


def test_replicas_that_take_the_whole_cache_leave_no_token():
    row = kv_tradeoff(comparison(NOW, level(4, 0.5, 20_000)), KV, 100, 1.0).rows[1]
    assert (row.kv_tokens, row.kv_tokens_lost, row.sequences) == (0, 1000, 0)
    assert row.goodput_upper == -1.0


def test_what_is_not_told_is_unknown():
    found = kv_tradeoff(comparison(NOW, level(4, 0.2, 1000)), None, 100)
    for row in found.rows:
        assert (row.kv_tokens_lost, row.kv_tokens, row.sequences) == (None, None, None)
        assert (row.goodput_lower, row.goodput_upper) == (None, None)
    assert "unknown" in found.words
    sizeless = kv_tradeoff(comparison(level(2, 0.0, None), level(4, 0.1, None)), KV, 100)
    assert "the size of an expert is not known" in sizeless.words
    assert sizeless.rows[1].kv_tokens is None
    unscored = kv_tradeoff(comparison(level(2, math.nan, 0)), KV, 100)
    assert unscored.rows[0].goodput_lower is None
    small = kv_tradeoff(comparison(NOW), KV, 1001)
    assert "the present KV cache of 1000 tokens holds no sequence" in small.words


def test_the_sentence_names_the_best_level_with_its_kv_cache():
    craft = CraftLevel(1, 4, 2, 0.1, 0.1, 0.1, -1000, True, 0.95)
    levels = replace(comparison(NOW, level(4, 0.2, 5000), craft=[craft]), advised=4)
    found = kv_tradeoff(levels, KV, 100, 0.5)
    assert found.rows[2].rule == "craft"
    assert found.words == (
        "If the KV cache does not limit the batch, take 4 extra replicas in every layer; if it"
        " does, take CRAFT with R = 1. That has the highest estimated goodput: +15.8% against the"
        " present number, with MoE time as 50% of a step; a rank's KV cache holds 100 tokens more,"
        " and 11 sequences fit a rank."
    )
    kept = kv_tradeoff(comparison(NOW, level(4, 0.2, 5000)), KV, 100)
    assert kept.words == (
        "Keep 2 extra replicas in every layer, whether or not the KV cache limits the batch. No"
        " other number of replicas has a higher estimated goodput for sure, whatever part of a step"
        " is MoE time."
    )


def test_the_advice_for_a_batch_that_the_kv_cache_limits_may_be_the_same_or_unknown():
    advised = replace(comparison(NOW, level(4, 0.2, 5000), level(1, 0.1, -1000)), advised=4)
    limited = kv_tradeoff(advised, KV, 100).words
    assert limited.startswith(
        "If the KV cache does not limit the batch, take 4 extra replicas in every layer; if it"
        " does, take 1 in every layer. "
    )
    both = kv_tradeoff(replace(advised, advised=1), KV, 100).words
    assert both.startswith(
        "Take 1 extra replica in every layer, whether or not the KV cache limits the batch. "
    )
    present = kv_tradeoff(replace(comparison(NOW, level(4, 0.2, 5000)), advised=4), KV, 100).words
    assert "; if it does, keep 2 in every layer. No other" in present
    unknown = kv_tradeoff(advised, None).words
    assert "layer; if it does, the best number is unknown, as bytes per KV token" in unknown


def craft_words(*factors):
    known = CraftFactors(*factors) if factors else None
    return kv_tradeoff(replace(comparison(NOW), craft_factors=known), None).craft_words


def test_the_words_about_craft_say_its_budget_in_plain_words_and_advise_nothing():
    words = craft_words(1, 4, 16)
    assert words.startswith("CRAFT gives each layer its own number of extra replicas, so it needs")
    assert "Balance gains much up to R = 4, and little beyond it. R = 1 gains most for" in words
    assert words.endswith("the free memory holds R = 16.")
    assert craft_words(1, 4, None).endswith("how many fit in the free memory is unknown.")
    assert craft_words(0, 1, 16).endswith("so R = 0 is enough.")
    assert craft_words() == "The number of replicas that CRAFT would choose is unknown."
    assert "dvise" not in words and "rule" not in words


def test_the_budget_that_fits_is_told_if_more_would_gain_balance():
    words = craft_words(1, 4, 2)
    assert "Balance gains much up to R = 4" in words
    assert words.endswith("the free memory holds R = 2.")


# --- kv promise -----------------------------------------------------------------------------------


FOUR = ModelShape(2, 12, 4, 4, 2, 100)
"""4 slots on each of 4 ranks, so 4 replicas in each of 2 layers."""
THREE, FIVE = replace(FOUR, slots_per_rank=3), replace(FOUR, slots_per_rank=5)
EIGHT_RANKS = replace(FOUR, num_ranks=8, slots_per_rank=2)
CACHE = KvMemory(bytes_per_token=10, free_bytes=1000)
AT_FOUR = KvReport(FOUR, CACHE)


@pytest.mark.parametrize(
    "shape, told, promised, reported, ratio",
    [
        (FIVE, KvMemory(10, 760), 80, 76, 0.95),
        (THREE, KvMemory(10, 1200), 120, 120, 1.0),
        (FIVE, KvMemory(20, 800), 80, 40, 0.5),
        (FIVE, None, 80, None, None),
        (replace(FOUR, slots_per_rank=12), KvMemory(10, 0), 0, 0, None),
        (EIGHT_RANKS, KvMemory(10, 1400), 140, 140, 1.0),
    ],
)
def test_the_bytes_of_slots_are_given_to_the_cache_or_taken_from_it(
    shape, told, promised, reported, ratio
):
    found = KvHistory(AT_FOUR).promise(shape, told)
    assert found is not None
    assert (found.promised_tokens, found.reported_tokens, found.ratio) == (
        promised,
        reported,
        ratio,
    )
    assert (found.slots_per_rank_before, found.slots_per_rank) == (4, shape.slots_per_rank)


def test_the_promise_is_what_the_recommendation_said_of_that_number_of_replicas():
    load = np.random.default_rng(1).integers(1, 50, (40, 2, 12))
    part = LevelPart(load[:20], load[20:], SplitModel(DispatchModel.EVEN, Topology.single_node(4)))
    levels = compare_levels(LevelInputs(FOUR, Topology.single_node(4), CostModel(), (part,)))
    rows = {row.level: row for row in kv_tradeoff(levels, CACHE).rows if row.rule == "uniform"}
    for slots, replicas in ((3, 0), (5, 8)):
        shape = replace(FOUR, slots_per_rank=slots)
        found = KvHistory(AT_FOUR).promise(shape, None)
        assert found is not None
        assert found.promised_tokens == rows[replicas].kv_tokens


@pytest.mark.parametrize(
    "shape",
    [
        FOUR,
        replace(FIVE, num_layers=3),
        replace(FIVE, num_logical_experts=10),
        replace(FIVE, bytes_per_expert=99),
        replace(FIVE, bytes_per_expert=0),
        replace(FIVE, pool_slots_per_rank=10),
    ],
)
def test_nothing_was_promised_to_the_same_slots_or_another_model(shape):
    assert KvHistory(AT_FOUR).promise(shape, CACHE) is None
    assert KvHistory(AT_FOUR).with_report(KvReport(shape, CACHE)).promise(shape, CACHE) is None
    assert KvHistory().promise(shape, CACHE) is None


def test_the_promise_stays_through_restarts_with_the_same_slots():
    found = KvHistory(AT_FOUR)
    for nbytes in (760, 780):
        found = found.with_report(KvReport(FIVE, KvMemory(10, nbytes)))
        promise = found.promise(FIVE, KvMemory(10, nbytes))
        assert promise is not None
        assert (promise.promised_tokens, promise.reported_tokens) == (80, nbytes // 10)
    back = found.with_report(AT_FOUR).promise(FOUR, CACHE)
    assert back is not None
    assert (back.promised_tokens, back.reported_tokens) == (98, 100)


@pytest.mark.parametrize("history", [KvHistory(AT_FOUR), KvHistory(AT_FOUR, KvReport(FIVE, CACHE))])
def test_a_history_survives_its_document(history):
    assert KvHistory.of_document(history.document()) == history


GOOD = KvHistory(AT_FOUR).document()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"newest": 1},
        {"newest": {**GOOD["newest"], "shape": {"num_layers": 0}}},
        {"newest": {**GOOD["newest"], "bytes_per_token": 0}},
        {"newest": {**GOOD["newest"], "free_bytes": -1}},
        {"newest": {**GOOD["newest"], "free_bytes": True}},
        {"newest": {**GOOD["newest"], "free_bytes": 1.5}},
        {"newest": GOOD["newest"], "before": {}},
    ],
)
def test_a_document_that_is_none_is_refused(body):
    assert KvHistory.of_document(body) is None
