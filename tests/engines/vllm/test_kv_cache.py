"""The size of vLLM's KV cache, from its configuration."""

from types import SimpleNamespace

from evenkeel_moe.engines.vllm.kv_cache import read_kv_cache
from evenkeel_moe.wire.link import KvCache


def config(groups=1, **spec):
    values = {"block_size": 16, "page_size_bytes": 1601, **spec}
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=SimpleNamespace(**values))
    return SimpleNamespace(num_blocks=3, kv_cache_groups=[group] * groups)


def test_one_group_tells_the_bytes_of_a_token_rounded_up():
    assert read_kv_cache(config()) == KvCache(201, 3 * 2 * 1601)


def test_a_specification_of_layers_of_different_sizes_counts_them_itself():
    assert read_kv_cache(config(kv_cache_specs={})) == KvCache(101, 3 * 1601)


def test_a_cache_of_several_groups_is_unknown():
    assert read_kv_cache(config(groups=2)) is None
    assert read_kv_cache(config(groups=0)) is None
