"""The three files that pull requests of vLLM read."""

import json

import numpy as np
import pytest

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import PlacementFile, PlacementFormat, parse_placement, render_placement
from evenkeel_moe.model.placement import Placement
from tests.formats.samples import two_layers


def test_a_vllm_file_is_a_list_for_each_layer():
    text = render_placement(two_layers(), PlacementFormat.VLLM)
    assert json.loads(text) == [[0, 1, 2, 0], [2, 1, 0, 2]]


def test_one_list_is_for_all_layers_that_the_caller_names():
    file = parse_placement("[0, 1, 2, 0]", num_ranks=2, layer_ids=(3, 7))
    assert file.placement.phy2log.tolist() == [[0, 1, 2, 0]] * 2
    assert file.layer_ids == (3, 7)
    with pytest.raises(InvalidInput, match="one row for all layers: pass layer_ids"):
        parse_placement("[0, 1, 2, 0]", num_ranks=2)


def test_a_mapping_names_its_slots_and_redundant_experts():
    content = json.loads(render_placement(two_layers(), PlacementFormat.VLLM_MAPPING))
    assert content == {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": 1,
        "num_slots": 4,
        "initial_global_assignments": {"0": [0, 1, 2, 0], "1": [2, 1, 0, 2]},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2; only"),
        ({"record_type": "eplb_load_stats"}, "it is a recording"),
        ({"num_slots": 5}, "layer 0 lists 4 experts, num_slots is 5"),
        ({"num_redundant_experts": 3}, "num_redundant_experts is 3, the rows have 1"),
        ({"initial_global_assignments": {"1": [0, 1, 2, 0]}}, "must map the layers 0, 1"),
        ({"extra": 1}, "unknown: extra"),
    ],
)
def test_a_mapping_that_does_not_fit_itself_is_refused(change, words):
    content = json.loads(render_placement(two_layers(), PlacementFormat.VLLM_MAPPING)) | change
    with pytest.raises(InvalidInput, match=words):
        parse_placement(json.dumps(content), num_ranks=2)


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
    ("ranks", "words"),
    [
        ([0, 0, 1], "3 experts do not divide over 2 ranks"),
        ([0, 2], "rank of expert 1 is 2"),
        ([], "0 to 0 experts"),
    ],
)
def test_experts_by_rank_must_be_shared_out_evenly(ranks, words):
    with pytest.raises((InvalidInput, ShapeMismatch), match=words):
        parse_placement(json.dumps({"expert_to_ep_rank": ranks}), num_ranks=2, layer_ids=(0,))
