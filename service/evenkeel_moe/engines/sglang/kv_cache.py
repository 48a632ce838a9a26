"""Reads the size of SGLang's KV cache from its `ModelRunner`; SGLang itself is not imported."""

from typing import Any

from evenkeel_moe.wire.link import KvCache


def read_kv_cache(runner: Any) -> KvCache | None:
    """Return the KV cache that a runner has allocated.

    Args:
        runner: SGLang's `ModelRunner`, after `alloc_memory_pool`.

    Returns:
        None if some layers keep only a window of the tokens: a token then has no fixed size.
    """
    tokens = int(runner.max_total_num_tokens)
    if runner.is_hybrid_swa or tokens < 1:
        return None
    told = runner.token_to_kv_pool.get_kv_size_bytes()
    # Keys and values are told as a pair, unless the pool keeps them as one.
    nbytes = int(sum(told)) if isinstance(told, tuple) else int(told)
    each = -(-nbytes // tokens)
    return KvCache(each, nbytes) if each > 0 else None
