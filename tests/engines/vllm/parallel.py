"""Scenarios of a toy vLLM with tensor, pipeline and elastic parallelism."""

import time
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist

from evenkeel_moe.engines.vllm.plugin import VllmPlugin
from evenkeel_moe.model.load import LoadReport
from tests.agent.fleet import PortLink
from tests.engines.driving import steps_of, toy_settings
from tests.engines.vllm import engine
from tests.engines.vllm.engine import Config
from tests.engines.vllm.scenarios import TOKENS, Rank


def pipeline(rank, size):
    """Two pipeline stages of two ranks; each stage gets a plan of its own."""
    one = Rank(rank, size, use_async=True, stages=2)
    stage = rank // 2
    one.steps(4)
    new = one.target(seed=stage)
    vote = one.order(new)
    one.until(lambda: one.agent.epoch == 1)
    return {
        **one.seen(),
        "identity": one.agent.hello().identity,
        "target": new.phy2log,
        "vote": vote.yes,
    }


def tensor_parallel(rank, size, *, how):
    """Both ranks get the same batch; all of them or a chunk is routed on each."""
    one = Rank(rank, size, use_async=False, mode="observe", tensor_parallel=how)
    one.steps(4)
    real = one.chosen[:TOKENS].reshape(-1)
    reports = one.sent(LoadReport, lambda reports: steps_of(reports) >= 4)
    metas = np.concatenate([report.steps for report in reports])
    counts = np.concatenate([report.counts for report in reports])
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
    reports = one.sent(LoadReport, lambda reports: steps_of(reports) >= 4)
    return {
        "said": [line for line in said if line["event"] == "tokens_counted_otherwise"],
        "tokens": np.concatenate([report.steps["tokens"] for report in reports]).tolist(),
    }


def elastic_scale_up(rank, size):
    """Two ranks run with elastic expert parallelism; a third joins, and vLLM gives it experts."""
    modules, device = engine.load(), torch.device("cpu")
    pair = [dist.new_group([0, 1]) for _ in range(4)]
    whole = [dist.new_group([0, 1, 2]) for _ in range(4)]
    plugin = VllmPlugin(toy_settings(group_timeout_s=3.0), engine.VERSION, PortLink)
    plugin.install()
    config, model_config = Config(use_async=False), engine.ModelConfig()
    config.enable_elastic_ep, config.elastic_ep_max_dp_size = True, 3
    groups, slots, redundant = (pair, 8, 2) if rank < 2 else (whole, 12, 6)
    config.data_parallel_size = slots // 4
    engine.GROUPS.ep, engine.GROUPS.eplb = (
        engine.group_of(*groups[:2]),
        engine.group_of(*groups[2:]),
    )
    model = engine.Model(modules, rank, slots // 4, redundant=redundant)
    state: Any = modules.state.EplbState(config, device)
    began = time.monotonic()
    with structlog.testing.capture_logs() as said:
        state.add_model(model, model_config)
    seconds = time.monotonic() - began
    model_state = state.model_states["toy-hash"]
    expanded = model_state.physical_to_logical_map_buffer.clone()
    if rank < 2:
        for _ in range(5):
            state.step(is_dummy=True)
    dist.broadcast(expanded, src=0)
    if rank < 2:  # What `switch_and_prepare` of vLLM's elastic_execute.py does.
        engine.GROUPS.ep, engine.GROUPS.eplb = (
            engine.group_of(*whole[:2]),
            engine.group_of(*whole[2:]),
        )
        state.reconfigure_physical_expert_slots(model_config, 12)
        model.num_physical_experts, model.num_redundant_experts = 12, 6
        communicator = state.create_communicator(model_config, engine.GROUPS.eplb)
        state.update_communicator(model_config, communicator)
    else:
        state.update_mapping(model_config, expanded)
        for tensor in (tensor for layer in model.expert_weights for tensor in layer):
            tensor.zero_()
    state.rearrange(use_last_expert_load=True)
    return {
        "agent": plugin.guests[state].agent is not None,
        "said": [line for line in said if line["event"] == "guest_not_started"],
        "seconds": seconds,
        "map": model_state.physical_to_logical_map.numpy().copy(),
        "wrong": model.wrong_slots(rank, model_state.physical_to_logical_map),
    }
