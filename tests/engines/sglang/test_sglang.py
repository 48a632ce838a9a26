"""The plugin in SGLang's own EPLB: real manager, recorder, location, updater, hook registry."""

import math

import numpy as np
import pytest

from evenkeel_moe.wire.link import KvCache
from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS = "tests.engines.sglang.scenarios"
DENSE = 2


@pytest.mark.parametrize("chunk", [None, 1], ids=["at once", "layer by layer"])
def test_the_manager_commits_exactly_the_controllers_placement(chunk):
    for seen in ranks.once(SCENARIOS, "place", chunk=chunk):
        assert seen["vote"]
        assert np.array_equal(seen["moe"], seen["target"])
        assert np.array_equal(seen["placement"], seen["target"])
        assert np.array_equal(seen["map"][:DENSE], seen["before"][:DENSE]), (
            "dense layers' rows stay"
        )
        assert seen["wrong"] == [], "weights end where the plan says, byte for byte"
        assert seen["acks"] == [1]
        assert seen["epoch"] == 1
        assert seen["trouble"] == ""
        assert seen["progress"] == sorted(seen["progress"])
        assert seen["progress"][-1] > 0


@pytest.mark.parametrize("forgets", [False, True])
def test_moved_experts_answer_as_before_unless_sglang_forgets_something(forgets):
    first, second = ranks.once(SCENARIOS, "asked", forgets=forgets)
    for seen in (first, second):
        assert (seen["wrong"], seen["epoch"]) == ([], 1), "all declared bytes arrived"
        told = seen["told"]
        wrong = forgets and seen is second
        assert told.moved > 1 and told.blind == 0
        assert (told.same, told.different) == (told.moved - wrong, int(wrong))
    assert first["trouble"] == ""
    expert = second["target"][1, second["slot"]]
    named = f"layer 1 expert {expert} in slot {second['slot']} of rank 1 does not answer"
    assert second["trouble"].startswith(named if forgets else "")
    assert bool(second["trouble"]) == forgets


def test_every_pass_is_reported_with_its_real_tokens():
    for seen in ranks.once(SCENARIOS, "observe"):
        assert seen["steps"] == [1, 2, 3, 4, 5], (
            "the agent starts at the first pass and reports from the second"
        )
        assert seen["tokens"] == {9}, "four padding tokens a pass are left out"
        assert seen["sides"] == {"source"}
        for layer in range(6):
            assert np.array_equal(seen["last"][layer], seen["want"])
        assert (seen["shape"].num_layers, seen["shape"].slots_per_rank, seen["shape"].top_k) == (
            6,
            4,
            2,
        )
        assert seen["kv_cache"] == KvCache(bytes_per_token=128, free_bytes=900 * 128)
        assert seen["capabilities"] == []
        assert seen["slots_stay_filled"]
        assert seen["dispatch"] == "nearest"


def test_a_replica_of_sglang_is_a_deployment_of_its_own():
    for seen in ranks.once(SCENARIOS, "observe"):
        assert seen["deployment"] == "toy-dp1"


def test_one_pass_in_three_has_the_seconds_of_its_experts_without_dispatch_and_combine():
    for seen in ranks.run(SCENARIOS, "seconds", a2a="deepep"):
        assert seen["steps"] == list(range(1, 8))
        measured = [not math.isnan(one) for one in seen["seconds"]]
        assert measured == [step % 3 == 0 for step in seen["steps"]]
        for found, (inside, around) in zip(seen["seconds"], seen["told"], strict=True):
            assert math.isnan(found) or 0 < inside <= found <= around


def test_kernels_that_communicate_report_no_seconds():
    for seen in ranks.run(SCENARIOS, "seconds", a2a="flashinfer_megamoe"):
        assert all(math.isnan(one) for one in seen["seconds"])


@pytest.mark.fault(
    "who serves with vLLM or SGLang",
    "the passes of the engine's start were in the first window",
)
@pytest.mark.parametrize(
    ("skip", "deepep_mode", "own"),
    [
        (False, "normal", [True, True, False, True, False]),
        (True, "normal", [False, False, False, True, False]),
        (False, "low_latency", [True, True, False, False, False]),
    ],
    ids=["with a warm-up", "without one", "tokens that slots receive"],
)
def test_requests_that_sglang_sends_itself_are_not_served_load(skip, deepep_mode, own):
    options = {"skip": skip, "a2a": "deepep", "deepep_mode": deepep_mode}
    for seen in ranks.run(SCENARIOS, "own_requests", **options):
        assert seen["dummy"] == own
        assert seen["counted"] == [not each for each in own]


