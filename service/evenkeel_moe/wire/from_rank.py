"""Codec of the messages that ranks send: protocol messages, heartbeats, curves and load reports."""

from itertools import pairwise
from typing import Any

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.load import MAX_COMPUTE_S, LoadReport
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.protocol.terms import MAX_TERM
from evenkeel_moe.v1 import agent_pb2 as pb
from evenkeel_moe.wire.fields import (
    FieldCodec,
    MessageCodec,
    check_seconds,
    check_text,
    count,
    enum,
    optional,
    read_reason,
    seconds,
    text,
    words,
)
from evenkeel_moe.wire.link import (
    CostCurve,
    DeviceClock,
    FromRankLink,
    Heartbeat,
    KvCache,
    ReplicaCost,
)
from evenkeel_moe.wire.reports import decode_report, encode_report
from evenkeel_moe.wire.values import message_codec

_MAX_TILES = 4096
_MAX_CAPABILITIES = 64
_OUTCOME = enum(m.WaveOutcome, pb.WaveOutcome, "WAVE_OUTCOME")
_STATE = enum(m.ParticipantState, pb.ParticipantState, "PARTICIPANT_STATE")

# --- rules of single fields -----------------------------------------------------------------


def _read_capabilities(message: pb.Hello, name: str) -> frozenset[str]:
    names = message.capabilities
    if len(names) > _MAX_CAPABILITIES:
        raise PeerViolation(
            f"hello has {len(names)} capabilities, at most {_MAX_CAPABILITIES} are allowed"
        )
    return frozenset(check_text("capability", name, 64) for name in names)


def _read_tiles(message: pb.CostCurve, name: str) -> tuple[float, ...]:
    # Before the values are read: there may be millions.
    if not 1 <= len(message.tile_seconds) <= _MAX_TILES:
        raise PeerViolation(
            f"a cost curve of {len(message.tile_seconds)} tiles, 1 to {_MAX_TILES} are taken"
        )
    tiles = tuple(check_seconds(name, value, most=MAX_COMPUTE_S) for value in message.tile_seconds)
    if any(later < earlier for earlier, later in pairwise(tiles)):
        raise PeerViolation("tile_seconds fall with the number of tokens")
    return tiles


def _read_vote_reason(message: pb.Vote, name: str) -> Reason:
    return Reason.COMMITTED if message.yes else read_reason(message, name)


def _read_last_outcome(message: pb.RankState, name: str) -> m.WaveOutcome | None:
    outcome: m.WaveOutcome | None = None
    if message.HasField("last_wave"):
        outcome = _OUTCOME.read(message, name)
    return outcome


# --- rules of whole messages ----------------------------------------------------------------


def _check_hello(hello: m.Hello) -> None:
    rank, num_ranks = hello.identity.rank, hello.shape.num_ranks
    if rank >= num_ranks:
        raise PeerViolation(f"rank {rank} of {num_ranks} ranks", Reason.WRONG_SHAPE)


# --- messages -------------------------------------------------------------------------------

