import pytest
import torch

from evenkeel_moe.agent.build import make_hello, make_participant
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.engines.identity import rank_identity
from evenkeel_moe.engines.reference import wiring
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape

SHAPE = ModelShape(2, 8, 4, 3, 2, 1000)


@pytest.mark.parametrize("told", [(None, None), (70_000, 0), (70_000, 10**10)])
def test_a_rank_tells_its_kv_cache_as_configured_and_nothing_else(told):
    identity = rank_identity("demo", 0, "g")
    config = AgentConfig(identity, SHAPE, "n", kv_bytes_per_token=told[0], kv_free_bytes=told[1])
    participant = make_participant(config, Placement.initial(SHAPE), 0, None)
    hello = make_hello(config, participant, "gate", 1)
    assert (hello.kv_bytes_per_token, hello.kv_free_bytes) == told


@pytest.mark.parametrize("told", [(None, None), (70_000, 10**10)])
def test_the_reference_engine_tells_the_kv_cache_of_its_configuration(told):
    config = RankConfig("folder", rank=0, kv_bytes_per_token=told[0], kv_free_bytes=told[1])
    made = wiring._agent_config(config, "g", torch.device("cpu"))
    assert (made.kv_bytes_per_token, made.kv_free_bytes) == told
