"""One rank of the agent bench; times every agent call while it reports to a real controller.

python -m bench.agent_rank RANK SIZE STEPS FOLDER ADDRESS; writes FOLDER/calls-RANK.npz.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.adapters.torch.groups import make_communicator
from evenkeel_moe.agent import Agent, AgentConfig
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import RankIdentity
from tests.agent.ranks import EXPERT_BYTES, ToyMaps, ToyWeights

LAYERS, EXPERTS_PER_RANK, TOP_K = 58, 9, 8
"""The sizes of one rank of DeepSeek-V3 on 32 ranks."""
POLL_EVERY, RESOLVE_AFTER = 8, 4
"""K and D, the agent's defaults."""
TOKENS = 256
"""Tokens one rank routes per step."""
STEP_S = 0.005
RING_STEPS = 1024
dist: Any = torch.distributed


def make_agent(rank: int, size: int, address: str) -> Agent:
    """Return an agent over toy weights, since only its calls are timed. Collective."""
    shape = ModelShape(LAYERS, EXPERTS_PER_RANK * size, size, EXPERTS_PER_RANK, TOP_K, EXPERT_BYTES)
    placement = Placement.initial(shape)
    identity = RankIdentity(
        DeploymentId("bench"), EpRank(rank), Generation("bench"), time.time_ns()
    )
    config = AgentConfig(
        identity,
        shape,
        "node",
        staging_bytes=1 << 20,
        poll_every=POLL_EVERY,
        resolve_after=RESOLVE_AFTER,
        ring_steps=RING_STEPS,
    )
    store = dist.distributed_c10d._get_default_store()
    return Agent(
        config,
        placement,
        0,
        ToyWeights(placement, rank),
        ToyMaps(placement),
        device=torch.device("cpu"),
        link=GrpcRankLink((address,), seed=rank),
        connect=lambda name, where: make_communicator(
            store, name, rank, size, device=where, timeout_s=60
        ),
    )


def forward(matrix: torch.Tensor, seconds: float) -> None:
    """Keep the thread busy, as a forward pass does that launches kernels and spins on a stream."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.mm(matrix, matrix)


class BareStore:
    """The minimum work of any recorder: copies a row of counts into a ring of the agent's size."""

    def __init__(self) -> None:
        self._rows = np.ones((RING_STEPS, LAYERS, EXPERTS_PER_RANK), np.int64)
        self._written = 0

    def record(self, counts: np.ndarray) -> None:
        self._rows[self._written % len(self._rows)] = counts
        self._written += 1


def time_calls(agent: Agent, steps: int) -> dict[str, np.ndarray]:
    """Return the seconds of each call, (steps,) each; the ranks step together.

    The first call after a forward pass finds cold caches, so each step times only one of the two:
    `record` on even steps, the bare store on odd steps. The other one is NaN. Each step has its
    own array of counts, as in engines, because `record` keeps it.
    """
    rng = np.random.default_rng(0)
    shares = np.full(EXPERTS_PER_RANK, 1 / EXPERTS_PER_RANK)
    counts = rng.multinomial(TOKENS * TOP_K, shares, (16, LAYERS))
    record, bare, boundary = np.full(steps, np.nan), np.full(steps, np.nan), np.zeros(steps)
    store = BareStore()
    beat, matrix = torch.zeros(1), torch.randn(384, 384)
    for step in range(steps):
        forward(matrix, STEP_S)
        routed, epoch, phase = counts[step % 16].copy(), agent.epoch, Phase.DECODE
        dist.all_reduce(beat)
        if step % 2:
            began = time.perf_counter()
            store.record(routed)
            bare[step] = time.perf_counter() - began
        began = time.perf_counter()
        agent.record(step, routed, epoch=epoch, tokens=TOKENS, phase=phase)
        recorded = time.perf_counter()
        if step % 2 == 0:
            record[step] = recorded - began
        agent.step_boundary()
        boundary[step] = time.perf_counter() - recorded
    return {"record": record, "bare_store": bare, "boundary": boundary}


def main() -> None:
    """Run the bench as one rank."""
    rank, size, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder, address = Path(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size
    )
    agent = make_agent(rank, size, address)
    calls = time_calls(agent, steps)
    np.savez(folder / f"calls-{rank}.npz", **calls)  # type: ignore[arg-type]
    dist.barrier()
    agent.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