@pytest.mark.parametrize(
    ("scenario", "options"),
    [("shared_batch", {"a2a": "none", "deepep_mode": "normal"}), ("prefills", {})],
    ids=["one batch", "the batches of attention data parallelism"],
)
def test_ranks_that_route_the_same_tokens_count_each_once(scenario, options):
    """Without an all-to-all every rank routes all tokens, and they add up their outputs."""
    first, second = ranks.once(SCENARIOS, scenario, **options)
    assert first["side"] == second["side"] == {"source"}
    assert (first["tokens"], second["tokens"]) == ([9] * 5, [0] * 5)
    for layer in (first["counts"] + second["counts"])[-1]:
        assert np.array_equal(layer, first["want"])


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_rows_that_pad_a_batch_are_no_tokens(hip):
    for seen in ranks.run(SCENARIOS, "padding", hip=hip):
        assert seen["tokens"] == [9] * 3
        assert (seen["last"].sum(axis=1) == 2 * 9).all()
        assert len(seen["said"]) == (hip is None)
        for line in seen["said"]:
            assert (line["prepared"], line["counted"]) == (9, 13)
            assert "reduced to the batch" in line["detail"]
        if hip:
            assert all(np.array_equal(layer, seen["want"]) for layer in seen["last"])


def test_without_counts_of_the_router_nothing_is_reported_and_no_plan_is_taken():
    for seen in ranks.run(SCENARIOS, "routed_by_kernel"):
        assert not seen["vote"].yes
        assert "counted none of the 9 tokens of a pass" in seen["trouble"]
        assert not any(len(report.steps) for report in seen["reports"])


def test_a_pass_that_is_not_recorded_gets_no_counts_of_the_draft_model():
    for seen in ranks.run(SCENARIOS, "not_recorded"):
        assert seen["steps"] == [1, 2, 5]
        assert seen["counted"] == [[18] * 6] * 3
        assert seen["trouble"] == ""


def test_ranks_that_route_their_own_batches_without_an_all_to_all_report_them():
    for seen in ranks.run(SCENARIOS, "own_batches"):
        assert seen["tokens"] == [9] * 3
        for layer in seen["last"]:
            assert np.array_equal(layer, seen["want"])


def test_received_tokens_are_compared_with_one_batch_of_an_attention_group():
    first, second = ranks.once(SCENARIOS, "shared_batch", a2a="deepep", deepep_mode="low_latency")
    assert first["side"] == second["side"] == {"destination"}
    assert (first["tokens"], second["tokens"]) == ([9] * 5, [0] * 5), "padding is left out"
    together = np.concatenate([first["counts"][-1], second["counts"][-1]], axis=1)
    for layer, row in enumerate(first["moe"]):
        by_expert = np.bincount(row, weights=together[layer], minlength=6)
        assert np.array_equal(by_expert, first["want"])


def test_moves_of_sglangs_own_planner_are_followed():
    for seen in ranks.once(SCENARIOS, "own_balancer"):
        assert not np.array_equal(seen["map"], seen["before"])
        assert np.array_equal(seen["moe"], seen["placement"])
        assert seen["epoch"] >= 1
        assert seen["trouble"] == ""
        assert seen["wrong"] == []


def test_a_plan_that_sglang_leaves_out_ends_and_plans_go_on_once_it_rebalances_again():
    for seen in ranks.once(SCENARIOS, "disabled"):
        off = seen["off"]
        assert (off["epoch"], off["wrong"], off["trouble"]) == (0, [], "")
        assert "SGLang's rebalancing is off: scaling" in seen["late"].detail
        assert np.array_equal(seen["moe"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (1, [], "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            (("elastic", "mooncake"),),
            "with a mask over its ranks (now 2)",
        ),
        ((("ep_size", 1),), "2 ranks, of which 1 share experts"),
        ((("a2a", "none"), ("attention", 2)), "with 2 groups of attention data parallelism"),
        ((("recorder", "per_pass"),), "recorder-mode per_pass: SGLang's scheduler ends"),
        (
            (("quantizes", True),),
            "3 of 3 tensors that SGLang would move in layer 2 are no parameters",
        ),
    ],
    ids=[
        "elastic",
        "more ranks than share experts",
        "padding that is counted",
        "per_pass",
        "tensors",
    ],
)
def test_groups_that_are_not_supported_are_refused_with_the_numbers(options, words):
    for seen in ranks.once(SCENARIOS, "refused", options=options):
        assert not seen["agent"]
        (line,) = seen["said"]
        assert line["reason"] == "unsupported" and words in line["detail"]


def test_ranks_wait_for_each_other_for_less_than_sglangs_watchdog():
    (waited,), _ = ranks.run(SCENARIOS, "refused_on_one")
    assert "did not start on ranks [1] of 2 within 4 s" in waited


def test_an_unknown_sglang_is_refused_with_the_reason_and_left_as_it_was():
    (found,) = ranks.once(SCENARIOS, "refusals", size=1)
    assert found["version"].startswith("sglang is 9.9.9; this plugin supports 0.5.21, 0.5.22, 0.5")
    assert "rebalance_experts takes (weight)" in found["signature"]
    assert not found["signature"].endswith("HOOKED")
    assert found["off"] == "0"
    assert int(found["on"]) >= 4
