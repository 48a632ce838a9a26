"""Scenarios of a toy vLLM with tensor, pipeline and elastic parallelism."""

import structlog
import torch
import torch.distributed as dist

from tests.engines.vllm import engine
from tests.engines.vllm.engine import ModelConfig
from tests.engines.vllm.scenarios import TOKENS, Rank


def pipeline(rank, size):
    """Two pipeline stages of two ranks; each stage gets a plan of its own."""
    one = Rank(rank, size, use_async=True, stages=2)
    stage = rank // 2
    one.steps(4)
    return {
        **one.carry_out(one.target(seed=stage)),
        "identity": one.agent.hello().identity,
    }


def older_runner(rank, size, *, launcher=None, runner_type="generate"):
    """Two pipeline stages of one rank each, with vLLM's model runner of version 1."""
    engine.CONFIG.use_v2_model_runner = False
    engine.CONFIG.parallel_config.distributed_executor_backend = launcher
    engine.CONFIG.model_config.runner_type = runner_type
    with structlog.testing.capture_logs() as said:
        one = Rank(rank, size, use_async=False, mode="observe", stages=2)
    refused = [line["detail"] for line in said if line["event"] == "guest_not_started"]
    assert (one.agent is None) == bool(refused)
    dist.barrier(one.lockstep)  # The first rank holds the store by which the others start.
    return refused


def tensor_parallel(rank, size, *, how):
    """Both ranks get the same batch; all of them or a chunk is routed on each.

    In between vLLM's `update_config` puts a changed copy in the place of its configuration.
    """
    one = Rank(rank, size, use_async=False, mode="observe", tensor_parallel=how)
    one.steps(2)
    one.model_config = ModelConfig()
    one.steps(2)
    real = one.chosen[:TOKENS].reshape(-1)
    metas, counts = one.reported(4)
    return {
        "tokens": metas["tokens"].tolist(),
        "dummy": metas["dummy"].any(),
        "counts": counts,
        "want_3": torch.bincount(real, minlength=one.model.num_logical_experts).numpy(),
        "warned": one.guest._warned_of_counts,
    }


def counted_otherwise(rank, size, *, times):
    """vLLM counts each token some times, as when the mask of padding does not fit the batch."""
    one = Rank(rank, size, use_async=False, mode="observe")
    one.counted_times = times
    with structlog.testing.capture_logs() as said:
        one.steps(4)
    metas, _ = one.reported(4)
    return {
        "said": [line for line in said if line["event"] == "tokens_counted_otherwise"],
        "tokens": metas["tokens"].tolist(),
    }
