"""Ranks that only report: deployments of DeepSeek-V3's shape that send what their agents send."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from bench.ingest_raw import METHOD
from evenkeel_moe.adapters.grpc.rank_link import LinkTiming, channel_options
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire import link
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.to_rank import decode_controller_message

BATCH = 16
"""Steps that a message carries, unless a scale says otherwise."""
TOKENS = 64
"""Tokens of one rank in one step."""
HEARTBEAT = link.Heartbeat(0, free_bytes=1 << 40, staging_bytes=1 << 37)


@dataclass(frozen=True)
class Scale:
    """The size of a fleet."""

    deployments: int = 10
    ranks: int = 32
    layers: int = 58
    slots_per_rank: int = 9
    steps_per_s: float = 50.0
    steps: int = BATCH
    """Steps of a message."""
    experts: int = 0
    """Experts of a layer; 0: one slot of each rank is redundant."""

    @property
    def shape(self) -> ModelShape:
        experts = self.experts or self.ranks * (self.slots_per_rank - 1)
        return ModelShape(self.layers, experts, self.ranks, self.slots_per_rank, 8, 44_000_000)


def identity_of(deployment: str, rank: int) -> m.RankIdentity:
    """Return the identity of a rank that starts now."""
    return m.RankIdentity(DeploymentId(deployment), EpRank(rank), Generation("g"), time.time_ns())


def hello_of(
    identity: m.RankIdentity, placement: Placement, shape: ModelShape, term: int = 0
) -> m.Hello:
    """Return the Hello of a rank, eight of which are on a node."""
    return m.Hello(
        identity, shape, f"node-{identity.rank // 8}", "", Epoch(0), placement.digest, 1, "same",
        HEARTBEAT.free_bytes, HEARTBEAT.staging_bytes, "gate", highest_term=term,
    )  # fmt: skip


def state_of(identity: m.RankIdentity, placement: Placement, query: m.QueryState) -> m.RankState:
    """Return the answer of an idle rank to a query."""
    cells = placement.num_layers * placement.num_logical_experts
    return m.RankState(
        identity, m.ParticipantState.IDLE, None, Epoch(0), placement.digest, 1, True, None, None,
        placement=placement if query.want_placement else None,
        checksums=tuple(range(1, cells + 1)) if query.want_checksums else None,
        highest_term=query.leader.term, step=0, query=query.query,
    )  # fmt: skip


def report_of(identity: m.RankIdentity, steps: Any, counts: Any) -> LoadReport:
    """Return the report of a rank."""
    return LoadReport(
        identity.deployment, identity.generation, identity.rank, identity.incarnation,
        CountingSide.DESTINATION, steps, counts,
    )  # fmt: skip


class ReportingRank:
    """One stream. Its reports differ only in their step numbers, so that sending costs little."""

    def __init__(
        self, deployment: str, rank: int, scale: Scale, counts, placement: Placement
    ) -> None:
        self.identity = identity_of(deployment, rank)
        self.scale, self.placement = scale, placement
        self.highest = -1
        self.refused = 0
        self.reasons: set = set()
        self.steps = step_table(
            StepMeta(step, 0, Phase.DECODE, TOKENS) for step in range(scale.steps)
        )
        self.wire = encode_rank_message(report_of(self.identity, self.steps, counts))
        self.writing = asyncio.Lock()
        self.reader: asyncio.Task[None] | None = None
        self.beats: asyncio.Task[None] | None = None

    async def connect(self, address: str, raw: bool) -> None:
        self.channel = grpc.aio.insecure_channel(address, channel_options(LinkTiming()))
        attach = self.channel.stream_stream(
            METHOD,
            request_serializer=agent_pb2.RankMessage.SerializeToString,
            response_deserializer=None if raw else agent_pb2.ControllerMessage.FromString,
        )
        self.call: Any = attach()
        if raw:
            await self.call.read()
            self.reader = asyncio.create_task(self._drain())
            return
        await self._send(hello_of(self.identity, self.placement, self.scale.shape))
        wire: Any = await self.call.read()
        answer = decode_controller_message(wire)
        assert (
            isinstance(answer, link.Registration)
            and answer.outcome is link.RegistrationOutcome.ACCEPTED
        ), answer
        self.reader = asyncio.create_task(self._listen())
        self.beats = asyncio.create_task(self._beat(answer.heartbeat_interval_s))

    async def _beat(self, interval_s: float) -> None:
        while True:
            # Reports show that the rank is alive, so the link sends one heartbeat of four.
            await asyncio.sleep(4 * interval_s)
            await self._send(HEARTBEAT)

    async def _drain(self) -> None:
        while await self.call.read() is not grpc.aio.EOF:
            pass

    async def _listen(self) -> None:
        wire: Any
        while (wire := await self.call.read()) is not grpc.aio.EOF:
            message = decode_controller_message(wire)
            if isinstance(message, link.ReportAck):
                self.highest = max(
                    self.highest, -1 if message.highest_step is None else message.highest_step
                )
                self.refused += message.rejected_steps
                if message.reason is not None:
                    self.reasons.add(message.reason)
            elif isinstance(message, m.QueryState):
                await self._send(state_of(self.identity, self.placement, message))

    async def _send(self, message) -> None:
        async with self.writing:
            await self.call.write(encode_rank_message(message))

    def message(self, batch: int) -> agent_pb2.RankMessage:
        """Return the message of a batch."""
        steps = self.scale.steps
        self.steps["step"] = np.arange(batch * steps, (batch + 1) * steps)
        self.wire.load_report.step_table = self.steps.tobytes()
        return self.wire

    async def report(self, batch: int) -> None:
        """Send the message of a batch."""
        async with self.writing:
            await self.call.write(self.message(batch))

    async def close(self) -> None:
        if self.reader is not None:
            self.call.cancel()
            tasks = [task for task in (self.reader, self.beats) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.channel.close()


class Fleet:
    """All deployments of a scale."""

    def __init__(self, scale: Scale, *, seed: int = 0) -> None:
        self.scale = scale
        self.placement = Placement.initial(scale.shape)
        self.names = [f"d{number}" for number in range(scale.deployments)]
        counts = draw_counts(scale, self.placement, seed)
        width = scale.slots_per_rank
        self.ranks = [
            ReportingRank(
                name, rank, scale, counts[:, :, rank * width : (rank + 1) * width], self.placement
            )
            for name in self.names
            for rank in range(scale.ranks)
        ]
        self.due_at: dict[int, float] = {}
        """Monotonic seconds at which each batch was due: its last step ended then."""

    async def connect(self, address: str, raw: bool = False) -> None:
        for first in range(0, len(self.ranks), 32):
            await asyncio.gather(
                *(rank.connect(address, raw) for rank in self.ranks[first : first + 32])
            )

    async def serve(self, batches: int, first: int = 0) -> float:
        """Report at the fleet's pace and return the seconds it took.

        They exceed the planned time if the fleet could not keep its pace.
        """
        period = self.scale.steps / self.scale.steps_per_s
        began = time.monotonic()
        for number in range(batches):
            due = self.due_at[first + number] = began + number * period
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*(rank.report(first + number) for rank in self.ranks))
        return time.monotonic() - began

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.ranks))


def draw_counts(scale: Scale, placement: Placement, seed: int):
    """Return (steps, L, S) int64 tokens of each slot.

    The load of experts is lognormal; every token is counted top_k times (R19).
    """
    rng = np.random.default_rng(seed)
    shape = scale.shape
    popularity = rng.lognormal(0.0, 0.6, (shape.num_layers, shape.num_logical_experts))
    weight = np.zeros((shape.num_layers, shape.num_slots))
    for layer, row in enumerate(placement.phy2log):
        copies = np.bincount(row[row >= 0], minlength=shape.num_logical_experts)
        weight[layer] = np.where(row >= 0, popularity[layer, row] / copies[row], 0.0)
    weight /= weight.sum(axis=1, keepdims=True)
    total = shape.top_k * TOKENS * shape.num_ranks
    return np.stack([rng.multinomial(total, weight) for _ in range(scale.steps)]).astype(np.int64)