_DIGEST = text(64)
_LABEL = text(256)
_COST = seconds(most=MAX_COMPUTE_S)
"""A figure that a step can have: with larger ones the planner's sums would not stay finite."""
COST_CURVE = message_codec(
    CostCurve,
    pb.CostCurve,
    tile_tokens=count(1 << 20, least=1),
    tile_seconds=FieldCodec(_read_tiles),
    slope_s_per_token=_COST,
    fit_error=optional(_COST),
    line_error=optional(_COST),
)
REPLICA_COST = message_codec(
    ReplicaCost,
    pb.ReplicaCost,
    fixed_s=_COST,
    # No device computes a token faster; the planner divides by it.
    s_per_token=seconds(least=1e-15, most=MAX_COMPUTE_S),
    s_per_replica=_COST,
    read_s=_COST,
    fit_error=_COST,
)
_CODECS: dict[str, MessageCodec[Any, Any]] = {
    "hello": message_codec(
        m.Hello,
        pb.Hello,
        check=_check_hello,
        node=_LABEL,
        gpu_uuid=_LABEL,
        placement_digest=_DIGEST,
        checksums_digest=_LABEL,
        gate_digest=_LABEL,
        capabilities=FieldCodec(_read_capabilities, sorted),
        highest_term=count(MAX_TERM),
        device=_LABEL,
        weight_format=text(32),
        dispatch=text(64),
    ),
    "heartbeat": message_codec(Heartbeat, pb.Heartbeat, trouble=words()),
    "cost_curve": COST_CURVE,
    "replica_cost": REPLICA_COST,
    "kv_cache": message_codec(
        KvCache, pb.KvCache, bytes_per_token=count(1 << 40, least=1), free_bytes=count(1 << 53)
    ),
    "device_clock": message_codec(
        DeviceClock, pb.DeviceClock, ratio=seconds(most=2.0, above_zero=True), limited_by=text(64)
    ),
    "vote": message_codec(m.Vote, pb.Vote, reason=FieldCodec(_read_vote_reason), detail=words()),
    "ack": message_codec(m.Ack, pb.Ack, placement_digest=_DIGEST),
    "abort_answer": message_codec(m.AbortAnswer, pb.AbortAnswer, outcome=_OUTCOME),
    "rank_state": message_codec(
        m.RankState,
        pb.RankState,
        state=_STATE,
        placement_digest=_DIGEST,
        last_outcome=FieldCodec(_read_last_outcome, _OUTCOME.write),
        highest_term=count(MAX_TERM),
    ),
    "term_refused": message_codec(m.TermRefused, pb.TermRefused),
    "staging_progress": message_codec(m.StagingProgress, pb.StagingProgress),
    "moved_answers": message_codec(m.MovedAnswers, pb.MovedAnswers),
}
_BODIES = {codec.model: body for body, codec in _CODECS.items()}


def encode_rank_message(message: FromRankLink) -> pb.RankMessage:
    """Return the wire form of a rank's message."""
    if isinstance(message, LoadReport):
        return pb.RankMessage(load_report=encode_report(message))
    body = _BODIES[type(message)]
    wire = _CODECS[body].encode(message)
    if isinstance(message, m.Vote) and message.yes:
        wire.reason = ""
    return pb.RankMessage(**{body: wire})


def decode_rank_message(message: pb.RankMessage, hello: m.Hello | None) -> FromRankLink:
    """Return a rank's message.

    Args:
        message: as received.
        hello: the stream's Hello; None before it, and then only a Hello is allowed.

    Raises:
        PeerViolation: malformed, or a stream that does not start with exactly one Hello.
    """
    body = message.WhichOneof("body")
    if (hello is None) != (body == "hello"):
        raise PeerViolation(
            f"got {body or 'nothing'}: a stream starts with one hello and has no second"
        )
    if body == "load_report" and hello is not None:
        return decode_report(message.load_report, hello.identity, hello.shape)
    if body is None or body not in _CODECS:
        raise PeerViolation("message without a body this version knows")
    decoded: FromRankLink = _CODECS[body].decode(getattr(message, body))
    if hello is not None:
        _check_against_hello(decoded, hello)
    return decoded


def _check_against_hello(message: FromRankLink, hello: m.Hello) -> None:
    if isinstance(message, m.TermRefused | m.RankState) and message.identity != hello.identity:
        raise PeerViolation(f"message of {message.identity} on the stream of {hello.identity}")
    if isinstance(message, m.RankState):
        _check_rank_state(message, hello.shape)
    if isinstance(message, m.MovedAnswers):
        _check_answers(message, hello.shape)


def _check_answers(answers: m.MovedAnswers, shape: ModelShape) -> None:
    most = shape.num_layers * shape.slots_per_rank
    if answers.moved > most:
        raise PeerViolation(f"{answers.moved} slots moved, a rank has {most}")
    asked = answers.same + answers.different
    if max(asked, answers.blind) > answers.moved:
        raise PeerViolation(
            f"{asked} answers and {answers.blind} blind ones of {answers.moved} moved slots"
        )


def _check_rank_state(state: m.RankState, shape: ModelShape) -> None:
    want = shape.num_layers * shape.num_logical_experts
    if state.checksums is not None and len(state.checksums) != want:
        raise PeerViolation(
            f"{len(state.checksums)} checksums, layers x experts = {want}", Reason.BAD_LENGTH
        )
    if state.placement is not None and state.placement.sizes != shape.sizes:
        raise PeerViolation(
            f"map is (L, S, R, E) = {state.placement.sizes}, hello said {shape.sizes}",
            Reason.WRONG_SHAPE,
        )
