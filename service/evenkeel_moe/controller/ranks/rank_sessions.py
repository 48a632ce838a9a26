"""The open streams of one deployment's ranks.

A session passes the messages of its rank to the machine or to the load windows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import EpRank, Generation
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Ack, ControllerMessage, Hello, RankMessage, RankState
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.telemetry.cost_choice import RankNumbers
from evenkeel_moe.wire.link import (
    CostCurve,
    DeviceClock,
    FlowControl,
    FromRankLink,
    Heartbeat,
    KvCache,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ReplicaCost,
)

_log = structlog.get_logger(__name__)


_LOGGED_CHARACTERS = 500
_TELEMETRY = (LoadReport, Heartbeat, CostCurve, ReplicaCost, KvCache, DeviceClock)


class RankSession:
    """`adapters.grpc.server.Attached` for one rank of a deployment."""

    def __init__(self, hello: Hello, stream: RankStream, sessions: "RankSessions") -> None:
        self.hello = hello
        self.stream = stream
        self.registered = False
        """True once the rank was told that it is accepted; nothing else may be sent before."""
        self.free_bytes = hello.free_bytes
        """As of the newest heartbeat."""
        self.epoch: int = hello.epoch
        """The epoch the rank named last."""
        self.trouble = ""
        """The reason for which the rank takes no waves; empty while it takes them."""
        self.numbers = RankNumbers(hello.device, hello.weight_format)
        """The figures that the rank told of its time."""
        self.kv_cache: KvCache | None = None
        """The KV cache of the engine; None until the rank tells it."""
        self._sessions = sessions

    @property
    def rank(self) -> EpRank:
        """The rank that owns the stream."""
        return self.hello.identity.rank

    def event(self, message: RankMessage) -> ctl.FromRank:
        """Return a message in the form in which the machine takes it."""
        incarnation, stream = self.hello.identity.incarnation, self.stream
        return ctl.FromRank(self.rank, incarnation, stream.number, message, stream.certified)

    def received(self, message: FromRankLink) -> None:
        """Pass on one message. Telemetry goes to the windows, all else to the machine.

        Every message shows that the rank lives.
        """
        if isinstance(message, _TELEMETRY):
            self._heard()
            if isinstance(message, LoadReport):
                self._sessions.ingest.take(message, self.stream.send)
            elif isinstance(message, CostCurve):
                self.numbers = replace(self.numbers, curve=message)
            elif isinstance(message, ReplicaCost):
                self.numbers = replace(self.numbers, replica_cost=message)
            elif isinstance(message, KvCache):
                self.kv_cache = message
            elif isinstance(message, DeviceClock):
                self.numbers = replace(self.numbers, clock=message)
            else:
                self._beat(message)
            return
        if isinstance(message, Ack | RankState):
            self.epoch = message.epoch
        if isinstance(message, Ack):
            self._sessions.swapped(message)
        self._sessions.inbox.post(self.event(message), self.stream.hold())

    def _heard(self) -> None:
        incarnation = self.hello.identity.incarnation
        self._sessions.inbox.tell(ctl.RankHeard(self.rank, incarnation, self.stream.number))

    def _beat(self, beat: Heartbeat) -> None:
        self.free_bytes = beat.free_bytes
        if beat.trouble != self.trouble:
            self.trouble = beat.trouble
            self._sessions.note_trouble(self)
            _log.error(
                "rank_trouble",
                deployment=self.hello.identity.deployment,
                rank=self.rank,
                node=self.hello.node,
                gpu_uuid=self.hello.gpu_uuid,
                detail=beat.trouble[:_LOGGED_CHARACTERS] or "over",
            )
        self.repeat_trouble()
        if beat.stopping:
            _log.info("rank_stopped", deployment=self.hello.identity.deployment, rank=self.rank)
            self._sessions.inbox.tell(ctl.RankStopped(self.rank, self.stream.number))

    def repeat_trouble(self) -> None:
        """Tell the machine again why the rank takes no waves."""
        self._sessions.inbox.tell(ctl.RankTroubled(self.rank, self.stream.number, self.trouble))

    def malformed(self, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        """Count a report that cannot be right, and answer it so that it is not sent again.

        The rank lives all the same.
        """
        self._heard()
        self.stream.send(self._sessions.ingest.malformed(self.rank, violation, steps))

    def lost(self) -> None:
        """Note that the stream ended. May be called twice."""
        self._sessions.remove(self)


@dataclass(eq=False, repr=False)
class RankSessions:
    """The sessions of one deployment, and the pace at which its ranks report.

    Args:
        retry_s: seconds after which a rank that is sent away looks for a leader again.
        swapped: notes the time for which a swap stalled a rank.
        displaced: counts a process that lost its place to another.
    """

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

    def open(self, hello: Hello, stream: RankStream) -> RankSession:
        """Begin the session of a rank that is not registered yet."""
        session = self.by_stream[stream.number] = RankSession(hello, stream, self)
        return session

    def note_trouble(self, session: RankSession) -> None:
        """Note that the trouble of a session's rank is another, or over."""
        if session.trouble:
            self._troubled[session.stream.number] = session
        else:
            self._troubled.pop(session.stream.number, None)

    def remove(self, session: RankSession) -> None:
        """Remove a session whose stream ended. May be called twice."""
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
            deployment=self.ingest.deployment,
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
