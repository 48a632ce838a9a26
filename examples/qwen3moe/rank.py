"""One rank: a small random Qwen3-MoE from `transformers`, its Evenkeel agent, and output checks."""

import time
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from evenkeel_moe.agent import (
    Agent,
    AgentConfig,
    CountingSide,
    DeploymentId,
    EpRank,
    Generation,
    GrpcRankLink,
    KvCache,
    ModelShape,
    Phase,
    Placement,
    RankIdentity,
    make_communicator,
)
from evenkeel_moe.engines.reference.requests import Lengths, draw_requests
from examples.qwen3moe.ep_model import spread_experts
from examples.qwen3moe.serving import Server

LAYERS, EXPERTS, TOP_K, SPARE = 4, 16, 4, 4
"""SPARE: slots of a rank in one layer for other experts, and its buffers for replicas."""
CACHE_BLOCKS = 12
"""Buffers of a rank that no expert may fill."""
REQUESTS, LENGTHS = 48, Lengths(prompt=24, output=8)
VOCABULARY, BATCH, LENGTH, TOKENS = 512, 4, 24, 64


def make_model() -> Any:
    """Return a model with the same random weights on every rank; nothing is downloaded."""
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config).eval()


def run(
    rank: int,
    size: int,
    store_port: int,
    controller: str,
    generation: str,
    limit_s: float,
    events: Any,
) -> None:
    """Serve until some steps after the experts have moved, or until the time is over."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", store_port, size, rank == 0)

    def connect(name: str, device: torch.device) -> Any:
        return make_communicator(store, name, rank, size, device=device, timeout_s=60.0)

    cpu = torch.device("cpu")
    group = connect("engine", cpu)
    shape = ModelShape(
        num_layers=LAYERS,
        num_logical_experts=EXPERTS,
        num_ranks=size,
        slots_per_rank=min(EXPERTS, EXPERTS // size + SPARE),
        top_k=TOP_K,
        bytes_per_expert=3 * 64 * 32 * 4,
        pool_slots_per_rank=LAYERS * EXPERTS // size + SPARE,
    )
    buffers = LAYERS * EXPERTS // size + SPARE + CACHE_BLOCKS
    begin = Placement.linear(shape)
    model, library_model = make_model(), make_model()
    probe = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        untouched = library_model(probe).logits
    blocks, slots, tables = spread_experts(model, rank, begin, buffers, group)
    asked = (
        replace(request, ids=request.ids % VOCABULARY)
        for request in islice(draw_requests((rank,), 1e9, LENGTHS), REQUESTS)
    )
    server = Server(model, slots, asked, LENGTHS.most, TOKENS)
    agent = Agent(
        AgentConfig(
            identity=RankIdentity(
                DeploymentId("qwen3moe"), EpRank(rank), Generation(generation), time.time_ns()
            ),
            shape=shape,
            node="this-machine",
            side=CountingSide.SOURCE,
            staging_bytes=4 << 20,
        ),
        begin,
        0,
        slots,
        tables,
        connect=connect,
        device=cpu,
        link=GrpcRankLink([controller], seed=rank),
    )
    agent.tell(KvCache(server.cache.token_bytes, server.kv_tokens * server.cache.token_bytes))
    # A few words are most of the traffic, so a few experts do most of the work.
    words = np.random.default_rng(11).permutation(VOCABULARY)
    share = 1.0 / np.arange(1, VOCABULARY + 1) ** 1.3
    rng = np.random.default_rng(rank)
    first, checks, moved_at, served, stop = None, 0, None, False, False
    step, deadline = 0, time.monotonic() + limit_s
    with torch.no_grad():
        while not stop:
            epoch = agent.epoch
            probing = step % 8 == 0
            tokens = probe.numel() if probing else server.step(step)
            if not tokens:  # Without requests too, a rank takes part in the exchange of every step.
                ids = words[rng.choice(VOCABULARY, (BATCH, LENGTH), p=share / share.sum())]
                model(torch.from_numpy(ids))
                tokens = ids.size
            if probing:
                logits = model(probe).logits
                if first is None:
                    first = logits.clone()
                    close = bool(torch.allclose(first, untouched, atol=1e-4))
                    events.put((rank, "start", {"as_untouched_model": close}))
                checks += 1
                if not torch.equal(logits, first):
                    events.put((rank, "differs", {"step": step, "epoch": epoch}))
            counts = np.stack([block.counts for block in blocks])
            agent.record(step, counts, epoch=epoch, tokens=tokens, phase=Phase.MIXED, dummy=probing)
            agent.step_boundary(step)
            if agent.epoch and moved_at is None:
                moved_at = step
                events.put((rank, "moved", {"step": step, "epoch": agent.epoch}))
            if not served and server.requests.all_ended:
                served = True
                events.put((rank, "served", server.summary(library_model)))
            moved = moved_at is not None and step > moved_at + 64
            done = time.monotonic() > deadline or (moved and served)
            step += 1
            stop = bool(group.all_gather(torch.tensor([int(done)])).any())
    held = agent.placement
    events.put(
        (
            rank,
            "end",
            {"steps": step, "checks": checks, "epoch": agent.epoch, "digest": held.digest},
        )
    )
    agent.close()
