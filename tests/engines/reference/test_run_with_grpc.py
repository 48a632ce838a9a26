"""Rank processes and a scripted controller over gRPC on loopback."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import grpc
import numpy as np
import pytest

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.protocol.messages import (
    Ack,
    Commit,
    Hello,
    Leader,
    Prepare,
    QueryState,
    RankState,
    Vote,
)
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.codec import decode_rank_message, encode_controller_message
from evenkeel_moe.wire.link import (
    FlowControl,
    Heartbeat,
    Registration,
    RegistrationOutcome,
    ReportAck,
)
from tests.forked.rank import fork_rank
from tests.waiting import deadline

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
LEADER = Leader("test", 1)


class OneWave(agent_pb2_grpc.RankLinkServicer):
    """Registers every rank, acknowledges reports, and leads the group through one wave."""

    def __init__(self, ranks):
        self.streams = {}
        self.hellos = {}
        self.locks: dict[Any, asyncio.Lock] = {}
        self.counts: dict[int, dict[int, Any]] = {rank: {} for rank in range(ranks)}
        self.messages = asyncio.Queue()
        self.counted = asyncio.Event()
        """Set once every rank has reported the same five steps."""

    async def Attach(self, requests, context):
        hello = None
        async for request in requests:
            message = decode_rank_message(request, hello)
            if isinstance(message, Hello):
                hello = message
                flow = FlowControl(0.1)
                await self.write(
                    context, Registration(RegistrationOutcome.ACCEPTED, 0.5, 5.0, flow)
                )
                self.hellos[hello.identity.rank] = hello
                self.streams[hello.identity.rank] = context
            if isinstance(message, LoadReport):
                for step, counts in zip(
                    message.steps["step"].tolist(), message.counts, strict=True
                ):
                    self.counts[message.rank][step] = counts.sum(axis=1)
                if len(self.common_steps()) >= 5:
                    self.counted.set()
                await self.write(context, ReportAck(message.last_step))
            assert hello is not None, "the first message of a stream is its Hello"
            await self.messages.put((hello.identity.rank, message))

    async def write(self, context, message):
        # A stream takes one write at a time.
        async with self.locks.setdefault(context, asyncio.Lock()):
            await context.write(encode_controller_message(message))

    async def tell_all(self, message):
        for context in self.streams.values():
            await self.write(context, message)

    def common_steps(self):
        """Return the steps that every rank reported, ascending."""
        return sorted(set.intersection(*(set(counts) for counts in self.counts.values())))

    async def all_of(self, kind):
        """Return one message of the kind from every rank."""
        got = {}
        while len(got) < len(self.counts):
            rank, message = await self.messages.get()
            if isinstance(message, kind):
                got[rank] = message
        return [got[rank] for rank in sorted(got)]

    async def lead(self, shape, staging_bytes):
        await self.all_of(Hello)
        await self.tell_all(QueryState(LEADER, want_placement=True, want_checksums=True))
        states = await self.all_of(RankState)
        base, checksums = states[0].placement, states[0].checksums
        assert all(state.placement == base and state.checksums == checksums for state in states)
        # Every rank's experts move to the next rank.
        rolled = np.roll(base.phy2log.reshape(shape.num_layers, shape.num_ranks, -1), 1, axis=1)
        target = Placement(
            rolled.reshape(base.phy2log.shape), shape.num_ranks, shape.num_logical_experts
        )
        [wave] = schedule_waves(
            base, target, fixed(shape), Topology.single_node(shape.num_ranks), staging_bytes
        )
        key = WaveKey(states[0].identity.generation, PlanId("roll"), 0, 1)
        table = np.array(checksums, np.uint64).reshape(shape.num_layers, shape.num_logical_experts)
        expected = tuple(int(table[t.layer, t.logical_expert]) for t in wave.transfers)
        await self.tell_all(
            Prepare(LEADER, key, states[0].epoch, wave, expected, batch_deadline_s=deadline(10))
        )
        votes = await self.all_of(Vote)
        assert all(vote.yes for vote in votes), votes
        await self.tell_all(Commit(LEADER, key))
        acks = await self.all_of(Ack)
        return target, acks


def fixed(shape):
    """Return the shape without a pool, because replaced experts need no free buffer here."""
    return dataclasses.replace(shape, pool_slots_per_rank=None)


@contextlib.asynccontextmanager
async def controller(ranks):
    server, servicer = grpc.aio.server(), OneWave(ranks)
    agent_pb2_grpc.add_RankLinkServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_ranks_report_move_and_swap_over_grpc(tmp_path):
    async with controller(2) as (servicer, address):
        config = RankConfig(
            run_folder=str(tmp_path), num_ranks=2, layers=2, experts=8, tokens_per_step=32,
            steps=0, min_step_s=0.01, controllers=(address,), staging_bytes=4 << 20,
        )  # fmt: skip
        supervisor = Supervisor(config, grace_s=deadline(10), start_rank=fork_rank)
        supervisor.start()
        try:
            async with asyncio.timeout(deadline(60)):
                target, acks = await servicer.lead(config.shape, config.staging_bytes)
                # Steps are reported in batches, so the plan may end before the first report.
                await servicer.counted.wait()
            assert {int(ack.epoch) for ack in acks} == {1}
            assert {ack.placement_digest for ack in acks} == {target.digest}
        finally:
            report = await asyncio.to_thread(supervisor.stop)
            async with asyncio.timeout(deadline(10)):
                while not all(beat.stopping for beat in await servicer.all_of(Heartbeat)):
                    pass
        assert report.ok, report
        assert report.codes == (0, 0)
        # R19: over the slots of all ranks, every token counts top_k times in each layer.
        first, second = servicer.counts[0], servicer.counts[1]
        common = servicer.common_steps()
        assert common[0] == 0
        for step in common:
            assert (first[step] + second[step]).tolist() == [2 * 32 * config.top_k] * config.layers
