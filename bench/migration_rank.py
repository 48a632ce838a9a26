"""One rank of the bandwidth bench.

It copies the same bytes in turn as waves staged by an agent and by a bare batch_isend_irecv.

python -m bench.migration_rank RANK SIZE ROUNDS FOLDER; rank 0 writes FOLDER/bandwidth.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from evenkeel_moe.adapters.torch.groups import make_communicator
from evenkeel_moe.agent import Agent, AgentConfig
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.protocol.messages import (
    Ack,
    Commit,
    Leader,
    Prepare,
    QueryState,
    RankIdentity,
    RankState,
    Vote,
)
from tests.agent.fleet import PortLink

LAYERS, EXPERTS = 4, 16
HIDDEN, INTERMEDIATE = 1024, 512
"""Dimensions of one expert: two matrices in bfloat16 and a scale, 3 MiB."""
LEADER = Leader("bench", 1)
GENERATION = Generation("bench")
dist: Any = torch.distributed


def expert(layer: int, number: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of one expert, the same on every rank."""
    random = torch.Generator().manual_seed(layer * EXPERTS + number)
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (1,))
    return tuple(torch.randn(shape, generator=random).to(torch.bfloat16) for shape in shapes)


EXPERT_BYTES = sum(tensor.numel() * tensor.element_size() for tensor in expert(0, 0))


class Weights:
    """The weights in this rank's slots."""

    def __init__(self, placement: Placement, rank: int) -> None:
        per_rank = placement.slots_per_rank
        mine = placement.phy2log[:, rank * per_rank : (rank + 1) * per_rank]
        self._slots = {
            (layer, local): expert(layer, int(mine[layer, local]))
            for layer, local in np.ndindex(mine.shape)
        }
        self.asked_at = float("inf")
        """Monotonic seconds of the first request for tensors since this was set to infinity."""

    def tensors(self, layer: int, local_slot: int) -> tuple[torch.Tensor, ...]:
        if self.asked_at == float("inf"):
            self.asked_at = time.perf_counter()
        return self._slots[layer, local_slot]

    def reserve(self, _slots: object) -> bool:
        return True

    def release(self, _slots: object) -> None:
        return None


class Maps:
    """A stand-in for the engine's tables that only keeps the rows."""

    def build(self, layers: Any, rows: Any, epoch: int) -> object:
        return layers, rows, epoch

    def install(self, built: object) -> None:
        self.installed = built


class BenchRank:
    """An agent with this script as controller, and a process group for the bare copies."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size
        )
        self.rank, self.size = rank, size
        self.shape = ModelShape(LAYERS, EXPERTS, size, EXPERTS // size, 1, EXPERT_BYTES)
        base = Placement.initial(self.shape)
        # Each rank's experts move to the next rank: all bytes travel, and every rank sends as much
        # as it receives.
        turned = Placement(np.roll(base.phy2log, self.shape.slots_per_rank, axis=1), size, EXPERTS)
        self.placements = base, turned
        self.weights, self.link = Weights(base, rank), PortLink()
        # Written once, so that neither way of copying pays for the first use of the pages.
        self.landing = [
            [torch.ones_like(t) for t in expert(0, 0)]
            for _ in range(LAYERS * self.shape.slots_per_rank)
        ]
        store = dist.distributed_c10d._get_default_store()
        identity = RankIdentity(DeploymentId("bench"), EpRank(rank), GENERATION, 1)
        config = AgentConfig(
            identity,
            self.shape,
            "node",
            staging_bytes=LAYERS * EXPERTS * EXPERT_BYTES,
            poll_every=2,
            resolve_after=1,
        )
        self.agent = Agent(
            config,
            base,
            0,
            self.weights,
            Maps(),
            device=torch.device("cpu"),
            link=self.link,
            connect=lambda name, where: make_communicator(
                store, name, rank, size, device=where, timeout_s=60
            ),
        )
        assert self.link.ready.wait(20)
        self.link.say(QueryState(LEADER, want_checksums=True))
        self.checksums = self.link.expect(RankState).checksums

    def wave(self, turn: int) -> Wave:
        """Return the wave from the present placement to the other one on the given turn."""
        here, there = self.placements[turn % 2], self.placements[1 - turn % 2]
        nodes = Topology.single_node(self.size)
        (wave,) = schedule_waves(here, there, self.shape, nodes, None)
        return wave

    def staged_s(self, turn: int) -> float:
        """Stage and commit a wave; return the seconds from the first byte to the last rank's vote.

        The time starts at the first request for tensors, just before the first byte is sent.
        """
        wave = self.wave(turn)
        sums = tuple(self.checksums[t.layer * EXPERTS + t.logical_expert] for t in wave.transfers)
        key = WaveKey(GENERATION, PlanId(f"turn-{turn}"), 0, 1, Epoch(turn))
        dist.barrier()
        self.weights.asked_at = float("inf")
        self.link.say(Prepare(LEADER, key, Epoch(turn), wave, sums, 60.0))
        vote = self.link.expect(Vote)
        seconds = self._span(self.weights.asked_at, time.perf_counter())
        assert vote.yes, vote
        self.link.say(Commit(LEADER, key))
        while self.agent.epoch == turn:
            dist.barrier()
            self.agent.step_boundary()
        self.link.expect(Ack)
        return seconds

    def bare_s(self, turn: int) -> float:
        """Return the seconds of one batch_isend_irecv of the wave's copies into existing memory."""
        per_rank, operations, landing = self.shape.slots_per_rank, [], iter(self.landing)
        for copy in self.wave(turn).transfers:
            source, target = copy.src_slot // per_rank, copy.dst_slot // per_rank
            if source == self.rank:
                sent = self.weights.tensors(copy.layer, copy.src_slot % per_rank)
                operations += [dist.P2POp(dist.isend, tensor, target) for tensor in sent]
            if target == self.rank:
                operations += [dist.P2POp(dist.irecv, tensor, source) for tensor in next(landing)]
        dist.barrier()
        began = time.perf_counter()
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return self._span(began, time.perf_counter())

    def _span(self, began: float, ended: float) -> float:
        """Return the seconds from the first rank's start to the last rank's end.

        All processes of a machine share the clock.
        """
        ends = torch.tensor([-began, ended], dtype=torch.float64)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        return float(ends.sum())

    def measure(self, rounds: int) -> dict[str, Any]:
        """Measure both ways in turn, after one uncounted round."""
        ours, bare = [], []
        for turn in range(rounds + 1):
            bare.append(self.bare_s(turn))
            ours.append(self.staged_s(turn))
        nbytes = sum(copy.nbytes for copy in self.wave(0).transfers)
        return {"ours_s": ours[1:], "bare_s": bare[1:], "bytes": nbytes}


def main() -> None:
    """Run the bench as one rank."""
    rank, size, rounds, folder = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    bench = BenchRank(rank, size, folder)
    figures = bench.measure(rounds)
    if rank == 0:
        (folder / "bandwidth.json").write_text(json.dumps(figures))
    dist.barrier()
    bench.agent.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
