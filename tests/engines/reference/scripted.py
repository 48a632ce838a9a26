"""A rank process whose link follows a script instead of a controller.

`python -m tests.engines.reference.scripted CONFIG RANK`, started by the real supervisor.
The script is read from `script.json` in the run folder::

    {"seed": 7, "plans": 2, "uneven": true, "abort": [0], "stop_after": 1}

`fill` is the number of experts on a rank in a layer, and `homes`, by number of ranks, how many of
the first ranks hold every expert together. It is followed anew in each group of another size.
Every rank derives the same targets and waves from the seed. Each sends itself Prepare, and Commit
after its own yes; only the gate makes the ranks swap at the same step.
"""

import asyncio
import dataclasses
import json
import sys
from typing import Any

import numpy as np

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.engines.reference.__main__ import leave, log_json, read_config
from evenkeel_moe.engines.reference.model import original_expert
from evenkeel_moe.engines.reference.rank import run_rank
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    Leader,
    Prepare,
    QueryState,
    RankState,
    Vote,
    WaveOutcome,
)
from evenkeel_moe.wire.link import FlowControl, Registration, RegistrationOutcome, ReportAck
from tests.waiting import deadline

LEADER = Leader("script", 1)


def random_placement(shape, rng, uneven, fill=None, homes=None):
    """Return a valid placement; with `uneven`, the layers have different replica counts."""
    ranks, experts, layers = shape.num_ranks, shape.num_logical_experts, shape.num_layers
    average = fill or min(shape.pool_slots_per_rank // layers, shape.slots_per_rank)
    phy2log = np.full((layers, ranks, shape.slots_per_rank), EMPTY, np.int32)
    for layer in range(layers):
        # Layer 0 gives layer 1 one slot per rank, so that the sum fits the pool.
        filled = average + ((-1 if layer == 0 else 1) if uneven and layer < 2 else 0)
        order = rng.permutation(experts)
        owned = np.array_split(order, homes or ranks)
        for rank in range(ranks):
            own = owned[rank] if rank < len(owned) else order[:0]
            others = rng.permutation(np.setdiff1d(order, own))
            held = np.concatenate([own, others])[:filled]
            phy2log[layer, rank, :filled] = rng.permutation(held)
    return Placement(phy2log.reshape(layers, -1), ranks, experts)


class ScriptedLink:
    """A RankLink without a network: sends Prepare, Commit and Abort as the script says."""

    def __init__(self, config, script):
        self.config = config
        self.script = script
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.seen = []
        # The first call compiles a kernel, which may take longer than the whole run.
        rng = np.random.default_rng(0)
        initial = Placement.initial(config.shape)
        self.waves_between(initial, random_placement(config.shape, rng, False))

    def send(self, message, stream=None):
        self.seen.append(message)
        self.inbox.put_nowait(message)

    async def finish(self, message):
        self.send(message)

    async def wait_for(self, kind, where=lambda message: True):
        while True:
            message = await self.inbox.get()
            if isinstance(message, kind) and where(message):
                return message

    async def run(self, listener):
        hello = listener.hello()
        flow = FlowControl(report_interval_s=0.1)
        listener.received(1, Registration(RegistrationOutcome.ACCEPTED, 1.0, 5.0, flow))
        listener.received(1, QueryState(LEADER, want_placement=True, want_checksums=True))
        state = await self.wait_for(RankState)
        lineage = hello.lineage and [hello.lineage.generation, hello.lineage.rank]
        self.write("registered", steps=len(state.checksums), epoch=hello.epoch, lineage=lineage)
        placement, epoch = state.placement, int(state.epoch)
        for number in range(self.script["plans"]):
            rng = np.random.default_rng((self.script["seed"], epoch, number))
            target = random_placement(
                self.config.shape,
                rng,
                self.script.get("uneven", False),
                self.script.get("fill"),
                self.script.get("homes", {}).get(str(self.config.num_ranks)),
            )
            target.check(self.config.shape)
            for wave in self.waves_between(placement, target):
                key = WaveKey(hello.identity.generation, PlanId(f"plan-{number}"), wave.index, 1)
                abort = number in self.script.get("abort", [])
                if await self.drive(listener, key, wave, epoch, abort):
                    placement, epoch = placement.with_rows(wave.layers, wave.rows), epoch + 1
                if abort or epoch == self.script.get("stop_after"):
                    break
        self.write("script_done", epoch=epoch, digest=placement.digest)
        while True:
            message = await self.inbox.get()
            if hasattr(message, "steps"):
                listener.received(1, ReportAck(message.last_step))

    def waves_between(self, placement, target):
        """Return one wave per layer, in order: layer 0 frees the buffers that layer 1 fills."""
        shape = dataclasses.replace(self.config.shape, pool_slots_per_rank=None)
        topology, index = Topology.single_node(self.config.num_ranks), 0
        for layer in range(shape.num_layers):
            after = placement.with_rows((layer,), target.phy2log[layer : layer + 1])
            staging = self.config.staging_bytes
            for wave in schedule_waves(placement, after, shape, topology, staging):
                yield dataclasses.replace(wave, index=index)
                index += 1
            placement = after

    async def drive(self, listener, key, wave, epoch, abort):
        prepare = Prepare(
            LEADER, key, Epoch(epoch), wave, self.checksums(wave), batch_deadline_s=deadline(10)
        )
        listener.received(1, prepare)
        vote = await self.wait_for(Vote, lambda vote: vote.wave == key)
        self.write(
            "vote", plan_id=key.plan_id, wave_index=key.wave_index, yes=vote.yes, detail=vote.detail
        )
        if abort:
            listener.received(1, Abort(LEADER, key))
            answer = await self.wait_for(AbortAnswer, lambda m: m.wave == key and m.drained)
            assert answer.outcome is not WaveOutcome.SWAPPED
            return False
        if not vote.yes:
            raise RuntimeError(f"voted no: {vote}")
        listener.received(1, Commit(LEADER, key))
        ack = await self.wait_for(Ack, lambda ack: ack.wave == key)
        assert int(ack.epoch) == epoch + 1
        return True

    def checksums(self, wave):
        c = self.config
        values = [
            checksum(original_expert(c.seed, t.layer, t.logical_expert, c.d_model, c.d_ffn))
            for t in wave.transfers
        ]
        if self.script.get("wrong_checksum") == c.rank:
            values = [value ^ 1 for value in values]
        return tuple(values)

    def write(self, kind, **keys):
        with (self.config.folder / f"script-{self.config.rank}.jsonl").open("a") as file:
            line = {"kind": kind, "attempt": self.config.attempt, "ranks": self.config.num_ranks}
            file.write(json.dumps(line | keys) + "\n")


def main(path, rank):
    log_json()
    config = read_config(path, rank)
    script = json.loads((config.folder / "script.json").read_text())
    leave(run_rank(config, lambda config: ScriptedLink(config, script)))


if __name__ == "__main__":
    main(*sys.argv[1:])
