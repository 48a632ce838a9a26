"""Registers the streams of ranks with the deployment's leader, or sends them to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.leadership.leadership import Leadership
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.ranks.session import RankSession
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.messages import Hello, Leader
from evenkeel_moe.wire.link import Registration, RegistrationOutcome

_log = structlog.get_logger(__name__)
_LEASE_WAIT_S = 3.0
_ATTEMPTS = 3


@dataclass(frozen=True, eq=False, repr=False)
class RankRegistration:
    """Answers the Hello of each new stream."""

    control: DeploymentControl
    leadership: Leadership
    ranks: RankSessions
    loads: GroupLoads
    inbox: MachineInbox

    async def attach(self, hello: Hello, stream: RankStream) -> RankSession | None:
        """Register the stream of a rank; return None if it was turned away."""
        session = self.ranks.open(hello, stream)
        try:
            return await self._register_or_redirect(session)
        except BaseException:
            # The rank hung up while the lease was sought: nobody else would end this session.
            session.lost()
            raise

    async def _register_or_redirect(self, session: RankSession) -> RankSession | None:
        stream, keeper = session.stream, self.leadership.keeper
        # This Hello may name a higher term, for which the lease is taken again in between.
        for _ in range(_ATTEMPTS):
            await keeper.decided(_LEASE_WAIT_S)
            if not keeper.leading or stream.closed:
                break
            try:
                await self.inbox.call(lambda now: (None, self._register(session, now)))
            except Unavailable:
                # The rank is registered all the same; the machine stores its records later.
                _log.info(
                    "registered_without_store",
                    deployment=self.control.deployment,
                    rank=session.rank,
                )
            if session.registered:
                return session
        if not stream.closed:
            stream.close(await self.leadership.leader_address())
        session.lost()
        return None

    def _register(self, session: RankSession, now: float) -> Sequence[ctl.ControlAction]:
        """Give the machine a Hello. The answer goes out before anything else on the stream."""
        if self.control.leader is None:
            return ()
        actions = self.control.handle(session.event(session.hello), now)
        refused = any(
            isinstance(action, ctl.CloseStream) and action.stream == session.stream.number
            for action in actions
        )
        leader = self.control.leader
        if refused or leader is None:
            return actions
        session.registered = True
        self.loads.declare_shape(session.hello.shape)
        session.stream.send(self._accepted(session.hello, leader))
        return actions

    def _accepted(self, hello: Hello, leader: Leader) -> Registration:
        observing = not hello.migrates
        timing = self.control.timing
        return Registration(
            outcome=RegistrationOutcome.OBSERVE_ONLY if observing else RegistrationOutcome.ACCEPTED,
            heartbeat_interval_s=timing.heartbeat_s,
            lease_s=timing.rank_lease_s,
            flow=self.ranks.flow,
            reason=Reason.OBSERVE_ONLY if observing else None,
            detail="the rank does not offer to migrate" if observing else "",
            leader=leader,
            highest_step=self.loads.ingest.highest_step(
                hello.identity.rank, hello.identity.generation
            ),
        )
