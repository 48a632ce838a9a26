"""Passes one rank's messages to the machine or to the load windows."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.errors import PeerViolation
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Ack, Hello, RankMessage, RankState
from evenkeel_moe.wire.link import (
    CostCurve,
    DeviceClock,
    FromRankLink,
    Heartbeat,
    KvCache,
    ReplicaCost,
)

_log = structlog.get_logger(__name__)
_LOGGED_CHARACTERS = 500
_TELEMETRY = (LoadReport, Heartbeat, CostCurve, ReplicaCost, KvCache, DeviceClock)


@dataclass(frozen=True, slots=True)
class SessionTargets:
    """The receivers of the messages of a deployment's ranks."""

    inbox: MachineInbox
    ingest: Ingest
    swapped: Callable[[Ack], None]
    """Note the time for which a swap stalled a rank."""
    troubled: Callable[["RankSession"], None]
    """Note that the trouble of a session's rank is another, or over."""
    ended: Callable[["RankSession"], None]
    """Remove a session whose stream ended."""


class RankSession:
    """`adapters.grpc.server.Attached` for one rank of a deployment."""

    def __init__(self, hello: Hello, stream: RankStream, targets: SessionTargets) -> None:
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
        self.curve: CostCurve | None = None
        """The cost curve its profiler measured; None until then."""
        self.replica_cost: ReplicaCost | None = None
        """The time by tokens and replicas that its profiler measured; None until then."""
        self.kv_cache: KvCache | None = None
        """The KV cache of the engine; None until the rank tells it."""
        self.clock: DeviceClock | None = None
        """The clock of the device under load; None until the rank tells it."""
        self._targets = targets

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
                self._targets.ingest.take(message, self.stream.send)
            elif isinstance(message, CostCurve):
                self.curve = message
            elif isinstance(message, ReplicaCost):
                self.replica_cost = message
            elif isinstance(message, KvCache):
                self.kv_cache = message
            elif isinstance(message, DeviceClock):
                self.clock = message
            else:
                self._beat(message)
            return
        if isinstance(message, Ack | RankState):
            self.epoch = message.epoch
        if isinstance(message, Ack):
            self._targets.swapped(message)
        self._targets.inbox.post(self.event(message), self.stream.hold())

    def _heard(self) -> None:
        incarnation = self.hello.identity.incarnation
        self._targets.inbox.tell(ctl.RankHeard(self.rank, incarnation, self.stream.number))

    def _beat(self, beat: Heartbeat) -> None:
        self.free_bytes = beat.free_bytes
        if beat.trouble != self.trouble:
            self.trouble = beat.trouble
            self._targets.troubled(self)
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
            self._targets.inbox.tell(ctl.RankStopped(self.rank, self.stream.number))

    def repeat_trouble(self) -> None:
        """Tell the machine again why the rank takes no waves."""
        self._targets.inbox.tell(ctl.RankTroubled(self.rank, self.stream.number, self.trouble))

    def malformed(self, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        """Count a report that cannot be right, and answer it so that it is not sent again.

        The rank lives all the same.
        """
        self._heard()
        self.stream.send(self._targets.ingest.malformed(self.rank, violation, steps))

    def lost(self) -> None:
        """Note that the stream ended. May be called twice."""
        self._targets.ended(self)
