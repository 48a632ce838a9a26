"""The pace of reports, and the split of tokens, over generations of ranks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ranks.rank_sessions import RankSession
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.wire.link import FlowControl, Heartbeat, KvCache, Registration
from tests.controller.replicas import DEMO, ONE, replicas
from tests.protocol.machines import BASE, SHAPE, control_of, hello_of
from tests.waiting import until


def drained(stream):
    """Return and remove the messages queued on a stream."""
    return [stream._queue.popleft() for _ in range(len(stream._queue))]


async def attach_all(registry, generation, first_stream, nodes=("n0", "n1")):
    streams = [RankStream(first_stream + rank, "peer", capacity=64) for rank in range(2)]
    for rank, stream in enumerate(streams):
        stream.certified = True  # It may take the place of a group that is still there.
        hello = hello_of(rank, generation, first_stream, node=nodes[rank])
        hello = replace(hello, identity=replace(hello.identity, deployment=ONE))
        assert await registry.attach(hello, stream) is not None
    await until(lambda: registry.deployments[ONE].loads.ingest.generation == generation)
    return streams


async def test_the_stride_holds_from_the_first_step_of_a_new_generation_on_both_sides(leading_two):
    registry, operations, _ = leading_two
    member = registry.deployments[ONE]
    await attach_all(registry, "g1", 1)
    member.loads.ingest.newest_step = 1000
    registry.pace(replace(member.ranks.flow, stride=4))
    assert member.ranks.flow.from_step == 1001
    streams = await attach_all(registry, "g2", 3)
    for stream in streams:
        said = drained(stream)
        (registration,) = (message for message in said if isinstance(message, Registration))
        flows = [
            registration.flow,
            *(message for message in said if isinstance(message, FlowControl)),
        ]
        assert flows[-1] == replace(registration.flow, stride=4, from_step=0), (
            "and nothing else is changed"
        )
    late = RankStream(9, "peer", capacity=64)
    hello = hello_of(1, "g2", 9)
    await registry.attach(replace(hello, identity=replace(hello.identity, deployment=ONE)), late)
    assert drained(late)[0].flow == member.ranks.flow == flows[-1]


async def test_without_a_stride_a_new_generation_is_sent_none(leading_two):
    registry, operations, _ = leading_two
    await attach_all(registry, "g1", 1)
    for stream in await attach_all(registry, "g2", 3):
        assert not [message for message in drained(stream) if isinstance(message, FlowControl)]


@pytest.mark.parametrize("dispatch", DispatchModel)
async def test_gauges_split_tokens_by_the_dispatcher_and_nodes_in_force(leading_two, dispatch):
    registry, operations, _ = leading_two
    cycle = replace(registry.options.cycle, objective=Objective(dispatch=dispatch))
    registry.options = replace(registry.options, cycle=cycle)
    await registry.let_go(registry.deployments[ONE])
    member = registry.add(ONE)
    assert member.loads.split().topology == Topology((0,)), "no rank is known yet"
    for generation, first_stream, nodes in (("g1", 1, ("a", "a")), ("g2", 3, ("a", "b"))):
        await attach_all(registry, generation, first_stream, nodes)
        split = SplitModel(dispatch, Topology((0, int(nodes[1] == "b"))))
        assert (member.loads.split().dispatch, member.loads.split().topology) == (
            split.dispatch,
            split.topology,
        )
        counts = np.array([[[90, 5, 40, 10], [3, 50, 70, 20]]] * 4, np.uint32)
        steps = np.arange(4)
        window = LoadWindow(
            counts, steps, steps * 0, np.ones((4, 2), np.int64), np.full((4, 2), np.nan)
        )
        member.loads.balance.update({Phase.DECODE: [window]}, BASE)
        expected = metrics.balancedness_mean(metrics.rank_load(counts, BASE, split))
        assert member.loads.balance.summary()[0] == pytest.approx(expected)


NOW = 0.5


async def test_a_heartbeat_with_trouble_takes_a_rank_out_of_migration_until_one_without_it():
    """No plan is made while one rank would refuse it."""
    control = control_of(ControlState.READY)
    # The lambda looks the machine up at each call: the test replaces it below.
    inbox = SimpleNamespace(tell=lambda event: control.handle(event, NOW))
    sessions = SimpleNamespace(inbox=inbox, note_trouble=lambda _: None)
    session = RankSession(hello_of(1), RankStream(11, "peer", capacity=4), sessions)  # type: ignore[arg-type]
    assert control.state_reason(NOW)[0] is Reason.RECOVERED
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            session.received(Heartbeat(1, 2, 3, "its replicas differ"))
        assert control.state_reason(NOW) == (
            Reason.OBSERVE_ONLY,
            "ranks [1] take no wave any more; rank 1: its replicas differ",
        )
        # The lease was lost and won again: the machine knows its ranks by their old Hellos.
        control = control_of(ControlState.READY)
        assert control.state_reason(NOW)[0] is Reason.RECOVERED
        session.received(Heartbeat(1, 2, 3, "its replicas differ"))
        assert control.state_reason(NOW)[0] is Reason.OBSERVE_ONLY
        session.received(Heartbeat(1, 2, 3))
        assert control.state_reason(NOW)[0] is Reason.RECOVERED
    assert [log["detail"] for log in logs] == ["its replicas differ", "over"]


# --- The KV tokens that were promised survive restarts of the group and of the controller ---------


LARGER = replace(SHAPE, slots_per_rank=4)
"""One slot more in each of 2 layers: 20 bytes of experts."""
TOKEN = 2
"""Bytes."""


async def serve(replica, first, shape=SHAPE, told=(200, 180), highest_term=0):
    """Start a group whose ranks tell KV caches of so many bytes; return its sessions."""
    generation = f"g{first}"
    sessions = await replica.lead(
        generation,
        first,
        highest_term,
        shape=shape,
        placement_digest=Placement.initial(shape).digest,
    )
    for session, nbytes in zip(sessions, told, strict=False):
        session.received(KvCache(TOKEN, nbytes))
    await replica.member.store_windows()
    return sessions


def stop(sessions):
    for session in sessions:
        session.received(Heartbeat(1, 1, 1, stopping=True))
        session.lost()


def tokens(replica):
    """Return the tokens that were promised, and those that the engine reports."""
    found = replica.member.planner.recommender.kv.promise()
    return found and (found.promised_tokens, found.reported_tokens)


async def test_the_smallest_cache_is_known_once_every_rank_told_its_own():
    async with replicas("a") as (one, _):
        sessions = await serve(one, 1, told=(200,))
        kv = one.member.planner.recommender.kv
        assert kv.smallest() is None
        sessions[1].received(KvCache(TOKEN, 180))
        assert kv.smallest() == KvMemory(TOKEN, 180)


async def test_a_promise_outlives_the_group_and_the_controller():
    async with replicas("a", "b") as (one, two, store):
        sessions = await serve(one, 1)
        assert tokens(one) is None
        stop(sessions)
        sessions = await serve(one, 11, LARGER, (), one.member.leadership.term)
        assert tokens(one) == (80, None)
        for session, nbytes in zip(sessions, (170, 156), strict=True):
            session.received(KvCache(TOKEN, nbytes))
        assert tokens(one) == (80, 78)
        await one.member.store_windows()
        await one.yield_lease(sessions)
        # Another replica, which never saw the first group.
        await serve(two, 11, LARGER, (170, 156), 1)
        assert tokens(two) == (80, 78)


async def test_a_promise_is_stored_again_where_the_store_lost_it():
    async with replicas("a") as (one, store):
        sessions = await serve(one, 1)
        stop(sessions)
        await serve(one, 11, LARGER, (170, 156), one.member.leadership.term)
        kept = await store.fetch_document(DEMO, "kv_cache")
        assert kept
        del store._documents[DEMO, "kv_cache"]
        await one.lose(store, seen=False)
        await one.member.store_windows()
        assert await store.fetch_document(DEMO, "kv_cache") == kept
        assert tokens(one) == (80, 78)


async def test_a_damaged_record_promises_nothing():
    async with replicas("a") as (one, store):
        await store.store_document(DEMO, "kv_cache", {"newest": {"free_bytes": "many"}}, 0)
        await serve(one, 1, LARGER, (170, 156))
        assert tokens(one) is None
