"""Files that are no placement, or another form of one, are refused in words that help."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import parse_placement, read_placement

GROUPS = yaml.safe_load(Path(__file__).with_name("refused_placements.yaml").read_text("utf-8"))
ROWS = [[0, 1, 2, 0], [2, 1, 0, 2]]
NEUTRAL = {
    "format": "evenkeel.placement",
    "version": 1,
    "num_ranks": 2,
    "num_logical_experts": 3,
    "layer_ids": [3, 4],
    "physical_to_logical": ROWS,
}


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
