"""What ranks say: messages of the machines, heartbeats and load reports, to wire and back."""

from itertools import pairwise

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2 as pb
from evenkeel_moe.wire.link import CostCurve, FromRankLink, Heartbeat
from evenkeel_moe.wire.reports import decode_report, encode_report
from evenkeel_moe.wire.values import (
    MAX_TERM,
    check_count,
    check_seconds,
    check_text,
    decode_identity,
    decode_key,
    decode_leader,
    decode_placement,
    decode_reason,
    decode_shape,
    encode_identity,
    encode_key,
    encode_leader,
    encode_placement,
    encode_shape,
)

__all__ = ["decode_rank_message", "encode_rank_message"]

_MAX_TILES = 4096
_MAX_TILE_TOKENS = 1 << 20
_STATES = {
    m.ParticipantState.IDLE: pb.PARTICIPANT_STATE_IDLE,
    m.ParticipantState.STAGING: pb.PARTICIPANT_STATE_STAGING,
    m.ParticipantState.PREPARED: pb.PARTICIPANT_STATE_PREPARED,
    m.ParticipantState.ARMED: pb.PARTICIPANT_STATE_ARMED,
    m.ParticipantState.SWAPPING: pb.PARTICIPANT_STATE_SWAPPING,
    m.ParticipantState.ABORTED: pb.PARTICIPANT_STATE_ABORTED,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}
_OUTCOMES = {
    m.WaveOutcome.SWAPPED: pb.WAVE_OUTCOME_SWAPPED,
    m.WaveOutcome.REFUSED: pb.WAVE_OUTCOME_REFUSED,
    m.WaveOutcome.DROPPED: pb.WAVE_OUTCOME_DROPPED,
}
_OUTCOMES_BACK = {number: outcome for outcome, number in _OUTCOMES.items()}


def encode_rank_message(message: FromRankLink) -> pb.RankMessage:
    """What a rank says, to wire."""
    match message:
        case LoadReport():
            return pb.RankMessage(load_report=encode_report(message))
        case Heartbeat():
            return pb.RankMessage(
                heartbeat=pb.Heartbeat(
                    step=message.step,
                    free_bytes=message.free_bytes,
                    staging_bytes=message.staging_bytes,
                    trouble=message.trouble[:4096],
                )
            )
        case CostCurve():
            return pb.RankMessage(
                cost_curve=pb.CostCurve(
                    tile_tokens=message.tile_tokens,
                    tile_seconds=message.tile_seconds,
                    slope_s_per_token=message.slope_s_per_token,
                )
            )
        case m.Hello():
            return pb.RankMessage(hello=_encode_hello(message))
        case m.Vote():
            return pb.RankMessage(
                vote=pb.Vote(
                    wave=encode_key(message.wave),
                    yes=message.yes,
                    reason="" if message.yes else message.reason,
                    detail=message.detail[:4096],
                )
            )
        case m.Ack():
            return pb.RankMessage(
                ack=pb.Ack(
                    wave=encode_key(message.wave),
                    epoch=message.epoch,
                    placement_digest=message.placement_digest,
                    swap_s=message.swap_s,
                )
            )
        case m.AbortAnswer():
            return pb.RankMessage(
                abort_answer=pb.AbortAnswer(
                    wave=encode_key(message.wave),
                    epoch=message.epoch,
                    outcome=_OUTCOMES[message.outcome],
                    drained=message.drained,
                )
            )
        case m.RankState():
            return pb.RankMessage(rank_state=_encode_rank_state(message))
        case m.TermRefused():
            return pb.RankMessage(
                term_refused=pb.TermRefused(
                    identity=encode_identity(message.identity), leader=encode_leader(message.leader)
                )
            )
        case m.StagingProgress():
            return pb.RankMessage(
                staging_progress=pb.StagingProgress(
                    wave=encode_key(message.wave),
                    bytes_done=message.bytes_done,
                    bytes_total=message.bytes_total,
                )
            )


