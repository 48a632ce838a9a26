"""Versions of vLLM that the plugin refuses, and vLLM's test vectors for the replaced planner."""

import pytest

from tests.engines import ranks
from tests.engines.vllm.scenarios import README_MAP

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS, FAULTS = "tests.engines.vllm.scenarios", "tests.engines.vllm.faults"


def test_an_unknown_vllm_is_refused_with_the_reason_and_left_as_it_was():
    ((found, checked),) = ranks.once(FAULTS, "refusals", size=1)
    assert found["version"].startswith("vllm is 9.9.9; this plugin supports 0.31.0, 0.32.0, 0.33.0")
    assert "pull request 49700" in found["context"]
    assert "vllm-ascend runs its older model runner" in found["ascend"]
    assert (
        found["signature"]
        == "EplbState.step takes (self, dummy), not (self, is_dummy, is_profile, log_stats)"
    )
    assert "_commit_eplb_maps is missing" in found["missing"]
    assert "not one policy called default" in found["policies"]
    assert "EplbModelState has no physical_to_logical_map" in found["fields"]
    assert not any("BUT CHANGED" in words for words in found.values())
    assert all(found[name] == words for name, words in checked.items() if name != "version")


@pytest.mark.fault(
    "who asked whether the plugin fits a vLLM",
    "the check refused what would start, and the plugin started on what the check refused",
)
def test_the_check_and_the_start_refuse_the_same_parts_of_a_worker():
    ((found, checked),) = ranks.once(FAULTS, "refusals", size=1)
    for name in ("reload_weights", "reset_weights", "compile_or_warm_up_model"):
        assert f"Worker.{name} takes (worker), not (self" in found[f"other {name}"]
        assert found[f"no {name}"] == f"Worker.{name} is missing"
    assert "initialize_from_config is missing" in found["no initialize_from_config"]
    assert "a part of vLLM cannot be read: No module named" in found["no workers"]
    assert {name: words for name, words in found.items() if name != "version"} == {
        name: words for name, words in checked.items() if name != "version"
    }


@pytest.mark.fault(
    "who serves with a vLLM whose workers the plugin does not know",
    "new weights and the KV cache were not watched, and nobody was told",
)
@pytest.mark.parametrize("how", ["not wrapped", "lacks a function"])
def test_a_worker_that_cannot_be_watched_is_told_at_the_start(how):
    for seen in ranks.run(FAULTS, "unknown_worker", how=how):
        assert seen["said"] == 1
        missing = "OtherWorker.discard is missing"
        assert (missing in seen["trouble"]) is (how == "lacks a function")


FAILING = (
    "who serves with a vLLM in which a part of the plugin fails",
    "the error ended the engine",
)


@pytest.mark.fault(*FAILING)
def test_an_error_while_the_guest_starts_stays_away_from_vllm():
    for seen in ranks.run(FAULTS, "hash_fails"):
        assert not seen["agent"]
        assert seen["moved"], "vLLM balances by itself"


@pytest.mark.fault(*FAILING)
def test_an_error_in_the_last_copies_stays_away_from_vllm():
    for seen in ranks.run(FAULTS, "last_copies_fail"):
        assert "the plugin failed in EplbState.rearrange: RuntimeError" in seen["trouble"]


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
