"""Connections end by age: the agent's link and reporter reconnect without losing a step.

No step is counted twice either.
"""

import asyncio

import numpy as np
import pytest

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.agent.reporter import Reporter
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.wire import link
from tests.integration.controller_rig import SHAPE, Controller, Group, Rank
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STEPS = 300


class LinkedRank(Rank):
    """A rank with the agent's link: a `ports.LinkListener` with recorder and reporter."""

    def __init__(self, group: "LinkedGroup", rank: int) -> None:
        super().__init__(group, rank)
        self.later = group.later
        self.streams: list[int] = []
        self.lost_streams: list[int] = []
        self.recorder = Recorder(2 * STEPS, SHAPE.num_layers, SHAPE.slots_per_rank)

    def begin(self, address: str) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
        self.link = GrpcRankLink([address], timing=LinkTiming(backoff_min_s=0.02), seed=self.rank)
        self.reporter = Reporter(self.recorder, self.identity, CountingSide.DESTINATION, self.link)
        return asyncio.create_task(self.link.run(self)), asyncio.create_task(self.reporter.run())

    def heartbeat(self) -> link.Heartbeat:
        return link.Heartbeat(self.group.step, 10_000, 1 << 20)

    def received(self, stream: int, message) -> None:
        match message:
            case link.Registration():
                self.streams.append(stream)
                self.reporter.registered(message.flow, message.highest_step)
            case link.ReportAck():
                self.reporter.acknowledged(message.highest_step)
            case link.FlowControl():
                self.reporter.paced(message)
            case link.NotLeader():
                return
            case _:
                self.later(self._hear(message))

    def lost(self, stream: int) -> None:
        self.lost_streams.append(stream)
        self.reporter.lost()

    async def send(self, message) -> None:
        self.link.send(message, self.streams[-1])


class LinkedGroup(Group):
    def __init__(self) -> None:
        super().__init__()
        self.linked = [LinkedRank(self, rank) for rank in range(SHAPE.num_ranks)]
        self.ranks = list[Rank](self.linked)
        self.tokens = 0

    def later(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def begin(self, address: str) -> None:
        for rank in self.linked:
            self._tasks |= set(rank.begin(address))

    def record_one(self) -> None:
        for rank, report in zip(self.linked, self.route(1), strict=True):
            (meta,) = report.steps
            rank.recorder.record(
                meta["step"],
                report.counts[0],
                epoch=meta["epoch"],
                tokens=meta["tokens"],
                phase=Phase.DECODE,
            )
            self.tokens += int(report.counts.sum())


@pytest.mark.slow
async def test_a_stream_cut_by_age_is_opened_again_and_every_step_counts_once(tmp_path):
    ages = {"GRPC__MAX_CONNECTION_AGE_S": "1", "GRPC__MAX_CONNECTION_AGE_GRACE_S": "0.3"}
    async with Controller(tmp_path / "data", **ages) as controller, LinkedGroup() as group:
        group.begin(controller.address)
        await until(lambda: controller.state("ready"))
        for _ in range(STEPS):
            group.record_one()
            await asyncio.sleep(0.01)  # The length of a step.
        await until(lambda: all(len(rank.streams) >= 4 for rank in group.linked), within_s=60)

        accepted = 'evenkeel_report_steps_total{deployment="demo"}'
        expected = STEPS * SHAPE.num_ranks

        async def all_counted() -> bool:
            return (await controller.metrics()).get(accepted) == expected

        await until(all_counted, within_s=60)
        assert await whole_window(controller) == group.tokens
        # Later streams bring nothing again: what was acknowledged is gone from the reporters.
        streams = [len(rank.streams) for rank in group.linked]
        await until(
            lambda: all(len(r.streams) > n for r, n in zip(group.linked, streams, strict=True))
        )
        metrics = await controller.metrics()
        assert metrics[accepted] == expected
        rejected = {
            name for name in metrics if name.startswith("evenkeel_report_steps_rejected_total")
        }
        labels = f'{{deployment="demo",reason="{Reason.DUPLICATE_STEP}"}}'
        again = f"evenkeel_report_steps_rejected_total{labels}"
        # A report whose answer was lost is sent twice; its step numbers identify it.
        assert rejected <= {again}
        assert not any(name.startswith("evenkeel_report_steps_dropped_total") for name in metrics)
        assert await whole_window(controller) == group.tokens
        assert await controller.state("ready")
        # No rank was taken for lost while it moved.
        assert not controller.events("rank_lost")
        for rank in group.linked:
            assert rank.lost_streams == rank.streams[: len(rank.lost_streams)]


async def whole_window(controller: Controller) -> int:
    """Tokens of the decode window, which must hold every step."""
    status = await controller.status()
    assert (status["step"], status["window_steps"]) == (STEPS - 1, STEPS)
    load = (await controller.http.get("/v1/deployments/demo/load")).json()
    decode = load["phases"]["decode"]
    return round(float(np.sum(decode["tokens_per_expert"])) * decode["steps"])


async def test_age_zero_leaves_streams_alone(tmp_path):
    """The counterpart: the same group moves only because of the setting."""
    ages = {"GRPC__MAX_CONNECTION_AGE_S": "0", "GRPC__MAX_CONNECTION_AGE_GRACE_S": "0.3"}
    async with Controller(tmp_path / "data", **ages) as controller, LinkedGroup() as group:
        group.begin(controller.address)
        await until(lambda: controller.state("ready"))
        await asyncio.sleep(1.0)  # A period in which no stream may end.
        assert [len(rank.streams) for rank in group.linked] == [1] * SHAPE.num_ranks
