"""A rank's link bounds what a controller, whoever it is, can make it do."""

import asyncio
import dataclasses
import time

import grpc
import pytest
import structlog

from evenkeel_moe.adapters.grpc import rank_link
from evenkeel_moe.adapters.grpc.controller_addresses import ControllerAddresses
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.errors import Reason
from evenkeel_moe.protocol.messages import Hello, Leader, QueryState
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire.limits import most_order_bytes
from evenkeel_moe.wire.link import (
    FlowControl,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
)
from evenkeel_moe.wire.to_rank import encode_controller_message
from tests.adapters.grpc.test_rank_link import (
    ACCEPTED,
    FAST,
    HELLO,
    SHAPE,
    Server,
    linked,
    running,
    serving,
)
from tests.adapters.serving import Listener
from tests.waiting import until

STEADY = LinkTiming(backoff_min_s=0.1, backoff_max_s=1.0, connect_timeout_s=5.0)
WATCHED_S = 1.0


class Raw(Server):
    """Registers a rank, then sends some bytes, or ends the call with an answer to wait 0 s."""

    def __init__(self, data=None, compression=None):
        super().__init__([])
        self._data = data
        self._compression = compression

    async def attach(self, requests, context):
        self.streams += 1
        async for _ in requests:
            break
        if self._data is None:
            hint = (("grpc-retry-pushback-ms", "0"),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", hint)
        if self._compression is not None:
            context.set_compression(self._compression)
        await context.write(encode_controller_message(ACCEPTED).SerializeToString())
        await context.write(self._data)
        async for _ in requests:
            pass


class RawHandler(grpc.GenericRpcHandler):
    def __init__(self, raw):
        self._raw = raw

    def service(self, _details):
        return grpc.stream_stream_rpc_method_handler(self._raw.attach)


async def hear(raw, wait_for):
    """Run a link to a raw server until a condition on its log holds; return log and listener."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((RawHandler(raw),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with structlog.testing.capture_logs() as logs:
            link = GrpcRankLink([f"127.0.0.1:{port}"], timing=STEADY)
            async with running(link) as listener:
                await until(lambda: wait_for(logs, listener))
    finally:
        await server.stop(0)
    return logs, listener


def events(logs, name):
    return [log for log in logs if log["event"] == name]


@pytest.mark.parametrize(
    ("answers", "most"),
    [
        ([NotLeader("", "", 0.0)], 21),
        ([NotLeader("b", "127.0.0.1:1", 0.0)], 21),
        # Each wait is twice the one before.
        ([ACCEPTED, None], 5),
    ],
    ids=["no leader, no wait", "a dead leader, no wait", "accepted and ended at once"],
)
async def test_no_answer_makes_a_rank_come_again_without_a_pause(answers, most):
    async with linked(answers, timing=STEADY) as (server, _):
        await asyncio.sleep(WATCHED_S)
    # Each wait is half of what is meant, or more.
    assert 1 <= server.streams <= most


async def test_a_full_server_that_asks_for_no_wait_gets_a_pause_too():
    raw = Raw()
    began = asyncio.get_running_loop().time()
    logs, _ = await hear(raw, lambda logs, _: len(events(logs, "link_lost")) >= 4)
    assert asyncio.get_running_loop().time() - began >= 3 * 0.05


async def test_a_wait_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(rank_link, "_MAX_WAIT_S", 0.2)
    async with linked([NotLeader("", "", 1e12)], [ACCEPTED]) as (_, listener):
        await until(lambda: listener.got)


async def test_redirects_in_circles_lead_back_to_the_own_addresses():
    """Two strangers could otherwise keep a rank between them for ever."""
    one, two = Server([]), Server([])
    async with serving(servicer=one) as (_, first), serving(servicer=two) as (_, second):
        one.answers, two.answers = [[NotLeader("x", second, 0.02)]], [[NotLeader("x", first, 0.02)]]
        async with serving([NotLeader("x", first, 0.02)]) as (own, address):
            async with running(GrpcRankLink([address], timing=FAST)):
                await until(lambda: len(own.of(Hello)) >= 3)


@pytest.mark.parametrize(
    "leader",
    [
        "",
        "own:1",
        "unix:/run/docker.sock",
        "unix:///run/docker.sock",
        "google-c2p:///controller",
        "dns://evil/controller:50051",
        "controller",
        "controller:port",
        "controller:50051/path",
        "a b:1",
        "x" * 400,
    ],
)
def test_a_redirect_that_is_no_host_and_port_or_the_same_is_not_followed(leader):
    addresses = ControllerAddresses(["own:1"])
    assert addresses.next() == "own:1"
    assert not addresses.redirect("own:1", leader)
    assert addresses.next() == "own:1"


@pytest.mark.parametrize("leader", ["b:2", "10.0.0.7:50051", "[fe80::1%0]:50051", "b-0.ns.svc:1"])
def test_a_host_and_port_is_followed_at_once_unless_it_has_just_failed(leader):
    addresses = ControllerAddresses(["own:1"])
    addresses.next()
    assert addresses.redirect("own:1", leader) and addresses.next() == leader
    addresses.failed(leader)
    addresses.next()
    assert not addresses.redirect("own:1", leader) and addresses.next() == leader


async def test_a_second_registration_ends_the_stream():
    """Each would make the rank send all its reports again."""
    async with serving([ACCEPTED, ACCEPTED], [ACCEPTED]) as (_, address):
        with structlog.testing.capture_logs() as logs:
            async with running(GrpcRankLink([address], timing=FAST)) as listener:
                await until(lambda: listener.registrations == [1, 2])
    assert "second registration" in events(logs, "link_violated")[0]["detail"]


async def test_a_rank_that_loses_its_place_says_why_and_comes_again():
    refused = dataclasses.replace(
        ACCEPTED, outcome=RegistrationOutcome.REFUSED, reason=Reason.DISPLACED
    )
    async with serving([ACCEPTED, refused], [ACCEPTED]) as (_, address):
        with structlog.testing.capture_logs() as logs:
            async with running(GrpcRankLink([address], timing=FAST)) as listener:
                await until(lambda: listener.registrations == [1, 2])
    [log] = events(logs, "registration_refused")
    assert (log["reason"], log["address"]) == (Reason.DISPLACED, address)
    assert not events(logs, "link_violated")


async def test_a_flood_of_messages_ends_the_stream(monkeypatch):
    monkeypatch.setattr(rank_link, "_MAX_MESSAGES_PER_S", 10.0)
    queries = [QueryState(Leader("a", 1))] * 200
    async with serving([ACCEPTED, *queries], [ACCEPTED]) as (_, address):
        with structlog.testing.capture_logs() as logs:
            async with running(GrpcRankLink([address], timing=FAST)) as listener:
                await until(lambda: listener.registrations == [1, 2])
    assert "messages a second" in events(logs, "link_violated")[0]["detail"]


class Slow(Listener):
    """Each message takes some processor time."""

    def received(self, stream, message):
        super().received(stream, message)
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass


async def test_a_link_rests_after_messages_that_take_long():
    """The engine's thread needs the interpreter too."""
    async with serving([ACCEPTED, *[QueryState(Leader("a", 1))] * 5]) as (_, address):
        listener, began = Slow(HELLO), time.monotonic()
        task = asyncio.create_task(GrpcRankLink([address], timing=FAST).run(listener))
        try:
            await until(lambda: len(listener.got) == 6)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert time.monotonic() - began >= 5 * 4 * 0.05


async def test_bytes_that_are_no_message_are_a_violation_and_no_fault_of_ours():
    logs, _ = await hear(Raw(b"\xff\xfe"), lambda logs, _: events(logs, "link_violated"))
    assert not events(logs, "link_failed")


async def test_a_message_larger_than_the_shape_can_need_is_not_read():
    large = agent_pb2.NotLeader(leader_id="x" * most_order_bytes(SHAPE))
    data = agent_pb2.ControllerMessage(not_leader=large).SerializeToString()
    logs, _ = await hear(Raw(data), lambda logs, _: events(logs, "link_lost"))
    assert not events(logs, "link_violated"), "it was decoded"


async def test_compressed_messages_are_not_taken():
    """A message of some kilobytes could otherwise fill the memory."""
    data = encode_controller_message(NotLeader("", "", 1.0)).SerializeToString()
    raw = Raw(data, grpc.Compression.Gzip)
    _, listener = await hear(raw, lambda logs, _: events(logs, "link_lost"))
    assert not listener.got


async def test_heartbeats_keep_a_pause_whatever_the_interval():
    often = Registration(RegistrationOutcome.ACCEPTED, 1e-9, 5.0, FlowControl(0.1))
    async with linked([often]) as (server, listener):
        await until(lambda: listener.got)
        await asyncio.sleep(WATCHED_S)
    assert 1 <= len(server.of(Heartbeat)) <= 1 + (WATCHED_S + 2) / 0.01
