"""Reads the size of vLLM's KV cache from its `KVCacheConfig`; vLLM itself is not imported."""

from typing import Any

from evenkeel_moe.wire.link import KvCache


def read_kv_cache(config: Any, context_ranks: int) -> KvCache | None:
    """Return the KV cache that a worker was told to allocate.

    Args:
        config: vLLM's `KVCacheConfig`.
        context_ranks: ranks over which decode context parallelism spreads the tokens of a block.

    Returns:
        None with several groups of layers: a token then takes other bytes in each of them, and
        sliding windows and states free them early.
    """
    if len(config.kv_cache_groups) != 1:
        return None
    (group,) = config.kv_cache_groups
    spec = group.kv_cache_spec
    # The specification of layers of different sizes counts all of them; others count one layer.
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    block_bytes = int(spec.page_size_bytes) * layers
    tokens = int(spec.block_size) * (context_ranks if spec.dcp_sharded else 1)
    each = -(-block_bytes // tokens)
    return KvCache(each, block_bytes * int(config.num_blocks)) if each > 0 else None
