"""One rank of the toy engine with its Evenkeel agent, and the check that no output changed."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from evenkeel_moe.adapters.processes.child_process import die_with_parent
from evenkeel_moe.agent import (
    Agent,
    AgentConfig,
    Communicator,
    CountingSide,
    DeploymentId,
    DeviceRecorder,
    EpRank,
    GateFailed,
    Generation,
    GrpcRankLink,
    ModelShape,
    Phase,
    Placement,
    RankIdentity,
    make_communicator,
)
from examples.join.engine import (
    BATCH,
    BYTES_PER_EXPERT,
    EXPERTS,
    LAYERS,
    TOP_K,
    WORDS,
    ExpertSlots,
    RoutingTables,
    ToyEngine,
)

CPU = torch.device("cpu")
STEP_S = 0.005
"""Pause after a step: a real step takes longer, and the planner needs a processor too."""


def shape_of(size: int) -> ModelShape:
    """Return the shape of the deployment: one redundant slot on each rank."""
    return ModelShape(
        num_layers=LAYERS,
        num_logical_experts=EXPERTS,
        num_ranks=size,
        slots_per_rank=EXPERTS // size + 1,
        top_k=TOP_K,
        bytes_per_expert=BYTES_PER_EXPERT,
    )


def run(
    parent: int,
    rank: int,
    size: int,
    store_port: int,
    controller: str,
    generation: str,
    limit_s: float,
    events: Any,
    forget_hook: bool = False,
) -> None:
    """Serve until some steps after the experts have moved, or until the time is over."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    distributed: Any = torch.distributed  # its stubs do not export TCPStore
    store = distributed.TCPStore("127.0.0.1", store_port, size, rank == 0)

    def connect(name: str, device: torch.device) -> Communicator:
        return make_communicator(store, name, rank, size, device=device, timeout_s=60.0)

    shape = shape_of(size)
    placement = Placement.initial(shape)
    experts = ExpertSlots(placement, rank)
    tables = RoutingTables(placement, epoch=0)
    group = connect("engine", CPU)
    engine = ToyEngine(rank, experts, tables, group)
    agent = Agent(
        AgentConfig(
            identity=RankIdentity(
                DeploymentId("toy"), EpRank(rank), Generation(generation), time.time_ns()
            ),
            shape=shape,
            node="this-machine",
            side=CountingSide.DESTINATION,
            staging_bytes=1 << 20,
        ),
        placement,
        tables.epoch,
        experts,
        tables,
        connect=connect,
        device=CPU,
        link=GrpcRankLink([controller], seed=rank),
        slots_written=None if forget_hook else experts.fuse,
        probe=experts.probe,
    )
    # An engine would size its KV cache here: the agent's memory has been taken.
    recorder = DeviceRecorder(agent.record, EXPERTS)
    detail: dict[str, Any] = {"steps": 0, "checked": 0, "wrong": 0, "left": ""}
    try:
        serve(engine, agent, recorder, group, limit_s, detail)
    except GateFailed as error:
        detail["left"] = str(error)
    except RuntimeError as error:  # a collective of the engine fails once a peer has left
        detail["left"] = f"lost a peer: {error}"
    end = {"epoch": agent.epoch, "digest": agent.placement.digest, "trouble": agent.trouble}
    events.put((rank, "end", {**detail, **end}))
    agent.close()


def serve(
    engine: ToyEngine,
    agent: Agent,
    recorder: DeviceRecorder,
    group: Communicator,
    limit_s: float,
    detail: dict[str, Any],
) -> None:
    """Run steps; every eighth is compared with the model on one rank, bit for bit."""
    traffic = Traffic(engine.rank)
    step, moved_at, deadline = 0, None, time.monotonic() + limit_s
    stop = False
    while not stop:
        words = traffic.batch(step)
        idle = bool((words < 0).all())
        output = engine.step(words)
        recorder.record(
            step,
            engine.counts,
            epoch=agent.epoch,
            tokens=int((words >= 0).sum()),
            phase=Phase.DECODE,
            dummy=idle,
        )
        agent.step_boundary(step)
        if step % 8 == 0:
            detail["checked"] += 1
            same = torch.equal(output[words >= 0], engine.step(words, alone=True)[words >= 0])
            detail["wrong"] += not same
        time.sleep(STEP_S)
        if agent.epoch and moved_at is None:
            moved_at = step
        step += 1
        detail["steps"] = step
        done = time.monotonic() > deadline or (moved_at is not None and step > moved_at + 64)
        stop = bool(group.all_gather(torch.tensor(int(done))).any())


class Traffic:
    """Words of which a few are most of the traffic, so that a few experts do most of the work."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.words = np.random.default_rng(11).permutation(WORDS)
        share = 1.0 / np.arange(1, WORDS + 1) ** 1.3
        self.share = share / share.sum()
        self.rng = np.random.default_rng(rank)

    def batch(self, step: int) -> Tensor:
        """Return (BATCH,) words; -1 throughout where the rank has no request."""
        if step % 5 == self.rank + 1:
            return torch.full((BATCH,), -1)
        return torch.from_numpy(self.words[self.rng.choice(WORDS, BATCH, p=self.share)])
