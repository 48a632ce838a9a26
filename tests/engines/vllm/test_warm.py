"""Warm start: vLLM moves to the placement of a file before it serves."""

import numpy as np
import pytest

from evenkeel_moe.formats import PlacementFile, PlacementFormat, write_placement
from evenkeel_moe.model.placement import Placement
from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS = "tests.engines.vllm.scenarios"


def placement(layers=3):
    rng = np.random.default_rng(5)
    row = np.array([0, 1, 2, 3, 4, 5, 0, 1], np.int32)
    return Placement(np.stack([rng.permutation(row) for _ in range(layers)]), 2, 6)


def written(path, layers=3):
    write_placement(
        path, PlacementFile(placement(layers), tuple(range(layers))), PlacementFormat.NEUTRAL
    )
    return str(path)


def test_vllm_starts_where_the_file_says_and_plans_go_on_from_there(tmp_path):
    for seen in ranks.run(SCENARIOS, "warm", path=written(tmp_path / "map.json")):
        start = seen["start"]
        assert np.array_equal(start["map"], placement().phy2log)
        assert np.array_equal(start["placement"], placement().phy2log)
        assert start["wrong"] == []
        assert np.array_equal(seen["map"], seen["target"])
        assert seen["wrong"] == []
        assert seen["epoch"] == 1


def test_without_a_controller_the_experts_stay_where_the_file_says(tmp_path):
    asked = {"path": written(tmp_path / "map.json"), "folder": str(tmp_path / "loads")}
    for seen in ranks.run(SCENARIOS, "warm_recorded", **asked):
        assert np.array_equal(seen["map"], placement().phy2log)
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (0, [], "")


@pytest.mark.fault(
    "who starts vLLM in observe mode with a placement file",
    "the first reload of weights wrote experts into the wrong slots",
)
def test_a_rank_whose_reloads_are_not_led_leaves_the_file_out_and_observes(tmp_path):
    asked = {"path": written(tmp_path / "map.json"), "mode": "observe"}
    for seen in ranks.run(SCENARIOS, "warm_start_map", **asked):
        assert seen["map"][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1], "as vLLM starts by itself"
        assert np.array_equal(seen["placement"], seen["map"])


def test_without_a_controller_a_file_that_cannot_be_used_leaves_placing_to_vllm(tmp_path):
    asked = {"path": written(tmp_path / "map.json", layers=4), "folder": str(tmp_path / "loads")}
    assert ranks.run(SCENARIOS, "warm_refused", **asked) == [True, True]


def test_a_file_of_another_shape_is_left_out(tmp_path):
    for seen in ranks.run(
        SCENARIOS, "warm_start_map", path=written(tmp_path / "map.json", layers=4)
    ):
        assert seen["map"][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1], "as vLLM starts by itself"
        assert seen["wrong"] == []
