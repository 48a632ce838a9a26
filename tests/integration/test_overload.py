"""Clients that flood the controller or send invalid data, and a host that is overloaded."""

import asyncio
import itertools
import os
import random
import signal

import grpc
import psutil
import pytest

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire import link
from evenkeel_moe.wire.from_rank import encode_rank_message
from tests.adapters.serving import Listener
from tests.chaos import hostile
from tests.integration.controller_rig import Controller, Group, Rank
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def ended_with(call) -> grpc.aio.AioRpcError:
    """The error a call is ended with."""
    try:
        while await asyncio.wait_for(call.read(), 20) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the stream ended without an error")


def hint_s(error: grpc.aio.AioRpcError | grpc.Call) -> float:
    return int(dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"]) / 1000


async def test_refused_streams_are_sent_a_time_to_retry(tmp_path):
    async with Controller(tmp_path, GRPC__MAX_STREAMS="6") as controller, Group() as group:
        await group.join(controller)
        async with grpc.aio.insecure_channel(controller.address) as channel:
            calls = [agent_pb2_grpc.RankLinkStub(channel).Attach() for _ in range(5)]
            for number, call in enumerate(calls):
                hello = Group(f"other-{number}").ranks[0].hello()
                await call.write(encode_rank_message(hello))
            # Which two find room is not said: streams may arrive in any order.
            ends = [asyncio.create_task(ended_with(call)) for call in calls]
            first = itertools.islice(asyncio.as_completed(ends), 3)
            errors = [await end for end in first]
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert all("6 streams are open" in (error.details() or "") for error in errors)
            assert all(1.0 <= hint_s(error) <= 10.0 for error in errors)
            for call in calls:
                call.cancel()
        # Who was there is not touched, and there is room again.
        assert all(not rank.call.done() for rank in group.ranks)
        await group.ranks[0].close()
        await until(lambda: _let_in(group.ranks[0], controller))


async def _let_in(rank, controller):
    try:
        answer = await rank.connect(controller.address)
    except grpc.aio.AioRpcError:
        await rank.channel.close()
        return False
    return isinstance(answer, link.Registration)


async def test_a_link_waits_as_long_as_a_full_server_asks(unused_tcp_port):
    attempts: list[float] = []

    async def attach(_requests, context):
        attempts.append(asyncio.get_running_loop().time())
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("grpc-retry-pushback-ms", "1000"),)
        )

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(attach)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("evenkeel.v1.RankLink", {"Attach": handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{unused_tcp_port}")
    await server.start()

    # It would come back within milliseconds, were it not asked to wait.
    timing = LinkTiming(backoff_min_s=0.001, backoff_max_s=0.001)
    running = asyncio.create_task(
        GrpcRankLink([f"127.0.0.1:{unused_tcp_port}"], timing=timing).run(Listener())
    )
    try:
        await until(lambda: len(attempts) >= 3)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)
    waits = [after - before for before, after in zip(attempts, attempts[1:], strict=False)]
    assert min(waits) >= 1.0


async def test_a_flood_is_cut_off_and_costs_no_memory(tmp_path):
    async with (
        Controller(
            tmp_path, ADVANCED__MAX_MESSAGES_PER_S="100", INGEST__FORGET_AFTER_S="2"
        ) as controller,
        Group() as group,
    ):
        await group.join(controller)
        await group.serve(64)
        port, rest = controller.ports["grpc"], controller.ports["rest"]
        process = psutil.Process(controller.process.pid)
        # Once round everything, for what is only ever loaded once.
        await hostile.main(port, rest, 2.0, seed=0)
        before = process.memory_info().rss

        stranger = Rank(Group("stranger"), 0)
        await stranger.connect(controller.address)
        stranger.reader.cancel()
        await asyncio.gather(stranger.reader, return_exceptions=True)
        await stranger.close()
        flooding = await asyncio.to_thread(_flood, controller.address)
        assert flooding.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "100 messages a second" in (flooding.details() or "")
        assert hint_s(flooding) >= 1.0

        await hostile.main(port, rest, 8.0, seed=1)
        assert controller.events("rank_too_fast")
        grown = process.memory_info().rss - before
        print(f"{grown / 1e6:.1f} MB more after ten seconds of abuse, of {before / 1e6:.0f}")
        assert grown < 64e6

        # The real ranks noticed nothing, and nothing of the others stays.
        assert all(not rank.call.done() for rank in group.ranks)
        await group.serve(8)
        await until(lambda: controller.counted(72))
        await until(lambda: _only_ours(controller), within_s=30)
        assert not controller.failures() and not controller.events("rank_stream_failed")
        assert not [line for line in controller.noise if "Traceback" in line]


def _flood(address) -> grpc.Call:
    """Send Hello and then more than is allowed; return the call after the server ended it.

    The blocking client is used because a failed write hides the server's last message in asyncio's.
    """
    messages = [encode_rank_message(Group("flooder").ranks[0].hello())]
    messages += [encode_rank_message(link.Heartbeat(1, 2, 3))] * 1000
    with grpc.insecure_channel(address) as channel:
        call = agent_pb2_grpc.RankLinkStub(channel).Attach(iter(messages), timeout=deadline(20))
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            return call
    raise AssertionError("the stream ended without an error")


async def _only_ours(controller):
    series = await controller.metrics()
    return not [
        name for name in series if "deployment=" in name and 'deployment="demo"' not in name
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_reports_become_rarer_when_the_host_cannot_keep_up_and_frequent_again(tmp_path):
    async with (
        Controller(tmp_path, INGEST__REPORT_INTERVAL_S="0.5") as controller,
        Group() as group,
    ):
        told: list[link.FlowControl] = []

        class Listening(Rank):
            async def _hear(self, message) -> None:
                if isinstance(message, link.FlowControl):
                    told.append(message)
                await super()._hear(message)

        group.ranks[0] = Listening(group, 0)
        await group.join(controller)
        await group.serve(16)
        assert group.ranks[0].answer.flow.report_interval_s == 0.5

        # Like a crowded host, let the process run for only about a tenth of each second. The sleeps
        # are the lengths of the stops and runs.
        async def starve():
            rng = random.Random(1)
            while not (told and told[-1].stride > 1):
                os.kill(controller.process.pid, signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.6, 0.9))
                os.kill(controller.process.pid, signal.SIGCONT)
                await asyncio.sleep(0.1)

        try:
            await asyncio.wait_for(starve(), deadline(45))
        finally:
            os.kill(controller.process.pid, signal.SIGCONT)
        # A replica that lost its lease meanwhile repeats what holds.
        intervals = list(dict.fromkeys(flow.report_interval_s for flow in told))
        assert [seconds for seconds in intervals if seconds > 0.5] == [1.0, 2.0, 4.0]
        flow = told[-1]
        assert (flow.report_interval_s, flow.stride) == (4.0, 2)

        # A rank that connects now gets the same; sampled steps complete without the others (R18).
        registration = await _registered(group, controller)
        assert registration.flow.stride == flow.stride
        first = flow.from_step + flow.from_step % 2
        group.step = max(group.step, first)
        before = (await controller.status())["window_steps"]
        reports = group.route(8)
        for rank, report in zip(group.ranks, reports, strict=True):
            await rank.send(report)
        await until(lambda: controller.counted(before + 4))
        assert (await controller.status())["window_steps"] == before + 4
        await until(lambda: told[-1].stride == 1, within_s=60)


async def _registered(group, controller) -> link.Registration:
    await group.ranks[1].close()
    await group.ranks[1].connect(controller.address)
    assert isinstance(group.ranks[1].answer, link.Registration)
    return group.ranks[1].answer
