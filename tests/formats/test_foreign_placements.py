"""Files of neighbours that are no placement, or another form of one."""

import json

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import parse_placement, read_placement

ROWS = [[0, 1, 2, 0], [2, 1, 0, 2]]
NEUTRAL = {
    "format": "evenkeel.placement",
    "version": 1,
    "num_ranks": 2,
    "num_logical_experts": 3,
    "layer_ids": [3, 4],
    "physical_to_logical": ROWS,
}


def ascend(*layer_ids):
    devices = [{"device_id": r, "device_expert": [2 * r, 2 * r + 1]} for r in range(2)]
    layers = [{"layer_id": i, "device_count": 2, "device_list": devices} for i in layer_ids]
    return {"moe_layer_count": len(layers), "layer_list": layers}


def refusal(content, **known):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(InvalidInput) as caught:
        parse_placement(text, **{"num_ranks": 2, **known})
    return str(caught.value)


@pytest.mark.fault(
    "a user of TensorRT-LLM who compared with the engine's own load balancer file",
    "the message did not say that the file is another form, nor what to do",
)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_slots: 4\nlayer_updates_per_iter: 2", "holds no placement: without initial_global_"),
        ("num_slots: 4", "TensorRT-LLM starts with its experts in order"),
        ("num_slots: 4\ninitial_global_assignments:", "TensorRT-LLM starts with its experts in"),
        ("num_slots: 4\ninitial_global_assignments: {}", "TensorRT-LLM starts with its experts in"),
        (
            "moe_config: {load_balancer: {num_slots: 4, initial_global_assignments: {3: [0, 1]}}}",
            "under moe_config.load_balancer: write what is below that key to a file of its own",
        ),
        ("load_balancer: {num_slots: 4}", "under load_balancer: write what is below"),
        (
            "moe_config: {backend: WIDEEP, load_balancer: ./map.yaml}",
            "moe_config.load_balancer names another file, './map.yaml': give that",
        ),
        ("num_slots: 2\ninitial_global_assignments: {'1': [0, 1]}", "write 1 without quotes"),
        ("num_slots: 2\ninitial_global_assignments: {1: ['0', 1]}", "digits, without quotes"),
        ("num_slots: 2\ninitial_global_assignments: {1: [0, 010]}", "digits, without quotes"),
        ('{"num_slots": 2, "initial_global_assignments": {"1": [0, 1]}}', "in YAML, since JSON"),
    ],
)
def test_a_load_balancer_file_of_another_form_is_named(text, words):
    assert words in refusal(text)


@pytest.mark.fault(
    "a user who compared with the map of another tool",
    "the message asked for keys of our own format",
)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {
                "version": 2,
                "format": "vllm_offline_eplb_physical_to_logical_by_model",
                "model_maps": {
                    "Main": {"physical_to_logical_map": ROWS},
                    "Draft": {"physical_to_logical_map": ROWS[:1]},
                },
            },
            "'evenkeel.placement'; the placement is under model_maps.Main and model_maps.Draft:",
        ),
        ({"format": "other", "maps": 1}, "format is 'other', must be 'evenkeel.placement'"),
        ({"format": "v1", "physical_to_logical_map": ROWS}, "unknown: format (take it out)"),
        ({"physical_to_logical_map": ROWS, "meta": {}}, "unknown: meta (take it out)"),
        ({"physical_to_logical": ROWS}, "missing: format, version, num_ranks"),
        ({"placement": NEUTRAL}, "under placement: write what is below that key"),
        ({"logical_count": [[[1, 2]]]}, "holds counts of tokens"),
        ({"record_type": "eplb_load_stats", "step": 1}, "holds counts of tokens"),
        (ascend(3, 4), "layer_id counts MoE layers from 0, got 3, 4: take 3 from each"),
        (ascend(1, 3), "layer_id counts MoE layers from 0, got 1, 3: number them 0..1 in order"),
        (ascend(0, 0), "layer_id counts MoE layers from 0, got 0, 0"),
        ([[[0, 1], [2, 0]]], "row 0 holds lists: a row is the experts of all slots"),
        ([{"layer": 0, "experts": [0, 1]}], "row 0 must be a list, is dict"),
        ({"epochs": 3, "lr": 1}, "has the keys epochs, lr; known are physical_to_logical_map"),
    ],
)
def test_the_map_of_another_tool_is_named(content, words):
    assert words in refusal(content)


@pytest.mark.fault(
    "a user who compared with the map of another tool",
    "the message asked for keys of our own format",
)
@pytest.mark.parametrize("name", ["map.pt", "map.npz", "map.json"])
def test_an_archive_is_no_text(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        np.savez(file, physical_to_logical_map=np.array(ROWS))
    with pytest.raises(InvalidInput, match=f"{name}: an archive, as torch and numpy write, not t"):
        read_placement(tmp_path / name, num_ranks=2)


@pytest.mark.fault(
    "a user whose placement has other layers than the recording",
    "was shown two lists of all layers, not what differs",
)
@pytest.mark.parametrize(
    ("content", "layer_ids", "words"),
    [
        (NEUTRAL, (3, 4, 5), "the file lacks layers 5"),
        (NEUTRAL, (4,), "the file has layers 3 that are not expected"),
        (NEUTRAL, (2, 4), "lacks layers 2, has layers 3 that are not expected"),
        (NEUTRAL, tuple(range(3, 900)), "lacks layers 5, 6, 7, 8, 9, 10, 11, 12 and 887 more"),
        (
            {"physical_to_logical_map": ROWS},
            (3, 4),
            "2 rows, one for each hidden layer; MoE layers 3..4 need 5: it seems to lack the",
        ),
        (
            {"physical_to_logical_map": ROWS},
            (0, 3),
            "2 rows, one for each hidden layer; MoE layers 0..3 need 4",
        ),
    ],
)
def test_layers_that_differ_are_named(content, layer_ids, words):
    assert words in refusal(content, layer_ids=layer_ids)


@pytest.mark.parametrize(
    "content",
    [
        {"k" * 100_000: 1},
        {"physical_to_logical_map": ROWS, "k" * 100_000: 1},
        '{"' + "k" * 100_000 + '": 1, "' + "k" * 100_000 + '": 2}',
        {**NEUTRAL, "layer_ids": list(range(100_000, 0, -1))},
        {**NEUTRAL, "layer_ids": [4, 3]},
        {"record_type": "x" * 100_000, "version": 1},
        {"load_balancer": "x" * 100_000},
        {"a": {"b" * 100_000: {"num_slots": 1}}},
    ],
)
def test_what_is_wrong_is_never_shown_at_length(content):
    assert len(refusal(content)) < 500
    assert len(refusal(NEUTRAL, layer_ids=tuple(range(100_000)))) < 500
