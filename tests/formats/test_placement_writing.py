import json

import numpy as np
import pytest
import yaml

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import (
    PlacementFile,
    PlacementFormat,
    parse_placement,
    render_placement,
    write_placement,
)
from evenkeel_moe.formats.placement_writing import write_replica_probabilities
from evenkeel_moe.model.placement import EMPTY, Placement
from tests.formats.samples import two_layers


def test_sglang_file_has_one_key_and_a_row_for_every_hidden_layer():
    content = json.loads(
        render_placement(two_layers(), PlacementFormat.SGLANG, num_hidden_layers=6)
    )
    assert list(content) == ["physical_to_logical_map"]
    rows = content["physical_to_logical_map"]
    assert rows[3:5] == [[0, 1, 2, 0], [2, 1, 0, 2]]
    assert rows[:3] + rows[5:] == [[0, 1, 2, 0]] * 4


def test_trtllm_file_is_yaml_with_absolute_layers():
    content = yaml.safe_load(render_placement(two_layers(), PlacementFormat.TRTLLM))
    assert content == {
        "num_slots": 4,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {3: [0, 1, 2, 0], 4: [2, 1, 0, 2]},
    }


def test_ascend_file_counts_moe_layers_and_lists_devices():
    content = json.loads(render_placement(two_layers(), PlacementFormat.ASCEND))
    assert content["moe_layer_count"] == 2
    assert content["layer_list"][1] == {
        "layer_id": 1,
        "device_count": 2,
        "device_list": [
            {"device_id": 0, "device_expert": [2, 1]},
            {"device_id": 1, "device_expert": [0, 2]},
        ],
    }


@pytest.mark.parametrize(
    "format_", [PlacementFormat.SGLANG, PlacementFormat.TRTLLM, PlacementFormat.ASCEND]
)
def test_empty_slots_are_never_written_for_engines(format_):
    rows = np.array([[0, 1, 2, EMPTY]], np.int32)
    with pytest.raises(InfeasiblePlan, match=r"1 in 1 layers, most in layer 7 \(1 of 4\)"):
        render_placement(PlacementFile(Placement(rows, 2, 3), (7,)), format_)


def test_sglang_needs_enough_hidden_layers():
    with pytest.raises(InvalidInput, match="10000000000 hidden layers, at most 10000 are written"):
        render_placement(two_layers(), PlacementFormat.SGLANG, num_hidden_layers=10**10)
    with pytest.raises(InvalidInput, match="4 hidden layers, the placement has layer 4"):
        render_placement(two_layers(), PlacementFormat.SGLANG, num_hidden_layers=4)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=f"{tmp_path}: cannot be written: Is a directory"):
        write_placement(tmp_path, two_layers(), PlacementFormat.NEUTRAL)


def test_a_vllm_file_is_a_list_for_each_layer():
    text = render_placement(two_layers(), PlacementFormat.VLLM)
    assert json.loads(text) == [[0, 1, 2, 0], [2, 1, 0, 2]]


def test_a_mapping_names_its_slots_and_redundant_experts():
    content = json.loads(render_placement(two_layers(), PlacementFormat.VLLM_MAPPING))
    assert content == {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": 1,
        "num_slots": 4,
        "initial_global_assignments": {"0": [0, 1, 2, 0], "1": [2, 1, 0, 2]},
    }


def one_row(rows):
    return PlacementFile(Placement(np.array(rows, np.int32), 2, 4), (1, 2))


def test_experts_by_rank_keep_no_order_of_slots():
    text = render_placement(one_row([[3, 0, 2, 1], [0, 3, 1, 2]]), PlacementFormat.VLLM_RANKS)
    assert json.loads(text) == {"expert_to_ep_rank": [0, 1, 1, 0]}
    back = parse_placement(text, num_ranks=2, layer_ids=(1, 2))
    assert back.placement.phy2log.tolist() == [[0, 3, 1, 2]] * 2


def test_experts_by_rank_refuse_replicas_and_layers_that_differ():
    with pytest.raises(InfeasiblePlan, match="4 slots for 3 experts are 1 too many"):
        render_placement(two_layers(), PlacementFormat.VLLM_RANKS)
    with pytest.raises(InfeasiblePlan, match="1 of 2 layers differ from layer 1, first: layer 2"):
        render_placement(one_row([[0, 1, 2, 3], [2, 1, 0, 3]]), PlacementFormat.VLLM_RANKS)


@pytest.mark.parametrize(
    ("shares", "error"), [(np.ones((2, 3)), ShapeMismatch), (np.full((2, 4), 0.5), InvalidInput)]
)
def test_shares_that_are_not_those_of_a_map_are_not_written(tmp_path, shares, error):
    with pytest.raises(error, match="shares"):
        write_replica_probabilities(tmp_path / "mass.pt", two_layers(), shares)
    assert not (tmp_path / "mass.pt").exists()
