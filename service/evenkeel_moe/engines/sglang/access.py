"""The objects of SGLang that a guest reads; SGLang itself is imported at the first call."""

import importlib
from typing import Any

from evenkeel_moe.engines.sglang.hooks import CONTEXT, LOCATION, MOE, RECORDER


def metadata() -> Any:
    """Return the global `ExpertLocationMetadata`."""
    return importlib.import_module(LOCATION).get_global_expert_location_metadata()


def recorder() -> Any:
    """Return the global expert distribution recorder."""
    return importlib.import_module(RECORDER).get_global_expert_distribution_recorder()


def cpu_group() -> Any:
    """Return the Gloo group over all ranks that SGLang keeps next to its device groups."""
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    return state.get_world_group().cpu_group


def context() -> Any:
    """Return the module with the options of the server and the sizes of its groups."""
    return importlib.import_module(CONTEXT)


def routes_own_tokens() -> bool:
    """Return True if this rank routes a part of the tokens, False if every rank routes all."""
    return bool(importlib.import_module(MOE).is_moe_input_scattered_across_dp_ranks())


def gathered_batches() -> int:
    """Return how many batches of attention data parallelism every rank routes together."""
    return 1 if routes_own_tokens() else int(context().get_parallel().attn_dp_size)


def only_prefills_eagerly() -> bool:
    """Return True if a server has neither decodes nor CUDA graphs, which need batches of a size."""
    graphs = context().get_exec().graph.cuda_graph_config
    mode = context().get_disagg().disaggregation_mode
    return bool(mode == "prefill" and graphs.prefill.backend == "disabled")