def decode_rank_message(message: pb.RankMessage, hello: m.Hello | None) -> FromRankLink:
    """What a rank said.

    Args:
        message: as it came.
        hello: the stream's Hello; None while none came, and then only a Hello will do.

    Raises:
        PeerViolation: malformed, or another order than Hello first and once.
    """
    body = message.WhichOneof("body")
    if (hello is None) != (body == "hello"):
        raise PeerViolation(
            f"got {body or 'nothing'}: a stream starts with one hello and has no second"
        )
    if hello is None:
        return _decode_hello(message.hello)
    match body:
        case "load_report":
            return decode_report(message.load_report, hello.identity, hello.shape)
        case "heartbeat":
            beat = message.heartbeat
            return Heartbeat(
                check_count("step", beat.step),
                check_count("free_bytes", beat.free_bytes),
                check_count("staging_bytes", beat.staging_bytes),
                check_text("trouble", beat.trouble),
            )
        case "cost_curve":
            return _decode_curve(message.cost_curve)
        case "vote":
            return _decode_vote(message.vote)
        case "ack":
            return m.Ack(
                decode_key(message.ack.wave),
                Epoch(check_count("epoch", message.ack.epoch)),
                check_text("placement_digest", message.ack.placement_digest, 64),
                check_seconds("swap_s", message.ack.swap_s),
            )
        case "abort_answer":
            answer = message.abort_answer
            return m.AbortAnswer(
                decode_key(answer.wave),
                Epoch(check_count("epoch", answer.epoch)),
                _decode_outcome(answer.outcome),
                answer.drained,
            )
        case "rank_state":
            return _decode_rank_state(message.rank_state, hello)
        case "term_refused":
            identity = decode_identity(message.term_refused.identity)
            _check_identity(identity, hello)
            return m.TermRefused(identity, decode_leader(message.term_refused.leader))
        case "staging_progress":
            progress = message.staging_progress
            return m.StagingProgress(
                decode_key(progress.wave),
                check_count("bytes_done", progress.bytes_done),
                check_count("bytes_total", progress.bytes_total),
            )
        case _:
            raise PeerViolation("message without a body this version knows")


def _encode_hello(hello: m.Hello) -> pb.Hello:
    return pb.Hello(
        identity=encode_identity(hello.identity),
        shape=encode_shape(hello.shape),
        node=hello.node,
        gpu_uuid=hello.gpu_uuid,
        epoch=hello.epoch,
        placement_digest=hello.placement_digest,
        weights_version=hello.weights_version,
        checksums_digest=hello.checksums_digest,
        free_bytes=hello.free_bytes,
        staging_bytes=hello.staging_bytes,
        gate_digest=hello.gate_digest,
        capabilities=sorted(hello.capabilities),
        highest_term=hello.highest_term,
    )


def _decode_hello(message: pb.Hello) -> m.Hello:
    identity = decode_identity(message.identity)
    shape = decode_shape(message.shape)
    if identity.rank >= shape.num_ranks:
        raise PeerViolation(f"rank {identity.rank} of {shape.num_ranks} ranks", Reason.WRONG_SHAPE)
    if len(message.capabilities) > 64:
        raise PeerViolation(
            f"hello has {len(message.capabilities)} capabilities, at most 64 are allowed"
        )
    return m.Hello(
        identity=identity,
        shape=shape,
        node=check_text("node", message.node, 256),
        gpu_uuid=check_text("gpu_uuid", message.gpu_uuid, 256),
        epoch=Epoch(check_count("epoch", message.epoch)),
        placement_digest=check_text("placement_digest", message.placement_digest, 64),
        weights_version=check_count("weights_version", message.weights_version),
        checksums_digest=check_text("checksums_digest", message.checksums_digest, 256),
        free_bytes=check_count("free_bytes", message.free_bytes),
        staging_bytes=check_count("staging_bytes", message.staging_bytes),
        gate_digest=check_text("gate_digest", message.gate_digest, 256),
        capabilities=frozenset(check_text("capability", text, 64) for text in message.capabilities),
        highest_term=check_count("highest_term", message.highest_term, MAX_TERM),
    )


def _decode_vote(message: pb.Vote) -> m.Vote:
    wave = decode_key(message.wave)
    detail = check_text("vote detail", message.detail)
    if message.yes:
        return m.Vote(wave, True, detail=detail)
    return m.Vote(wave, False, decode_reason("vote reason", message.reason), detail)


