"""One rank's stream: what it says goes to the machine or to telemetry."""

from typing import TYPE_CHECKING

import structlog

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.errors import PeerViolation
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Ack, Hello, RankMessage, RankState
from evenkeel_moe.wire.link import CostCurve, FromRankLink, Heartbeat

if TYPE_CHECKING:
    from evenkeel_moe.controller.deployment.deployment import Deployment

__all__ = ["Session"]

_log = structlog.get_logger(__name__)
_TELEMETRY = (LoadReport, Heartbeat, CostCurve)


class Session:
    """`adapters.grpc_server.Attached` for one rank of a deployment."""

    def __init__(self, deployment: "Deployment", hello: Hello, stream: RankStream) -> None:
        self.hello = hello
        self.stream = stream
        self.registered = False
        """Whether the rank was told that it is taken; nothing else may be sent before."""
        self.free_bytes = hello.free_bytes
        """As of the newest heartbeat."""
        self.epoch: int = hello.epoch
        """As the rank last said."""
        self.trouble = ""
        """Why the rank takes no wave any more; empty while all is well."""
        self.curve: CostCurve | None = None
        """As its profiler measured; None until it did."""
        self._deployment = deployment

    @property
    def rank(self) -> EpRank:
        """Whose stream it is."""
        return self.hello.identity.rank

    def event(self, message: RankMessage) -> ctl.FromRank:
        """A message as the machine takes it."""
        return ctl.FromRank(self.rank, self.hello.identity.incarnation, self.stream.number, message)

    def received(self, message: FromRankLink) -> None:
        """Telemetry stops here; the rest is the machine's. Both say that the rank lives."""
        deployment = self._deployment
        if isinstance(message, _TELEMETRY):
            self.tell_heard()
            if isinstance(message, LoadReport):
                deployment.ingest.take(message, self.stream.send)
            elif isinstance(message, CostCurve):
                self.curve = message
            else:
                self._beat(message)
            return
        if isinstance(message, Ack | RankState):
            self.epoch = message.epoch
        if isinstance(message, Ack):
            deployment.outside.metrics.swap_stall(deployment.deployment, message.swap_s)
        deployment.driver.post(self.event(message))

    def _beat(self, beat: Heartbeat) -> None:
        self.free_bytes = beat.free_bytes
        if beat.trouble != self.trouble:
            self.trouble = beat.trouble
            _log.error(
                "rank_trouble",
                deployment=self._deployment.deployment,
                rank=self.rank,
                node=self.hello.node,
                gpu_uuid=self.hello.gpu_uuid,
                detail=beat.trouble or "over",
            )
        self.tell_trouble()

    def tell_heard(self) -> None:
        """Tell the machine that the rank is alive."""
        incarnation = self.hello.identity.incarnation
        self._deployment.tell(ctl.RankHeard(self.rank, incarnation, self.stream.number))

    def tell_trouble(self) -> None:
        """Tell the machine what keeps the rank from waves."""
        self._deployment.tell(ctl.RankTroubled(self.rank, self.stream.number, self.trouble))

    def malformed(self, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        """A report that cannot be right."""
        self._deployment.malformed(self, violation, steps)

    def lost(self) -> None:
        """The stream ended. May be called twice."""
        if self._deployment.sessions.pop(self.stream.number, None) is not None:
            self._deployment.seen()
            self._deployment.driver.post(ctl.StreamClosed(self.rank, self.stream.number))
