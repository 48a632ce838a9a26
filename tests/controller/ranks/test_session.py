"""A rank's messages reach the machine."""

from types import SimpleNamespace

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ranks.session import RankSession, SessionTargets
from evenkeel_moe.errors import Reason
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.wire.link import Heartbeat
from tests.protocol.machines import control_of, hello_of

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
