"""Versions of vLLM that the plugin refuses, and vLLM's test vectors for the replaced planner."""

import pytest

from tests.engines import ranks
from tests.engines.vllm.scenarios import README_MAP

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS, FAULTS = "tests.engines.vllm.scenarios", "tests.engines.vllm.faults"


def test_an_unknown_vllm_is_refused_with_the_reason_and_left_as_it_was():
    (found,) = ranks.once(FAULTS, "refusals", size=1)
    assert found["version"].startswith("vllm is 9.9.9; this plugin supports 0.31.0, 0.32.0, 0.33.0")
    assert "pull request 49700" in found["context"]
    assert "vllm-ascend is installed" in found["ascend"]
    assert (
        found["signature"]
        == "EplbState.step takes (self, dummy), not (self, is_dummy, is_profile, log_stats)"
    )
    assert "_commit_eplb_maps is missing" in found["missing"]
    assert "not one policy called default" in found["policies"]
    assert "EplbModelState has no physical_to_logical_map" in found["fields"]
    assert not any("BUT CHANGED" in words for words in found.values())


def test_the_entry_point_is_off_without_controllers_and_works_once():
    (found,) = ranks.once(FAULTS, "environment", size=1)
    assert found == {"off": True, "refused": True, "on": True, "once": True}


def test_vllms_own_vectors_pass_through_our_planner():
    (found,) = ranks.once(SCENARIOS, "vectors", size=1)
    assert found["name"] == "ControllerPolicy"
    assert found["readme"] == README_MAP
    assert found["same"], (
        "equal loads, one hot expert, sizes that do not divide: as vLLM's planner answers"
    )
    assert found["kept"] == README_MAP, "no plan: the old map"
    assert found["shrunk"] == (2, 16), "another number of slots: vLLM's planner answers"
    assert found["empty_slots"] == (
        [[[0], [2], [3]], [[3], [1], [0]]],
        [[1, 1, 1], [1, 1, 1]],
    )
