"""What the controller says: answers of the link and orders of the machines, to wire and back."""

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2 as pb
from evenkeel_moe.v1 import telemetry_pb2
from evenkeel_moe.wire.link import (
    FlowControl,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ReportAck,
    ToRankLink,
)
from evenkeel_moe.wire.values import (
    check_count,
    check_seconds,
    check_text,
    decode_key,
    decode_leader,
    decode_reason,
    decode_wave,
    encode_key,
    encode_leader,
    encode_wave,
)

__all__ = ["decode_controller_message", "encode_controller_message"]

_REGISTRATIONS = {
    RegistrationOutcome.ACCEPTED: pb.Registration.OUTCOME_ACCEPTED,
    RegistrationOutcome.OBSERVE_ONLY: pb.Registration.OUTCOME_OBSERVE_ONLY,
    RegistrationOutcome.REFUSED: pb.Registration.OUTCOME_REFUSED,
}
_REGISTRATIONS_BACK = {number: outcome for outcome, number in _REGISTRATIONS.items()}


def encode_controller_message(message: ToRankLink) -> pb.ControllerMessage:
    """What the controller says, to wire."""
    match message:
        case ReportAck():
            return pb.ControllerMessage(
                report_ack=telemetry_pb2.ReportAck(
                    highest_step=message.highest_step,
                    rejected_steps=message.rejected_steps,
                    reason=message.reason or "",
                )
            )
        case FlowControl():
            return pb.ControllerMessage(flow_control=_encode_flow(message))
        case Registration():
            return pb.ControllerMessage(registration=_encode_registration(message))
        case NotLeader():
            return pb.ControllerMessage(
                not_leader=pb.NotLeader(
                    leader_id=message.leader_id,
                    address=message.address,
                    retry_after_s=message.retry_after_s,
                )
            )
        case m.Prepare():
            return pb.ControllerMessage(
                prepare=pb.Prepare(
                    leader=encode_leader(message.leader),
                    wave=encode_key(message.wave),
                    base_epoch=message.base_epoch,
                    body=encode_wave(message.body),
                    checksums=message.checksums,
                    batch_deadline_s=message.batch_deadline_s,
                    max_bytes_per_s=message.max_bytes_per_s,
                )
            )
        case m.Commit():
            return pb.ControllerMessage(
                commit=pb.Commit(
                    leader=encode_leader(message.leader), wave=encode_key(message.wave)
                )
            )
        case m.Abort():
            return pb.ControllerMessage(
                abort=pb.Abort(leader=encode_leader(message.leader), wave=encode_key(message.wave))
            )
        case m.QueryState():
            return pb.ControllerMessage(
                query_state=pb.QueryState(
                    leader=encode_leader(message.leader),
                    want_placement=message.want_placement,
                    want_checksums=message.want_checksums,
                    query=message.query,
                )
            )


def decode_controller_message(message: pb.ControllerMessage) -> ToRankLink:
    """What the controller said.

    Raises:
        PeerViolation: malformed, with the numbers.
    """
    match message.WhichOneof("body"):
        case "report_ack":
            ack = message.report_ack
            return ReportAck(
                check_count("highest_step", ack.highest_step)
                if ack.HasField("highest_step")
                else None,
                ack.rejected_steps,
                decode_reason("rejection", ack.reason) if ack.reason else None,
            )
        case "flow_control":
            return _decode_flow(message.flow_control)
        case "registration":
            return _decode_registration(message.registration)
        case "not_leader":
            moved = message.not_leader
            return NotLeader(
                check_text("leader id", moved.leader_id, 256),
                check_text("address", moved.address, 512),
                check_seconds("retry_after_s", moved.retry_after_s),
            )
        case "prepare":
            return _decode_prepare(message.prepare)
        case "commit":
            return m.Commit(decode_leader(message.commit.leader), decode_key(message.commit.wave))
        case "abort":
            return m.Abort(decode_leader(message.abort.leader), decode_key(message.abort.wave))
        case "query_state":
            query = message.query_state
            return m.QueryState(
                decode_leader(query.leader),
                query.want_placement,
                query.want_checksums,
                check_count("query", query.query),
            )
        case _:
            raise PeerViolation("message without a body this version knows")


def _encode_flow(flow: FlowControl) -> telemetry_pb2.FlowControl:
    return telemetry_pb2.FlowControl(
        report_interval_s=flow.report_interval_s,
        stride=flow.stride,
        from_step=flow.from_step,
        max_steps_per_report=flow.max_steps_per_report,
    )


def _decode_flow(message: telemetry_pb2.FlowControl) -> FlowControl:
    if message.stride < 1 or message.max_steps_per_report < 1:
        raise PeerViolation(
            f"stride {message.stride} and {message.max_steps_per_report} steps a report must be at least 1"
        )
    return FlowControl(
        check_seconds("report_interval_s", message.report_interval_s, above_zero=True),
        message.stride,
        check_count("from_step", message.from_step),
        message.max_steps_per_report,
    )


def _encode_registration(answer: Registration) -> pb.Registration:
    return pb.Registration(
        outcome=_REGISTRATIONS[answer.outcome],
        reason=answer.reason or "",
        detail=answer.detail[:4096],
        leader=None if answer.leader is None else encode_leader(answer.leader),
        heartbeat_interval_s=answer.heartbeat_interval_s,
        lease_s=answer.lease_s,
        flow=_encode_flow(answer.flow),
        highest_step=answer.highest_step,
    )


def _decode_registration(message: pb.Registration) -> Registration:
    outcome = _REGISTRATIONS_BACK.get(message.outcome)
    if outcome is None:
        raise PeerViolation(f"registration outcome {message.outcome} is unknown")
    return Registration(
        outcome=outcome,
        heartbeat_interval_s=check_seconds(
            "heartbeat_interval_s", message.heartbeat_interval_s, above_zero=True
        ),
        lease_s=check_seconds("lease_s", message.lease_s, above_zero=True),
        flow=_decode_flow(message.flow),
        reason=decode_reason("registration reason", message.reason) if message.reason else None,
        detail=check_text("registration detail", message.detail),
        leader=decode_leader(message.leader) if message.HasField("leader") else None,
        highest_step=(
            check_count("highest_step", message.highest_step)
            if message.HasField("highest_step")
            else None
        ),
    )


def _decode_prepare(message: pb.Prepare) -> m.Prepare:
    body = decode_wave(message.body)
    transfers = sum(len(batch) for batch in body.batches)
    if len(message.checksums) != transfers:
        raise PeerViolation(
            f"{len(message.checksums)} checksums for {transfers} transfers", Reason.BAD_LENGTH
        )
    return m.Prepare(
        leader=decode_leader(message.leader),
        wave=decode_key(message.wave),
        base_epoch=Epoch(check_count("base_epoch", message.base_epoch)),
        body=body,
        checksums=tuple(message.checksums),
        batch_deadline_s=check_seconds(
            "batch_deadline_s", message.batch_deadline_s, above_zero=True
        ),
        max_bytes_per_s=check_seconds("max_bytes_per_s", message.max_bytes_per_s),
    )