def _encode_rank_state(state: m.RankState) -> pb.RankState:
    return pb.RankState(
        identity=encode_identity(state.identity),
        state=_STATES[state.state],
        wave=None if state.wave is None else encode_key(state.wave),
        epoch=state.epoch,
        placement_digest=state.placement_digest,
        weights_version=state.weights_version,
        drained=state.drained,
        last_wave=None if state.last_wave is None else encode_key(state.last_wave),
        last_outcome=(
            pb.WAVE_OUTCOME_UNSPECIFIED
            if state.last_outcome is None
            else _OUTCOMES[state.last_outcome]
        ),
        placement=None if state.placement is None else encode_placement(state.placement),
        checksums=state.checksums or (),
        highest_term=state.highest_term,
        step=state.step,
        query=state.query,
    )


def _decode_rank_state(message: pb.RankState, hello: m.Hello) -> m.RankState:
    identity = decode_identity(message.identity)
    _check_identity(identity, hello)
    state = _STATES_BACK.get(message.state)
    if state is None:
        raise PeerViolation(f"participant state {message.state} is unknown")
    checksums = tuple(message.checksums)
    want = hello.shape.num_layers * hello.shape.num_logical_experts
    if checksums and len(checksums) != want:
        raise PeerViolation(
            f"{len(checksums)} checksums, layers x experts = {want}", Reason.BAD_LENGTH
        )
    placement = decode_placement(message.placement) if message.HasField("placement") else None
    if placement is not None:
        have = (
            placement.num_layers,
            placement.num_slots,
            placement.num_ranks,
            placement.num_logical_experts,
        )
        shape = hello.shape
        declared = (shape.num_layers, shape.num_slots, shape.num_ranks, shape.num_logical_experts)
        if have != declared:
            raise PeerViolation(
                f"map is (L, S, R, E) = {have}, hello said {declared}", Reason.WRONG_SHAPE
            )
    ended = message.HasField("last_wave")
    return m.RankState(
        identity=identity,
        state=state,
        wave=decode_key(message.wave) if message.HasField("wave") else None,
        epoch=Epoch(check_count("epoch", message.epoch)),
        placement_digest=check_text("placement_digest", message.placement_digest, 64),
        weights_version=check_count("weights_version", message.weights_version),
        drained=message.drained,
        last_wave=decode_key(message.last_wave) if ended else None,
        last_outcome=_decode_outcome(message.last_outcome) if ended else None,
        placement=placement,
        checksums=checksums or None,
        highest_term=check_count("highest_term", message.highest_term, MAX_TERM),
        step=check_count("step", message.step),
        query=check_count("query", message.query),
    )


def _check_identity(identity: m.RankIdentity, hello: m.Hello) -> None:
    if identity != hello.identity:
        raise PeerViolation(f"message of {identity} on the stream of {hello.identity}")


def _decode_outcome(number: int) -> m.WaveOutcome:
    outcome = _OUTCOMES_BACK.get(number)  # type: ignore[call-overload]
    if outcome is None:
        raise PeerViolation(f"wave outcome {number} is unknown")
    return m.WaveOutcome(outcome)


def _decode_curve(curve: pb.CostCurve) -> CostCurve:
    """Stairs that rise, finite: a planner takes them as they are."""
    tiles = tuple(check_seconds("tile_seconds", value) for value in curve.tile_seconds)
    if not 1 <= len(tiles) <= _MAX_TILES or not 1 <= curve.tile_tokens <= _MAX_TILE_TOKENS:
        raise PeerViolation(
            f"a cost curve of {len(tiles)} tiles of {curve.tile_tokens} tokens; at most {_MAX_TILES} tiles of"
            f" {_MAX_TILE_TOKENS} are taken"
        )
    if any(later < earlier for earlier, later in pairwise(tiles)):
        raise PeerViolation("tile_seconds fall with the number of tokens")
    return CostCurve(
        curve.tile_tokens, tiles, check_seconds("slope_s_per_token", curve.slope_s_per_token)
    )
