"""The plugin in vLLM's own EPLB: real state, planner hook and worker, real copies over Gloo."""

import numpy as np
import pytest

from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS, FAULTS = "tests.engines.vllm.scenarios", "tests.engines.vllm.faults"
PARALLEL = "tests.engines.vllm.parallel"


@pytest.mark.parametrize(
    "options",
    [
        {"use_async": True},
        {"use_async": False},
        {"use_async": False, "no_gain": True},
        {"use_async": True, "step_interval": 1},
    ],
    ids=[
        "async",
        "sync",
        "sync on ROCm, which leaves out a map without gain",
        "async, where vLLM alone would rearrange at every step",
    ],
)
def test_vllm_commits_exactly_the_controllers_placement(options):
    for seen in ranks.once(SCENARIOS, "place", **options):
        for name, epoch in (("first", 1), ("second", 2)):
            part = seen[name]
            assert np.array_equal(part["map"], part["target"])
            assert np.array_equal(part["placement"], part["target"])
            assert part["wrong"] == [], "weights end where the plan says, byte for byte"
            assert part["epoch"] == part["ack"] == epoch
            assert part["trouble"] == ""
        assert not np.array_equal(seen["first"]["before"], seen["first"]["target"])
        assert seen["progress"][-1][0] == seen["progress"][-1][1] > 0
        done = [done for done, _ in seen["progress"]]
        assert done == sorted(done)
        assert len(set(done)) >= 2 or not options["use_async"], "layers are reported one by one"


@pytest.mark.fault(
    "who serves with vLLM on ROCm",
    "a plan with an empty slot ended the engine",
)
def test_where_vllm_rates_maps_itself_a_slot_stays_filled():
    for seen in ranks.run(SCENARIOS, "leave_slot_empty", use_async=False):
        assert seen["filled"] and not seen["vote"].yes
        assert seen["vote"].detail == "3 empty slots: vLLM on ROCm, not asynchronous, fails"
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (1, [], "")
    for seen in ranks.run(SCENARIOS, "leave_slot_empty", use_async=True):
        assert seen["vote"].yes and not seen["filled"]
        assert np.array_equal(seen["map"], seen["empty"])


@pytest.mark.fault(
    "who plans by hand with vLLM on ROCm where slots are empty",
    "the ranks refused a plan that vLLM would have carried out",
)
def test_where_a_slot_is_empty_already_another_may_be():
    for seen in ranks.run(SCENARIOS, "leave_another_slot_empty"):
        assert seen["vote"].yes and np.array_equal(seen["map"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (2, [], "")


@pytest.mark.fault(
    "who makes a second engine in one process",
    "plans went to the first engine, whose agent and weights stayed",
)
def test_a_second_engine_of_a_process_takes_the_place_of_the_first():
    for seen in ranks.run(SCENARIOS, "second_engine"):
        assert seen["closed"] and not seen["kept"]
        assert np.array_equal(seen["map"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (1, [], "")


def test_each_pipeline_stage_gets_plans_of_its_own():
    found = ranks.once(PARALLEL, "pipeline", size=4)
    assert [(seen["identity"].deployment, seen["identity"].rank) for seen in found] == [
        ("toy-pp0", 0),
        ("toy-pp0", 1),
        ("toy-pp1", 0),
        ("toy-pp1", 1),
    ]
    assert len({seen["identity"].generation for seen in found}) == 2
    for seen in found:
        assert seen["vote"].yes and seen["trouble"] == ""
        assert np.array_equal(seen["map"], seen["target"])
        assert seen["wrong"] == []
    assert not np.array_equal(found[0]["map"], found[2]["map"])


def test_a_worker_that_asks_some_steps_late_gets_every_plan():
    first, second = ranks.once(SCENARIOS, "late_worker", plans=4)
    for seen in (first, second):
        assert (seen["epoch"], seen["trouble"], seen["refused"]) == (4, "", "")
        assert seen["wrong"] == []
    # The steps of both ranks go on together, so those of the other rank passed meanwhile.
    assert len(second["late"]) >= 4 and min(second["late"]) >= 3


def test_a_worker_that_died_is_named_and_serving_goes_on():
    first, second = ranks.once(FAULTS, "worker_dies")
    assert "asynchronous EPLB worker has ended" in second["trouble"]
    assert "layers switched" in first["trouble"], "the other ranks see that nothing moves"
    for seen in (first, second):
        assert seen["beat"] == seen["trouble"], "every heartbeat reports it"
        assert seen["epoch"] == 0
        assert seen["wrong"] == [], (
            "each layer is whole: the first as planned, the others as they were"
        )
        assert np.array_equal(seen["map"][0], seen["target"][0])
        assert np.array_equal(seen["map"][1:], seen["old"][1:])


@pytest.mark.parametrize("use_async", [True, False], ids=["async", "sync"])
def test_a_plan_on_which_the_ranks_did_not_agree_ends_and_the_next_one_works(use_async):
    for seen in ranks.run(FAULTS, "disagree_once", use_async=use_async):
        first = seen["first"]
        assert "have another step" in first["refused"]
        assert np.array_equal(first["map"], first["before"])
        assert (first["outcome"], first["epoch"], first["trouble"]) == ("dropped", 0, "")
        assert seen["vote"].yes and np.array_equal(seen["map"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (1, [], "")


@pytest.mark.fault(
    "who serves LoRA adapters of experts with vLLM",
    "after a plan experts had the adapters of others",
)
def test_experts_with_adapters_are_not_moved():
    assert ranks.run(FAULTS, "adapters", mode="place") == [False, False]
    assert ranks.run(FAULTS, "adapters", mode="observe") == [True, True]


def test_another_planner_in_our_place_is_named_and_its_moves_followed():
    for seen in ranks.once(SCENARIOS, "own_balancer", mode="place"):
        assert "another plugin replaced the planner" in seen["trouble"]
        assert not seen["vote"].yes
        assert np.array_equal(seen["map"], seen["placement"])
        assert not np.array_equal(seen["map"], seen["before"])
        assert seen["epoch"] >= 1
        assert seen["wrong"] == []


@pytest.mark.parametrize("how", ["model", "store"])
def test_a_guest_that_cannot_start_on_one_rank_starts_on_none_and_leaves_the_engines_groups_alone(
    how,
):
    for seen in ranks.once(FAULTS, "start_fails", how=how):
        assert not seen["agent"]
        assert seen["told"] == [[10, 11], [10, 11]]
        assert not np.array_equal(seen["map"], seen["before"]), "vLLM balances by itself"


def test_a_rank_without_the_plugin_leaves_vllm_to_itself_on_all():
    first, second = ranks.once(FAULTS, "plugin_missing")
    assert np.array_equal(first["map"], second["map"])
    for seen in (first, second):
        assert not seen["agent"]
        assert seen["wrong"] == []
        assert not np.array_equal(seen["map"], seen["before"]), "vLLM balances by itself"


def test_an_error_in_a_hook_costs_the_plans_and_not_the_engine():
    _, second = ranks.once(FAULTS, "hook_fails")
    assert "the plugin failed in EplbState.step" in second["trouble"]
    for seen in ranks.once(FAULTS, "hook_fails"):
        assert seen["wrong"] == []


@pytest.mark.parametrize("slots", [6, 7])
def test_a_map_of_another_size_is_named_and_not_followed(slots):
    for seen in ranks.once(FAULTS, "resized", slots=slots):
        assert seen["map"] == (3, slots)
        assert f"went from (3, 8) layers and slots to (3, {slots})" in seen["trouble"]
        assert seen["epoch"] == 0
