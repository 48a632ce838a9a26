"""Reads the size of SGLang's KV cache from its `ModelRunner`; SGLang itself is not imported."""

from typing import Any

from evenkeel_moe.wire.link import KvCache


def read_kv_cache(runner: Any) -> KvCache | None:
    """Return the KV cache that a runner has allocated.

    Args:
        runner: SGLang's `ModelRunner`, once it serves: until then some pools have a larger bound.

    Returns:
        None if some layers keep only a window of the tokens: a token then has no fixed size.
    """
    # Rows of one rank hold the tokens of all ranks of decode context parallelism, or of all that
    # share the cache's pages (`PageInterleavePoolAllocator` of 0.5.22 and later).
    shared = getattr(runner.token_to_kv_pool_allocator, "shard_size", 1)
    tokens = int(runner.logical_max_total_num_tokens) * shared
    if runner.is_hybrid_swa or tokens < 1:
        return None
    pool = runner.token_to_kv_pool
    # The tensors of a pool that is sized after the CUDA graphs keep the bound as their size.
    is_bound = getattr(pool, "post_capture_active", False)
    told = pool.post_capture_backed_bytes if is_bound else pool.get_kv_size_bytes()
    # Keys and values are told as a pair, unless the pool keeps them as one.
    nbytes = int(sum(told)) if isinstance(told, tuple) else int(told)
    each = -(-nbytes // tokens)
    return KvCache(each, nbytes) if each > 0 else None
