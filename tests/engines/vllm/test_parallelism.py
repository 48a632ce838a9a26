"""Kinds of parallelism that change what a deployment is."""

from types import SimpleNamespace

import numpy as np
import pytest

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.vllm.parallelism import refuse_elastic, shrunk_map, stage_settings
from evenkeel_moe.engines.vllm.state import read_shape
from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.topology import ModelShape


def test_each_pipeline_stage_is_a_deployment_of_its_own():
    settings = GuestSettings(deployment="toy", placement="/maps/{pp}.json")
    assert stage_settings(settings, 0, 1) is settings
    names = [stage_settings(settings, stage, 3).deployment for stage in range(3)]
    assert names == ["toy-pp0", "toy-pp1", "toy-pp2"]
    assert stage_settings(settings, 2, 3).placement == "/maps/2.json"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"deployment": "d" * 61}, "has 65 characters; a name has at most 63"),
        ({"placement": "/maps/all.json"}, "2 pipeline stages cannot start from one file"),
        ({"record": "/loads"}, "2 pipeline stages cannot record into one folder, /loads"),
    ],
)
def test_a_stage_without_a_name_or_a_file_of_its_own_is_refused(settings, words):
    with pytest.raises(Unsupported, match=words):
        stage_settings(GuestSettings(**settings), 1, 2)


@pytest.mark.parametrize(
    ("settings", "side", "words"),
    [
        ({"record": "/loads"}, CountingSide.SOURCE, "a recording, here /loads, holds one number"),
        ({}, CountingSide.DESTINATION, "with vllm-ascend this plugin supports a fixed number"),
    ],
)
def test_what_cannot_follow_ranks_that_change_is_refused(settings, side, words):
    with pytest.raises(Unsupported, match=words):
        refuse_elastic(GuestSettings(**settings), side)
    refuse_elastic(GuestSettings(), CountingSide.SOURCE)


def test_the_map_for_fewer_ranks_has_the_fewest_changes():
    current = np.array([[0, 1, 2, 0, 3, 3], [3, -1, 1, 0, 2, 1]])
    shape = ModelShape(2, 4, 3, 2, 1, 1000)
    found = shrunk_map(current, shape, 2)
    assert found.tolist() == [[3, 1, 2, 0], [3, 2, 1, 0]] and found.dtype == np.int64
    with pytest.raises(ShapeMismatch):
        shrunk_map(current, shape, 1)


def test_a_stage_whose_maps_have_more_layers_than_it_holds_is_refused():
    model = SimpleNamespace(num_physical_experts=8, expert_weights=[[]] * 29, num_moe_layers=58)
    state = SimpleNamespace(model=model)
    with pytest.raises(InvalidInput, match="weights of 29 MoE layers here and maps of 58"):
        read_shape(state, 2)  # type: ignore[arg-type]
