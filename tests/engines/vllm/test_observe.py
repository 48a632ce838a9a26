"""Reports of the plugin in observe mode."""

import math

import numpy as np
import pytest

from evenkeel_moe.wire.link import KvCache
from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS, PARALLEL = "tests.engines.vllm.scenarios", "tests.engines.vllm.parallel"


def test_every_step_is_reported_with_its_real_tokens_and_its_epoch():
    for seen in ranks.once(SCENARIOS, "observe"):
        assert seen["steps"] == list(range(8))
        assert seen["dummy"] == [False] * 4 + [True] + [False] * 3
        assert seen["tokens"] == [12] * 4 + [0] + [12] * 3, (
            "five padding tokens a step are left out"
        )
        assert set(seen["epochs"]) == {0}
        assert not seen["warned"], "the tokens that a drafter prepares are its own"
        for layer in range(3):
            assert np.array_equal(seen["counts"][3][layer], seen["want_3"])
        assert not seen["counts"][4].any()


def test_one_step_in_three_has_the_seconds_of_its_experts_without_dispatch_and_combine():
    for seen in ranks.run(SCENARIOS, "seconds"):
        measured = [not math.isnan(one) for one in seen["seconds"]]
        assert measured == [False, False, False, True, False, False, True, False]
        for found, (inside, around) in zip(seen["seconds"], seen["told"], strict=True):
            assert math.isnan(found) or 0 < inside <= found <= around


@pytest.mark.fault(
    "who serves with vLLM or SGLang",
    "the passes of the engine's start were in the first window",
)
def test_the_warm_up_of_the_start_is_not_served_load():
    for seen in ranks.run("tests.engines.vllm.faults", "warm_up"):
        assert seen["dummy"] == [True] * 3 + [False] * 4
        assert seen["tokens"] == [0] * 3 + [12] * 4
        assert not seen["counts"][:3].any()
        assert (seen["counts"][3] == seen["want"]).all(), "nothing was left behind"


@pytest.mark.fault(
    "who serves with vLLM's model runner of version 1",
    "pipeline stages but the last, and pooling models, had a guest that saw no step",
)
@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, ["pipeline stage 0 of 2", None]),
        ({"launcher": "external_launcher"}, [None, None]),
        (
            {"launcher": "external_launcher", "runner_type": "pooling"},
            ["a pooling model", "a pooling model"],
        ),
    ],
)
def test_where_vllm_takes_no_step_of_its_balancer_the_guest_is_refused(options, served):
    for refused, what in zip(ranks.run(PARALLEL, "older_runner", **options), served, strict=True):
        assert len(refused) == (what is not None)
        assert all(f"no step of its balancer for {what}: set VLLM" in line for line in refused)


@pytest.mark.parametrize("how", ["replicated", "sequence"])
def test_ranks_that_share_a_batch_count_each_token_once(how):
    first, second = ranks.once(PARALLEL, "tensor_parallel", how=how)
    assert [sum(pair) for pair in zip(first["tokens"], second["tokens"], strict=True)] == [12] * 4
    together = first["counts"] + second["counts"]
    assert (together.sum(axis=2) == 2 * 12).all(), "tokens times top-k in every layer"
    for seen in (first, second):
        assert not seen["warned"]
        assert not seen["dummy"]
    if how == "replicated":
        assert all(np.array_equal(layer, first["want_3"]) for layer in together[3])


@pytest.mark.parametrize(
    ("times", "tokens", "words"), [(2, 12, "reduced to the batch"), (0, 0, "totals are too low")]
)
def test_counts_that_do_not_fit_the_batch_are_named_once_with_the_numbers(times, tokens, words):
    for seen in ranks.once(PARALLEL, "counted_otherwise", times=times):
        (line,) = seen["said"]
        assert (line["step"], line["prepared"], line["counted"]) == (0, 12, 12 * times)
        assert words in line["detail"]
        assert seen["tokens"] == [tokens] * 4


def test_registration_has_shape_and_map_and_offers_no_moves():
    for seen in ranks.once(SCENARIOS, "observe"):
        shape = seen["shape"]
        assert (shape.num_layers, shape.num_logical_experts, shape.num_ranks) == (3, 6, 2)
        assert (shape.slots_per_rank, shape.top_k) == (4, 2)
        assert shape.bytes_per_expert == 6 * 4 * 4 + 8 + 2
        assert seen["kv_cache"] == KvCache(bytes_per_token=120, free_bytes=50 * 16 * 120)
        assert seen["capabilities"] == []
        assert seen["digest"] == seen["placement"]
        assert seen["policy"] == "DefaultEplbPolicy", "observing leaves vLLM's planner alone"


def test_moves_of_vllms_own_balancer_are_followed():
    for seen in ranks.once(SCENARIOS, "own_balancer", mode="observe"):
        assert not np.array_equal(seen["map"], seen["before"])
        assert np.array_equal(seen["map"], seen["placement"])
        assert seen["epoch"] >= 1
        assert seen["trouble"] == ""
        assert seen["wrong"] == []
