"""The rank's end of the stream, against a real gRPC server on loopback that the test scripts."""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter

import grpc
import numpy as np
import pytest
import structlog

from evenkeel_moe.adapters.grpc.controller_addresses import order_of
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTiming
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Hello, Leader, QueryState, RankIdentity, Vote
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.from_rank import decode_rank_message
from evenkeel_moe.wire.link import (
    CostCurve,
    FlowControl,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
)
from evenkeel_moe.wire.to_rank import encode_controller_message
from tests.adapters.serving import Listener
from tests.waiting import deadline, until

GENERATION = Generation("11111111-2222-3333-4444-555555555555")
IDENTITY = RankIdentity(DeploymentId("toy"), EpRank(0), GENERATION, 77)
SHAPE = ModelShape(1, 4, 2, 3, 1, 100)
FAST = LinkTiming(backoff_min_s=0.02, backoff_max_s=0.1, connect_timeout_s=2.0)
ACCEPTED = Registration(RegistrationOutcome.ACCEPTED, 0.05, 5.0, FlowControl(0.1))


class Server(agent_pb2_grpc.RankLinkServicer):
    """Sends `answers`, one list per stream, and records what it receives."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.heard = []
        self.streams = 0
        self.open = 0
        self.closed = asyncio.Event()

    async def Attach(self, requests, context):
        self.streams += 1
        stream, hello = self.streams, None
        answers = self.answers[min(stream, len(self.answers)) - 1]
        self.open += 1
        try:
            async for request in requests:
                message = decode_rank_message(request, hello)
                self.heard.append((stream, message))
                if isinstance(message, Hello):
                    hello = message
                    for answer in answers:
                        if answer is None:
                            return
                        await context.write(encode_controller_message(answer))
        finally:
            self.open -= 1
            self.closed.set()

    def of(self, kind):
        return [message for _, message in self.heard if isinstance(message, kind)]


HELLO = Hello(IDENTITY, SHAPE, "node-0", "", Epoch(0), "0" * 32, 1, "1" * 32, 10, 20, "2" * 32)


class Talker(Listener):
    """Sends another message before every heartbeat, and is in trouble from the eleventh on.

    The eleventh would be skipped without the trouble.
    """

    WELL, IN_TROUBLE = CostCurve(1, (1.0,), 1.0), CostCurve(2, (1.0,), 1.0)

    def __init__(self, link):
        super().__init__(HELLO)
        self.talks, self.trouble, self.beats, self._link = True, "", 0, link

    def heartbeat(self):
        self.beats += 1
        if self.beats == 11:
            self.trouble = "the engine has stopped"
        if self.talks:
            self._link.send(self.IN_TROUBLE if self.trouble else self.WELL)
        return Heartbeat(7, 1, 2, self.trouble)


@contextlib.asynccontextmanager
async def serving(*answers, servicer=None):
    server, servicer = grpc.aio.server(), servicer or Server(*answers)
    agent_pb2_grpc.add_RankLinkServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def running(link):
    listener = Listener(HELLO)
    task = asyncio.create_task(link.run(listener))
    try:
        yield listener
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def linked(*answers, servicer=None, timing=FAST):
    """A server, and the listener of a link to it."""
    async with serving(*answers, servicer=servicer) as (server, address):
        async with running(GrpcRankLink([address], timing=timing)) as listener:
            yield server, listener


async def test_hello_comes_first_then_registration_heartbeats_and_orders():
    query = QueryState(Leader("a", 1))
    async with linked([ACCEPTED, query]) as (server, listener):
        await until(lambda: len(listener.got) == 2 and len(server.of(Heartbeat)) >= 3)
    assert isinstance(server.heard[0][1], Hello) and server.heard[0][1].identity == IDENTITY
    assert [stream for stream, _ in listener.got] == [1, 1]
    assert listener.got[0][1].outcome is RegistrationOutcome.ACCEPTED
    assert listener.got[1][1] == query
    assert server.of(Heartbeat)[0] == Heartbeat(7, 1, 2)


async def test_a_rank_that_sends_skips_three_heartbeats_of_four_but_reports_trouble_at_once():
    async with serving([ACCEPTED]) as (server, address):
        link = GrpcRankLink([address], timing=FAST)
        rank = Talker(link)
        task = asyncio.create_task(link.run(rank))
        try:
            await until(lambda: any(beat.trouble for beat in server.of(Heartbeat)))
            rank.talks = False
            talked = len(server.of(CostCurve))
            beats = len(server.of(Heartbeat))
            await until(lambda: len(server.of(Heartbeat)) >= beats + 5)
            assert len(server.of(CostCurve)) <= talked + 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    kinds = [
        type(message) for _, message in server.heard if isinstance(message, CostCurve | Heartbeat)
    ]
    assert kinds[:12] == [CostCurve, Heartbeat, *2 * [*4 * [CostCurve], Heartbeat]]
    told = [message for _, message in server.heard].index(Heartbeat(7, 1, 2, rank.trouble))
    in_trouble = [curve for _, curve in server.heard[:told] if curve == Talker.IN_TROUBLE]
    assert len(in_trouble) == 1, "the first heartbeat after it began"


async def test_a_message_the_wire_cannot_carry_costs_only_itself():
    """Protobuf raises ValueError of its own; an engine could hand in anything."""
    async with serving([ACCEPTED]) as (server, address):
        link = GrpcRankLink([address], timing=FAST)
        async with running(link) as listener:
            await until(lambda: listener.got)
            link.send(Heartbeat(-1, 1, 2))
            link.send(Heartbeat("seven", 1, 2))  # type: ignore[arg-type]
            link.send(Heartbeat(1234, 1, 2))
            await until(lambda: Heartbeat(1234, 1, 2) in server.of(Heartbeat))


async def test_the_last_message_is_heard_before_the_stream_ends():
    last = Heartbeat(9, 1, 2, stopping=True)
    async with serving([ACCEPTED]) as (server, address):
        link = GrpcRankLink([address], timing=FAST)
        await link.finish(last)
        assert server.streams == 0, "there is no stream yet"
        async with running(link) as listener:
            await until(lambda: listener.got)
            await asyncio.wait_for(link.finish(last), deadline(10))
            assert server.of(Heartbeat)[-1] == last and server.closed.is_set()


async def test_messages_go_by_the_stream_they_belong_to_or_not_at_all():
    vote = Vote(WaveKey(GENERATION, PlanId("p"), 0, 1), True)
    report = LoadReport(
        IDENTITY.deployment, GENERATION, IDENTITY.rank, 77, CountingSide.DESTINATION,
        step_table([StepMeta(4, 0, Phase.DECODE, 2)]), np.array([[[1, 0, 1]]], np.int64),
    )  # fmt: skip
    async with serving([ACCEPTED]) as (server, address):
        link = GrpcRankLink([address], timing=FAST)
        link.send(vote, 1)
        async with running(link) as listener:
            await until(lambda: listener.got)
            link.send(vote, 7)
            link.send(vote, 1)
            link.send(report)
            await until(lambda: server.of(LoadReport))
        assert len(server.of(Vote)) == 1
        [got] = server.of(LoadReport)
        assert got.steps.tobytes() == report.steps.tobytes() and (got.counts == report.counts).all()


async def test_a_stream_that_ends_is_opened_again_with_a_new_number():
    async with linked([ACCEPTED, None], [ACCEPTED, None], [ACCEPTED]) as (server, listener):
        await until(lambda: len(listener.got) >= 3)
        assert [stream for stream, _ in listener.got] == [1, 2, 3]
        assert listener.lost_streams == [1, 2]
    assert len(server.of(Hello)) == 3


async def test_a_leader_that_steps_down_later_redirects_too():
    async with serving([ACCEPTED]) as (leader, leader_address):
        async with serving([ACCEPTED, NotLeader("b", leader_address, 0.0)]) as (_, address):
            async with running(GrpcRankLink([address], timing=FAST)) as listener:
                await until(lambda: len(listener.got) == 2)
            assert listener.lost_streams[0] == 1 and len(leader.of(Hello)) == 1


@pytest.mark.parametrize("order", [1, -1])
async def test_all_ranks_of_a_deployment_begin_with_the_same_controller(order):
    """The order of their start does not matter: the deployment determines the first address."""
    async with serving([ACCEPTED]) as (first, one), serving([ACCEPTED]) as (second, two):
        links = [GrpcRankLink([one, two], timing=FAST, seed=seed) for seed in (1, 2, 3)][::order]
        async with running(links[0]) as a, running(links[1]) as b, running(links[2]) as c:
            await until(lambda: a.got and b.got and c.got)
        assert sorted((len(first.of(Hello)), len(second.of(Hello)))) == [0, 3]


async def test_dead_addresses_are_passed_over():
    async with serving([ACCEPTED]) as (server, address):
        link = GrpcRankLink(["127.0.0.1:1", address], timing=FAST)
        async with running(link) as listener:
            await until(lambda: listener.got)
        assert len(server.of(Hello)) == 1


async def test_cancelling_the_link_closes_its_stream():
    async with serving([ACCEPTED]) as (server, address):
        async with running(GrpcRankLink([address], timing=FAST)) as listener:
            await until(lambda: listener.got)
        await asyncio.wait_for(server.closed.wait(), deadline(5))
        assert server.open == 0


@pytest.mark.parametrize(
    "addresses", [[], "127.0.0.1:50051", ["localhost"], [""], ["http://host:1"], ["host:abc"]]
)
def test_a_link_needs_addresses_with_a_port(addresses):
    with pytest.raises(InvalidInput, match="a list of controller addresses"):
        GrpcRankLink(addresses)


async def test_a_controller_that_is_silent_for_a_lease_is_left_for_another():
    """The host of a paused leader keeps the connection open; only messages show that it lives."""
    silent = Registration(RegistrationOutcome.ACCEPTED, 0.05, 0.3, FlowControl(0.1))
    query = QueryState(Leader("b", 2))
    async with serving() as first, serving() as second:
        servers = {address: server for server, address in (first, second)}
        order = order_of(HELLO.identity.deployment, list(servers))
        paused, other = (servers[address] for address in order)
        paused.answers, other.answers = [[silent]], [[ACCEPTED, query]]
        async with running(GrpcRankLink(order, timing=FAST)) as listener:
            await until(lambda: any(message == query for _, message in listener.got))
            assert (paused.streams, other.streams, listener.lost_streams) == (1, 1, [1])


class Answering(Server):
    """Answers every fourth heartbeat: several times in a lease of two seconds."""

    LEASE_S = 2.0

    async def Attach(self, requests, context):
        self.streams += 1
        await context.read()
        short = dataclasses.replace(ACCEPTED, lease_s=self.LEASE_S)
        await context.write(encode_controller_message(short))
        began, beats = time.monotonic(), 0
        async for _ in requests:
            beats += 1
            if beats % 4 == 0:
                await context.write(encode_controller_message(QueryState(Leader("a", beats))))
            if time.monotonic() - began > 1.5 * self.LEASE_S:
                self.closed.set()


async def test_a_controller_that_sends_within_its_lease_is_kept():
    async with serving(servicer=Answering()) as (server, address):
        async with running(GrpcRankLink([address], timing=FAST)) as listener:
            await asyncio.wait_for(server.closed.wait(), deadline(20))
            assert server.streams == 1
            assert listener.lost_streams == []


# --- tasks beside the reader ----------------------------------------------------------------------


class Patient(Server):
    """Gives a lease longer than any test, and reads nothing before `reads` is set."""

    def __init__(self):
        super().__init__()
        self.reads = asyncio.Event()

    async def Attach(self, requests, context):
        self.streams += 1
        stream, hello = self.streams, decode_rank_message(await context.read(), None)
        assert isinstance(hello, Hello)
        await context.write(encode_controller_message(dataclasses.replace(ACCEPTED, lease_s=600.0)))
        await self.reads.wait()
        async for request in requests:
            self.heard.append((stream, decode_rank_message(request, hello)))


class OnceFaint(Listener):
    """The device fails when the first heartbeat is due."""

    def __init__(self):
        super().__init__(HELLO)
        self.beats = 0

    def heartbeat(self):
        self.beats += 1
        if self.beats == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Heartbeat(7, 1, 2)


class OnceTorn(GrpcRankLink):
    """Its writer fails on the first stream."""

    torn = False

    async def _write(self, call, outbox):
        if not self.torn:
            self.torn = True
            raise RuntimeError("half written")
        await super()._write(call, outbox)


@pytest.mark.parametrize(
    ("link_type", "faint", "words"),
    [(GrpcRankLink, True, "illegal memory"), (OnceTorn, False, "half written")],
)
async def test_a_rank_whose_heartbeat_or_writer_ends_opens_another_stream(link_type, faint, words):
    """The reader would wait for the whole lease: only this ends a stream with a mute rank."""
    listener = OnceFaint() if faint else Listener(HELLO)
    async with serving(servicer=Patient()) as (server, address):
        server.reads.set()
        task = asyncio.create_task(link_type([address], timing=FAST).run(listener))
        try:
            with structlog.testing.capture_logs() as logs:
                await until(lambda: server.of(Heartbeat))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert listener.registrations == [1, 2] and listener.lost_streams == [1, 2]
    [log] = [log for log in logs if log["event"] == "link_failed"]
    assert log["log_level"] == "error" and words in log["detail"]


async def test_a_controller_that_takes_nothing_fills_the_outbox_and_is_left():
    vote = Vote(WaveKey(GENERATION, PlanId("p"), 0, 1), False, Reason.BUSY, "x" * 4000)
    async with serving(servicer=Patient()) as (server, address):
        link, most = GrpcRankLink([address], timing=FAST), 0
        with structlog.testing.capture_logs() as logs:
            async with running(link) as listener:
                await until(lambda: listener.registrations)
                async with asyncio.timeout(deadline(20)):
                    while listener.registrations == [1]:
                        link.send(vote, 1)
                        most = max(most, 0 if link._outbox is None else link._outbox.qsize())
                        await asyncio.sleep(0)
                server.reads.set()
                await until(lambda: server.of(Heartbeat))
    assert 1000 < most <= 1024
    cut = [log for log in logs if log["event"] == "controller_too_slow"]
    assert [(log["stream"], log["queued"]) for log in cut] == [(1, 1024)]


# --- what a link tells ----------------------------------------------------------------------------


REFUSED = Registration(
    RegistrationOutcome.REFUSED, 1.0, 5.0, FlowControl(0.1), Reason.DEPLOYMENT_IN_USE, "a group"
)


async def test_a_refusal_is_told_with_its_reason_and_so_is_the_end_of_it():
    told: list[str] = []
    async with serving([REFUSED], [REFUSED], [ACCEPTED]) as (_, address):
        async with running(GrpcRankLink([address], timing=FAST, on_change=told.append)) as rank:
            await until(lambda: rank.got)
    assert told == [f"the controller at {address} refuses: a group (deployment_in_use)", ""]


async def test_that_no_controller_answers_is_told_once():
    told: list[str] = []
    with structlog.testing.capture_logs() as logs:
        link = GrpcRankLink(["127.0.0.1:1"], timing=FAST, on_change=told.append)
        async with running(link):
            await until(lambda: sum(line["event"] == "link_lost" for line in logs) >= 3)
    assert len(told) == 1
    assert told[0].startswith("no controller answers at 127.0.0.1:1 (UNAVAILABLE: ")


@pytest.mark.fault(
    "an operator whose controllers had lost their store",
    "each said that no replica leads, and the fleet went on as connected",
)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (NotLeader("", "", 0.02), "the controller at {} does not lead"),
        (None, "the controller at {} ended the stream"),
    ],
    ids=["follower", "end"],
)
async def test_a_rank_that_has_lost_its_leader_tells_why_it_finds_no_other(answer, words):
    told: list[str] = []
    async with serving([ACCEPTED, None], [answer]) as (server, address):
        async with running(GrpcRankLink([address], timing=FAST, on_change=told.append)):
            await until(lambda: server.streams >= 4)
    assert (told[0], told[-1]) == ("", words.format(address)) and len(told) <= 3


# --- the last message -----------------------------------------------------------------------------


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


# --- which replica is tried when ------------------------------------------------------------------


def test_the_deployments_of_a_replica_that_dies_are_shared_by_the_others():
    addresses = [f"10.0.0.{number}:50051" for number in range(3)]
    orders = [order_of(f"model-{number}", addresses) for number in range(300)]
    shares = Counter(order[0] for order in orders)
    assert all(70 < shares[address] < 130 for address in addresses)
    moved = Counter(order[1] for order in orders if order[0] == addresses[0])
    assert sorted(moved) == addresses[1:] and min(moved.values()) > 30
    for number, order in enumerate(orders):
        left = [address for address in order if address != addresses[0]]
        assert order_of(f"model-{number}", addresses[:0:-1]) == tuple(left)


async def test_a_leader_that_is_gone_is_tried_again_only_after_the_wait_that_a_follower_asks_for():
    """Or all ranks of a dead leader would come to the followers again and again."""
    began = asyncio.get_running_loop().time()
    gone = NotLeader("b", "127.0.0.1:1", 0.5)
    async with linked([gone], [gone], [gone], [ACCEPTED]) as (follower, listener):
        await until(lambda: listener.got)
    assert len(follower.of(Hello)) == 4
    # The first redirect is followed at once; each wait is 0.5 to 1 times what is asked for.
    assert asyncio.get_running_loop().time() - began >= 2 * 0.25


async def test_a_follower_sends_the_link_to_the_leader():
    async with serving([ACCEPTED]) as (leader, leader_address):
        not_leader = NotLeader("b", leader_address, 0.0)
        async with serving([not_leader]) as (follower, address):
            async with running(GrpcRankLink([address], timing=FAST)) as listener:
                await until(lambda: listener.got)
            assert len(follower.of(Hello)) == 1 and len(leader.of(Hello)) == 1


async def test_no_leader_and_refusal_are_tried_again_later():
    refused = Registration(
        RegistrationOutcome.REFUSED,
        1.0,
        5.0,
        FlowControl(0.1),
        Reason.SHAPE_DISAGREES,
        "other shape",
    )
    async with linked([NotLeader("", "", 0.01)], [refused], [ACCEPTED]) as (server, listener):
        await until(lambda: listener.got)
    assert len(server.of(Hello)) == 3
    assert listener.got[0][0] == 3
