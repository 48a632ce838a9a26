"""Weights that vLLM replaces: RL updates, reloads, sleep level 2, between and during plans."""

import math

import numpy as np
import pytest

from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS = "tests.engines.vllm.reloads"


@pytest.mark.parametrize(
    "way", ["reload_weights", "session", "load_weights", "sleep", "load_weights, sleep"]
)
@pytest.mark.parametrize("use_async", [True, False], ids=["async", "sync"])
def test_other_weights_land_where_the_plan_put_their_experts_and_the_next_plan_works(
    use_async, way
):
    for seen in ranks.run(SCENARIOS, "between_plans", use_async=use_async, way=way):
        loaded = seen["loaded"]
        assert loaded["wrong"] == [], "every slot of the map in use has the new bytes"
        assert np.array_equal(loaded["map"], loaded["placement"]) and loaded["routed"]
        assert loaded["trouble"] == ""
        assert seen["vote"].yes
        assert np.array_equal(seen["map"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (2, [], "")


@pytest.mark.parametrize("way", ["reload_weights", "session", "load_weights", "sleep"])
def test_a_move_under_way_ends_before_the_first_weight_is_replaced(way):
    for seen in ranks.run(SCENARIOS, "during_a_move", way=way):
        first = seen["first"]
        assert first["moving"]
        assert np.array_equal(first["map"], first["target"])
        assert (first["wrong"], first["trouble"]) == ([], "")
        assert np.array_equal(seen["map"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (2, [], "")


def test_ten_updates_between_and_during_plans_leave_the_bytes_of_an_engine_that_never_moved():
    for found in ranks.run(SCENARIOS, "ten_updates"):
        assert [seen["epoch"] for seen in found] == list(range(1, 11))
        assert all(seen["wrong"] == [] and seen["trouble"] == "" for seen in found)


@pytest.mark.fault(
    "who lets vLLM sleep at level 2",
    "the canary asked with a token that was gone, and a step had the seconds of none",
)
def test_the_plugin_uses_nothing_that_vllm_has_discarded():
    for seen in ranks.run(SCENARIOS, "discarded_memory"):
        assert seen["inputs"] is None
        across, *after = seen["seconds"]
        assert math.isnan(across), "the step that began before is unknown"
        assert len(after) == 2 and max(after) < 77 / 2
        assert (seen["wrong"], seen["trouble"]) == ([], "")


def test_nothing_is_in_flight_while_vllm_sleeps():
    for seen in ranks.run(SCENARIOS, "light_sleep"):
        assert not seen["moving"]
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (2, [], "")


def test_an_update_that_reaches_the_ranks_at_different_steps_is_refused_before_it_begins():
    for seen in ranks.run(SCENARIOS, "at_different_steps"):
        assert "the ranks differ in their steps; pause the engine" in seen["refused"]
        assert seen["wrong"] == [], "the old weights are whole"


def test_observing_changes_nothing_about_an_update():
    for seen in ranks.run(SCENARIOS, "observed"):
        assert (seen["wrong"], seen["trouble"]) == ([], "")
