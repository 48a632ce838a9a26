"""Placement files are read back as they were written, or refused in words."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import EvenkeelError, InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.formats import (
    PlacementFile,
    PlacementFormat,
    parse_placement,
    read_placement,
    render_placement,
    write_placement,
)
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape
from tests.formats.samples import two_layers

BY_LAYER = [format_ for format_ in PlacementFormat if format_ is not PlacementFormat.VLLM_RANKS]
"""The formats with a row for each layer."""


@st.composite
def placement_files(draw, empty=False):
    """Draw a placement of every expert without duplicates on a rank, with dense layers anywhere."""
    ranks = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    layers = draw(st.integers(1, 3))
    least = -(-experts // ranks)
    per_rank = draw(st.integers(least, min(experts, least + 2)))
    shape = ModelShape(layers, experts, ranks, per_rank, 1, 0)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    by_rank = Placement.initial(shape).phy2log.reshape(layers, ranks, per_rank)
    # A valid placement stays valid when experts, ranks and local slots are renamed.
    rows = np.stack([rng.permutation(experts)[rng.permutation(layer)] for layer in by_rank])
    rows = rng.permuted(rows, axis=2).reshape(layers, -1)
    if empty:
        spare = Placement(rows, ranks, experts)
        for layer in range(layers):
            slot = draw(st.integers(0, shape.num_slots - 1))
            if spare.logcnt[layer, rows[layer, slot]] > 1:
                rows[layer, slot] = EMPTY
    layer_ids = draw(st.sets(st.integers(0, 9), min_size=layers, max_size=layers))
    return PlacementFile(Placement(rows, ranks, experts), tuple(sorted(layer_ids)))


def _same(a, b):
    assert a.placement == b.placement
    assert a.layer_ids == b.layer_ids


@given(placement_files(empty=True))
def test_neutral_round_trip_needs_no_arguments(file):
    text = render_placement(file, PlacementFormat.NEUTRAL)
    _same(parse_placement(text), file)
    assert render_placement(parse_placement(text), PlacementFormat.NEUTRAL) == text


@given(
    placement_files(), st.sampled_from([f for f in BY_LAYER if f is not PlacementFormat.NEUTRAL])
)
def test_engine_formats_round_trip(file, format_):
    text = render_placement(file, format_)
    back = parse_placement(
        text,
        num_ranks=file.placement.num_ranks,
        num_logical_experts=file.placement.num_logical_experts,
        layer_ids=file.layer_ids,
    )
    _same(back, file)


def test_one_list_is_for_all_layers_that_the_caller_names():
    file = parse_placement("[0, 1, 2, 0]", num_ranks=2, layer_ids=(3, 7))
    assert file.placement.phy2log.tolist() == [[0, 1, 2, 0]] * 2
    assert file.layer_ids == (3, 7)
    with pytest.raises(InvalidInput, match="one row for all layers: pass layer_ids"):
        parse_placement("[0, 1, 2, 0]", num_ranks=2)


def test_neutral_keeps_its_info_and_has_a_version():
    text = render_placement(two_layers(), PlacementFormat.NEUTRAL)
    content = json.loads(text)
    assert content["format"] == "evenkeel.placement"
    assert content["version"] == 1
    assert content["physical_to_logical"] == [[0, 1, 2, 0], [2, 1, 0, 2]]
    assert parse_placement(text).info == {"policy": "keel"}


def test_file_round_trip_names_the_file_in_errors(tmp_path):
    path = tmp_path / "placement.json"
    write_placement(path, two_layers(), PlacementFormat.NEUTRAL)
    _same(read_placement(path), two_layers())
    path.write_text("{", "utf-8")
    with pytest.raises(InvalidInput, match="placement.json: not JSON: .* line 1 column 2"):
        read_placement(path)
    with pytest.raises(InvalidInput, match="absent.json: cannot be read"):
        read_placement(tmp_path / "absent.json")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="not UTF-8 text: byte 0 is 0xff"):
        read_placement(path)


def test_ascend_refuses_duplicates_on_a_device_both_ways():
    rows = np.array([[0, 0, 1, 2]], np.int32)
    with pytest.raises(InfeasiblePlan, match="layer 0 device 0 has expert 0 twice") as caught:
        render_placement(PlacementFile(Placement(rows, 2, 3), (0,)), PlacementFormat.ASCEND)
    assert caught.value.reason is Reason.DUPLICATE_ON_RANK
    devices = [{"device_id": 0, "device_expert": [0, 0]}]
    layer = {"layer_id": 0, "device_count": 1, "device_list": devices}
    text = json.dumps({"moe_layer_count": 1, "layer_list": [layer]})
    with pytest.raises(InfeasiblePlan, match="twice"):
        parse_placement(text)


def test_a_placement_that_lacks_an_expert_is_refused():
    with pytest.raises(
        InfeasiblePlan, match="1 experts without a replica, first: layer 5 expert 2"
    ):
        PlacementFile(Placement(np.array([[0, 1]], np.int32), 1, 3), (5,))


def test_a_newer_version_is_refused():
    text = render_placement(two_layers(), PlacementFormat.NEUTRAL).replace(
        '"version": 1', '"version": 2'
    )
    with pytest.raises(InvalidInput, match="version is 2, only 1 can be read"):
        parse_placement(text)


def test_the_file_must_agree_with_what_the_caller_expects():
    text = render_placement(two_layers(), PlacementFormat.NEUTRAL)
    with pytest.raises(ShapeMismatch, match="for 2 ranks, 4 are expected"):
        parse_placement(text, num_ranks=4)
    with pytest.raises(ShapeMismatch, match="for 3 experts, 9 are expected"):
        parse_placement(text, num_logical_experts=9)
    with pytest.raises(InvalidInput, match="does not carry the number of ranks"):
        parse_placement(render_placement(two_layers(), PlacementFormat.TRTLLM))


@pytest.mark.parametrize("format_", BY_LAYER)
def test_expected_layers_must_be_those_of_the_file(format_):
    text = render_placement(two_layers(), format_)
    said = {
        PlacementFormat.SGLANG: "5 rows, one for each hidden layer; MoE layers 1..5 need 6",
        PlacementFormat.ASCEND: "3 layer ids for 2 layers",
        PlacementFormat.VLLM: "3 layer ids for 2 layers",
        PlacementFormat.VLLM_MAPPING: "3 layer ids for 2 layers",
    }
    said_by_others = "the file lacks layers 1, 5, has layers 4 that are not expected"
    with pytest.raises(
        InvalidInput if format_ in said else ShapeMismatch, match=said.get(format_, said_by_others)
    ):
        parse_placement(text, num_ranks=2, layer_ids=(1, 3, 5))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(st.sampled_from(BY_LAYER), st.data())
def test_a_file_with_one_part_replaced_is_read_or_refused_with_a_typed_error(format_, data):
    content = yaml.safe_load(render_placement(two_layers(), format_))
    node = content
    while True:
        key = data.draw(
            st.sampled_from(sorted(node, key=str))
            if isinstance(node, dict)
            else st.integers(0, len(node) - 1)
        )
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        break
    node[key] = data.draw(json_values)
    for text in (json.dumps(content), yaml.safe_dump(content)):
        try:
            read = parse_placement(text, num_ranks=2)
        except EvenkeelError as error:
            assert str(error)
        else:
            assert isinstance(read, PlacementFile)


@given(st.sampled_from(BY_LAYER), st.integers(0, 400))
def test_a_truncated_file_is_never_read_as_another_placement(format_, cut):
    text = render_placement(two_layers(), format_).rstrip()
    cut = min(cut, len(text) - 1)
    with pytest.raises(EvenkeelError):
        read = parse_placement(text[:cut], num_ranks=2, num_logical_experts=3)
        assert read.layer_ids != (3, 4)
        raise InvalidInput("a prefix of YAML may hold fewer layers; those it holds are whole")


def test_nested_aliases_are_never_expanded_in_an_error():
    # Each line lists the one before ten times: ten thousand numbers in 200 bytes.
    lines = ["num_slots: 1", "initial_global_assignments: {0: [0]}", "layer_updates_per_iter:"]
    lines.append("- &a0 [1]")
    lines += [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 5)]
    tracemalloc.start()
    with pytest.raises(InvalidInput, match="layer_updates_per_iter must be a whole number, is"):
        parse_placement("\n".join(lines), num_ranks=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


GROUPS = yaml.safe_load(Path(__file__).with_name("refused_placements.yaml").read_text("utf-8"))
ROWS = [[0, 1, 2, 0], [2, 1, 0, 2]]
NEUTRAL = json.loads(render_placement(two_layers(), PlacementFormat.NEUTRAL))


def refusal(content, layer_ids=None):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(InvalidInput) as caught:
        parse_placement(text, num_ranks=2, layer_ids=layer_ids)
    return str(caught.value)


def refused():
    for group in GROUPS:
        marks = [pytest.mark.fault(*group["fault"])] if "fault" in group else []
        for index, each in enumerate(group["files"]):
            yield pytest.param(each, id=f"{group['name']} {index}", marks=marks)


@pytest.mark.parametrize("each", list(refused()))
def test_a_file_that_is_no_placement_is_refused_in_words(each):
    assert each["words"] in refusal(each["file"], each.get("layer_ids"))


def test_depth_that_no_reader_can_follow_is_refused():
    assert "JSON that cannot be read" in refusal("[" * 100_000)


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
def test_of_many_layers_that_differ_the_first_are_named():
    words = "lacks layers 5, 6, 7, 8, 9, 10, 11, 12 and 887 more"
    assert words in refusal(NEUTRAL, layer_ids=tuple(range(3, 900)))


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
