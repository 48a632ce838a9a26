"""The pace of reports, and the split of tokens, over generations of ranks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ranks.session import RankSession, SessionTargets
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.wire.link import FlowControl, Heartbeat, Registration
from tests.controller.replicas import ONE
from tests.protocol.machines import BASE, control_of, hello_of
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
    targets = SessionTargets(inbox, ingest=None, swapped=None, troubled=lambda _: None, ended=None)  # type: ignore[arg-type]
    session = RankSession(hello_of(1), RankStream(11, "peer", capacity=4), targets)
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
