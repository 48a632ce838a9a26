"""Kinds of parallelism that change what a deployment is."""

from types import SimpleNamespace

import pytest

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.vllm.parallelism import refuse_elastic, stage_settings
from evenkeel_moe.engines.vllm.state import read_shape
from evenkeel_moe.errors import InvalidInput


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


def test_elastic_parallelism_is_refused_with_the_numbers():
    config = SimpleNamespace(enable_elastic_ep=True, data_parallel_size=2, elastic_ep_max_dp_size=8)
    with pytest.raises(Unsupported, match="data_parallel_size 2, at most 8"):
        refuse_elastic(config)
    refuse_elastic(SimpleNamespace(enable_elastic_ep=False))


def test_a_stage_whose_maps_have_more_layers_than_it_holds_is_refused():
    model = SimpleNamespace(num_physical_experts=8, expert_weights=[[]] * 29, num_moe_layers=58)
    state = SimpleNamespace(model=model)
    with pytest.raises(InvalidInput, match="weights of 29 MoE layers here and maps of 58"):
        read_shape(state, 2)  # type: ignore[arg-type]
