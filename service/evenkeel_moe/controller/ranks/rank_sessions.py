"""The open streams of one deployment's ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.controller.ranks.session import RankSession, SessionTargets
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Generation
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Ack, ControllerMessage, Hello
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.wire.link import FlowControl, NotLeader, Registration, RegistrationOutcome

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class RankSessions:
    """The sessions of one deployment, and the pace at which its ranks report.

    Args:
        retry_s: seconds after which a rank that is sent away looks for a leader again.
        swapped: notes the time for which a swap stalled a rank.
        displaced: counts a process that lost its place to another.
    """

    deployment: DeploymentId
    inbox: MachineInbox
    ingest: Ingest
    clock: Clock
    timing: ControlTiming
    flow: FlowControl
    """The pace at which the ranks are to report now."""
    retry_s: float
    swapped: Callable[[Ack], None]
    displaced: Callable[[], None]
    by_stream: dict[int, RankSession] = field(default_factory=dict, init=False)
    """Open sessions by stream number."""
    last_open_at: float = field(init=False)
    """Monotonic seconds at which a stream was last seen to be open."""

    def __post_init__(self) -> None:
        self.last_open_at = self.clock.monotonic()
        self._troubled: dict[int, RankSession] = {}
        self._targets = SessionTargets(
            self.inbox, self.ingest, self.swapped, self._note_trouble, self._remove
        )

    def open(self, hello: Hello, stream: RankStream) -> RankSession:
        """Begin the session of a rank that is not registered yet."""
        session = self.by_stream[stream.number] = RankSession(hello, stream, self._targets)
        return session

    def _note_trouble(self, session: RankSession) -> None:
        if session.trouble:
            self._troubled[session.stream.number] = session
        else:
            self._troubled.pop(session.stream.number, None)

    def _remove(self, session: RankSession) -> None:
        self._troubled.pop(session.stream.number, None)
        if self.by_stream.pop(session.stream.number, None) is not None:
            self.last_open_at = self.clock.monotonic()
            self.inbox.post(ctl.StreamClosed(session.rank, session.stream.number))

    # --- reading ----------------------------------------------------------------------------------

    def registered(self) -> Iterator[RankSession]:
        """Yield the sessions whose ranks were accepted."""
        return (session for session in list(self.by_stream.values()) if session.registered)

    def generations(self) -> frozenset[Generation]:
        """Return the generations of the ranks that have a stream here."""
        return frozenset(session.hello.identity.generation for session in self.by_stream.values())

    def idle_s(self) -> float:
        """Return the seconds since the last stream ended; 0 while one is open."""
        return 0.0 if self.by_stream else self.clock.monotonic() - self.last_open_at

    # --- sending ----------------------------------------------------------------------------------

    def send(self, rank: int, stream: int, message: ControllerMessage) -> None:
        """Send on a stream if it is still open and belongs to the rank."""
        session = self.by_stream.get(stream)
        if session is not None and session.rank == rank:
            session.stream.send(message)

    def refuse(self, stream: int, reason: Reason, detail: str) -> None:
        """Tell a rank why it is refused, and close its stream."""
        session = self.by_stream.get(stream)
        if session is None:
            return
        displaced = reason is Reason.DISPLACED
        if displaced:
            self.displaced()
        _log.warning(
            "rank_displaced" if displaced else "rank_refused",
            deployment=self.deployment,
            rank=session.rank,
            peer=session.stream.peer,
            reason=reason,
            detail=detail,
        )
        if reason is Reason.NOT_LEADER:
            session.stream.close(NotLeader("", "", self.retry_s))
        else:
            session.stream.close(refusal(self.timing, self.flow, reason, detail))

    def close_all(self) -> None:
        """Close every stream: the ranks look for another replica, or wait for this one."""
        for session in list(self.by_stream.values()):
            session.stream.close(NotLeader("", "", self.retry_s))

    def repeat_flow(self) -> None:
        """Send the flow control once more: a rank leaves a controller that is silent."""
        for session in self.registered():
            session.stream.send(self.flow)

    def repeat_troubles(self) -> None:
        """Tell the machine which ranks take no waves.

        A machine that leads again knows its ranks by their Hellos alone.
        """
        for session in self._troubled.values():
            session.repeat_trouble()

    # --- the pace of reports ----------------------------------------------------------------------

    def pace(self, flow: FlowControl) -> None:
        """Set the pace of reports from now on; a new stride begins after the newest step."""
        newest = self.ingest.newest_step
        from_step = 0 if newest is None or flow.stride == 1 else newest + 1
        self._set_flow(replace(flow, from_step=from_step))

    def begin_generation(self) -> None:
        """Apply the stride from the first step of a new generation.

        `from_step` was a step of the former group: the new ranks would send every step up to it,
        only for all of them to be dropped.
        """
        if self.flow.from_step:
            self._set_flow(replace(self.flow, from_step=0))

    def _set_flow(self, flow: FlowControl) -> None:
        self.flow = flow
        self.ingest.sample(flow.stride, flow.from_step)
        self.repeat_flow()


def refusal(timing: ControlTiming, flow: FlowControl, reason: Reason, detail: str) -> Registration:
    """Return the answer to a rank that is not accepted."""
    return Registration(
        RegistrationOutcome.REFUSED,
        timing.heartbeat_s,
        timing.rank_lease_s,
        flow,
        reason,
        detail,
    )
