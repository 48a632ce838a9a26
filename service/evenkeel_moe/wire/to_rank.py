"""Codec of the messages that the controller sends: protocol messages and answers to ranks."""

from typing import Any

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2 as pb
from evenkeel_moe.v1 import telemetry_pb2
from evenkeel_moe.wire.fields import MessageCodec, count, enum, nested, seconds, text, words
from evenkeel_moe.wire.link import (
    FlowControl,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ReportAck,
    ToRankLink,
)
from evenkeel_moe.wire.values import message_codec


def _check_prepare(prepare: m.Prepare) -> None:
    transfers = len(prepare.body.transfers)
    if len(prepare.checksums) != transfers:
        raise PeerViolation(
            f"{len(prepare.checksums)} checksums for {transfers} transfers", Reason.BAD_LENGTH
        )


_INTERVAL = seconds(above_zero=True)
_FLOW = message_codec(
    FlowControl,
    telemetry_pb2.FlowControl,
    report_interval_s=_INTERVAL,
    stride=count(least=1),
    max_steps_per_report=count(least=1),
)
_OUTCOME = enum(RegistrationOutcome, pb.Registration.Outcome, "OUTCOME")
_CODECS: dict[str, MessageCodec[Any, Any]] = {
    "report_ack": message_codec(ReportAck, telemetry_pb2.ReportAck),
    "flow_control": _FLOW,
    "registration": message_codec(
        Registration,
        pb.Registration,
        outcome=_OUTCOME,
        heartbeat_interval_s=_INTERVAL,
        lease_s=_INTERVAL,
        flow=nested(_FLOW.decode, _FLOW.encode),
        detail=words(),
    ),
    "not_leader": message_codec(NotLeader, pb.NotLeader, leader_id=text(256), address=text(512)),
    "prepare": message_codec(
        m.Prepare, pb.Prepare, check=_check_prepare, batch_deadline_s=_INTERVAL
    ),
    "commit": message_codec(m.Commit, pb.Commit),
    "abort": message_codec(m.Abort, pb.Abort),
    "query_state": message_codec(m.QueryState, pb.QueryState),
}
_BODIES = {codec.model: body for body, codec in _CODECS.items()}


def encode_controller_message(message: ToRankLink) -> pb.ControllerMessage:
    """Return the wire form of a controller's message."""
    body = _BODIES[type(message)]
    return pb.ControllerMessage(**{body: _CODECS[body].encode(message)})


def decode_controller_message(message: pb.ControllerMessage) -> ToRankLink:
    """Return a controller's message.

    Raises:
        PeerViolation: malformed, with the numbers.
    """
    body = message.WhichOneof("body")
    if body is None or body not in _CODECS:
        raise PeerViolation("message without a body this version knows")
    decoded: ToRankLink = _CODECS[body].decode(getattr(message, body))
    return decoded
