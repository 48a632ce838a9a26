"""The size of SGLang's KV cache, from its runner."""

from types import SimpleNamespace

import pytest

from evenkeel_moe.engines.sglang.kv_cache import read_kv_cache
from evenkeel_moe.wire.link import KvCache


def runner(told, tokens=10, windows=False):
    pool = SimpleNamespace(get_kv_size_bytes=lambda: told)
    return SimpleNamespace(
        max_total_num_tokens=tokens, is_hybrid_swa=windows, token_to_kv_pool=pool
    )


@pytest.mark.parametrize("told", [(600, 401), 1001])
def test_keys_and_values_count_together(told):
    assert read_kv_cache(runner(told)) == KvCache(101, 1001)


def test_a_cache_without_a_fixed_size_of_a_token_is_unknown():
    assert read_kv_cache(runner(1000, windows=True)) is None
    assert read_kv_cache(runner(1000, tokens=0)) is None
    assert read_kv_cache(runner(0)) is None
