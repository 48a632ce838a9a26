"""What another number of slots was to leave for the KV cache, against what the engine reports."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.kv_promise import KvHistory, KvReport
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory, kv_tradeoff
from evenkeel_moe.planning.decision.replica_levels import LevelInputs, LevelPart, compare_levels
from evenkeel_moe.planning.problem.token_split import SplitModel

FOUR = ModelShape(2, 12, 4, 4, 2, 100)
"""4 slots on each of 4 ranks, so 4 replicas in each of 2 layers."""
THREE, FIVE = replace(FOUR, slots_per_rank=3), replace(FOUR, slots_per_rank=5)
EIGHT_RANKS = replace(FOUR, num_ranks=8, slots_per_rank=2)
KV = KvMemory(bytes_per_token=10, free_bytes=1000)
AT_FOUR = KvReport(FOUR, KV)


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
    rows = {row.level: row for row in kv_tradeoff(levels, KV).rows if row.rule == "uniform"}
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
    assert KvHistory(AT_FOUR).promise(shape, KV) is None
    assert KvHistory(AT_FOUR).with_report(KvReport(shape, KV)).promise(shape, KV) is None
    assert KvHistory().promise(shape, KV) is None


def test_the_promise_stays_through_restarts_with_the_same_slots():
    found = KvHistory(AT_FOUR)
    for nbytes in (760, 780):
        found = found.with_report(KvReport(FIVE, KvMemory(10, nbytes)))
        promise = found.promise(FIVE, KvMemory(10, nbytes))
        assert promise is not None
        assert (promise.promised_tokens, promise.reported_tokens) == (80, nbytes // 10)
    back = found.with_report(AT_FOUR).promise(FOUR, KV)
    assert back is not None
    assert (back.promised_tokens, back.reported_tokens) == (98, 100)


@pytest.mark.parametrize("history", [KvHistory(AT_FOUR), KvHistory(AT_FOUR, KvReport(FIVE, KV))])
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
