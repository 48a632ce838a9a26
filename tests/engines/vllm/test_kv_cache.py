"""The size of vLLM's KV cache, from its configuration."""

from types import SimpleNamespace

import pytest

from evenkeel_moe.engines.vllm.kv_cache import read_kv_cache
from evenkeel_moe.wire.link import KvCache


def config(groups=1, **spec):
    values = {"block_size": 16, "page_size_bytes": 1601, "dcp_sharded": True, **spec}
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=SimpleNamespace(**values))
    return SimpleNamespace(num_blocks=3, kv_cache_groups=[group] * groups)


def test_one_group_tells_the_bytes_of_a_token_rounded_up():
    assert read_kv_cache(config(), 1) == KvCache(201, 3 * 2 * 1601)


def test_a_specification_of_layers_of_different_sizes_counts_them_itself():
    assert read_kv_cache(config(kv_cache_specs={}), 1) == KvCache(101, 3 * 1601)


@pytest.mark.fault(
    "who serves with vLLM's decode context parallelism",
    "the cache of a group held too few tokens by the number of its ranks",
)
def test_a_block_spread_over_ranks_holds_the_tokens_of_all():
    assert read_kv_cache(config(), 4) == KvCache(51, 3 * 2 * 1601)
    assert read_kv_cache(config(dcp_sharded=False), 4) == KvCache(201, 3 * 2 * 1601)


def test_a_cache_of_several_groups_is_unknown():
    assert read_kv_cache(config(groups=2), 1) is None
    assert read_kv_cache(config(groups=0), 1) is None
