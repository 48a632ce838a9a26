"""The size of SGLang's KV cache, from its runner."""

from types import SimpleNamespace

import pytest

from evenkeel_moe.engines.sglang.kv_cache import read_kv_cache
from evenkeel_moe.wire.link import KvCache
from tests.engines.sglang.engine import ModelRunner


def runner(told, tokens=10, windows=False, context_ranks=1):
    found = ModelRunner(None)
    found.max_total_num_tokens, found.context_ranks = tokens, context_ranks
    found.is_hybrid_swa = windows
    found.token_to_kv_pool = SimpleNamespace(get_kv_size_bytes=lambda: told)
    return found


@pytest.mark.parametrize("told", [(600, 401), 1001])
def test_keys_and_values_count_together(told):
    assert read_kv_cache(runner(told)) == KvCache(101, 1001)


@pytest.mark.fault(
    "who serves with SGLang's decode context parallelism",
    "the cache of a group held too few tokens by the number of its ranks",
)
def test_rows_spread_over_ranks_hold_the_tokens_of_all():
    assert read_kv_cache(runner(1001, context_ranks=4)) == KvCache(26, 1001)
    of_shared_pages = runner(1001)
    of_shared_pages.token_to_kv_pool_allocator.shard_size = 4
    assert read_kv_cache(of_shared_pages) == KvCache(26, 1001)


def test_a_cache_without_a_fixed_size_of_a_token_is_unknown():
    assert read_kv_cache(runner(1000, windows=True)) is None
    assert read_kv_cache(runner(1000, tokens=0)) is None
    assert read_kv_cache(runner(0)) is None
