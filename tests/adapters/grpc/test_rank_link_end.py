"""A rank sends nothing more while its last message is on the way."""

import asyncio

import structlog

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.wire.link import Heartbeat
from tests.adapters.grpc.test_rank_link import ACCEPTED, FAST, Server, running, serving
from tests.waiting import deadline, until


class Lingering(Server):
    """Keeps the stream open after the rank has closed its half, until the test lets it end."""

    def __init__(self):
        super().__init__([ACCEPTED])
        self.may_end = asyncio.Event()

    async def Attach(self, requests, context):
        await super().Attach(requests, context)
        await self.may_end.wait()


async def test_messages_after_the_last_one_are_dropped_and_fail_nothing():
    """An agent reports loads until its thread ends, also after the last heartbeat."""
    last, late = Heartbeat(9, 1, 2, stopping=True), Heartbeat(10, 1, 2)
    servicer = Lingering()
    async with serving(servicer=servicer) as (server, address):
        link = GrpcRankLink([address], timing=FAST)
        async with running(link) as listener:
            await until(lambda: listener.got)
            with structlog.testing.capture_logs() as said:
                finishing = asyncio.create_task(link.finish(last))
                await until(server.closed.is_set)
                for _ in range(3):
                    link.send(late)
                    await asyncio.sleep(0.02)
                servicer.may_end.set()
                await asyncio.wait_for(finishing, deadline(10))
            assert [line["event"] for line in said if line["log_level"] == "error"] == []
            assert server.of(Heartbeat)[-1] == last
