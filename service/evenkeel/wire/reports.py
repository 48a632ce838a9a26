"""Load reports: counts as one packed little-endian array, so that a report costs microseconds."""

import math

import numpy as np
from numpy.typing import NDArray

from evenkeel.errors import InvalidInput, PeerViolation, Reason
from evenkeel.model.load import CountingSide, LoadReport, Phase, StepMeta
from evenkeel.model.topology import ModelShape
from evenkeel.protocol.messages import RankIdentity
from evenkeel.v1 import telemetry_pb2 as pb
from evenkeel.wire.values import check_count

__all__ = ["MAX_REPORT_STEPS", "decode_report", "encode_report"]

MAX_REPORT_STEPS = 4096
_MAX_COUNT = (1 << 31) - 1
_MAX_STEP = (1 << 62) - 1

_PHASES = {
    Phase.PREFILL: pb.PHASE_PREFILL,
    Phase.DECODE: pb.PHASE_DECODE,
    Phase.MIXED: pb.PHASE_MIXED,
}
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}
_SIDES = {
    CountingSide.DESTINATION: pb.COUNTING_SIDE_DESTINATION,
    CountingSide.SOURCE: pb.COUNTING_SIDE_SOURCE,
}
_SIDES_BACK = {number: side for side, number in _SIDES.items()}


def encode_report(report: LoadReport) -> pb.LoadReport:
    """LoadReport to wire. The identity is not sent: it is the stream's.

    Raises:
        InvalidInput: a count outside 0..2**31-1 would not survive the wire.
    """
    counts = report.counts
    if counts.size and (counts.min() < 0 or counts.max() > _MAX_COUNT):
        raise InvalidInput(
            f"counts range over {counts.min()}..{counts.max()}, the wire takes 0..{_MAX_COUNT}"
        )
    return pb.LoadReport(
        side=_SIDES[report.side],
        steps=[
            pb.StepMeta(
                step=meta.step,
                epoch=meta.epoch,
                phase=_PHASES[meta.phase],
                tokens=meta.tokens,
                dummy=meta.dummy,
                compute_s=meta.compute_s,
            )
            for meta in report.steps
        ],
        counts=counts.astype("<i4").tobytes(),
        dropped_steps=report.dropped_steps,
    )


def decode_report(message: pb.LoadReport, identity: RankIdentity, shape: ModelShape) -> LoadReport:
    """LoadReport from wire, held against the shape the rank declared.

    Raises:
        PeerViolation: BAD_LENGTH, NEGATIVE_COUNT, NOT_FINITE or MALFORMED, with the numbers.
    """
    side = _SIDES_BACK.get(message.side)
    if side is None:
        raise PeerViolation(f"counting side {message.side} is unknown")
    num_steps = len(message.steps)
    if num_steps > MAX_REPORT_STEPS:
        raise PeerViolation(f"report holds {num_steps} steps, at most {MAX_REPORT_STEPS} are allowed")
    counts = _decode_counts(message.counts, num_steps, side, shape)
    return LoadReport(
        deployment=identity.deployment,
        generation=identity.generation,
        rank=identity.rank,
        incarnation=identity.incarnation,
        side=side,
        steps=_decode_steps(message),
        counts=counts,
        dropped_steps=check_count("dropped_steps", message.dropped_steps),
    )


def _decode_counts(data: bytes, num_steps: int, side: CountingSide, shape: ModelShape) -> NDArray[np.int32]:
    """A view of the message's bytes: the assembler copies it once, to where it belongs."""
    width = shape.slots_per_rank if side is CountingSide.DESTINATION else shape.num_logical_experts
    want = 4 * num_steps * shape.num_layers * width
    if len(data) != want:
        raise PeerViolation(
            f"counts have {len(data)} bytes, {num_steps} steps x {shape.num_layers} layers x {width} x 4 = {want}",
            Reason.BAD_LENGTH,
        )
    counts = np.frombuffer(data, "<i4")
    if counts.size and counts.min() < 0:
        negative = int((counts < 0).sum())
        raise PeerViolation(
            f"{negative} of {counts.size} counts are negative, smallest {counts.min()}",
            Reason.NEGATIVE_COUNT,
        )
    return counts.reshape(num_steps, shape.num_layers, width)


def _decode_steps(message: pb.LoadReport) -> tuple[StepMeta, ...]:
    steps: list[StepMeta] = []
    previous = -1
    for meta in message.steps:
        step, epoch, tokens = meta.step, meta.epoch, meta.tokens
        if not previous < step <= _MAX_STEP:
            raise PeerViolation(f"step {step} follows step {previous}; steps must rise and stay below 2**62")
        previous = step
        phase = _PHASES_BACK.get(meta.phase)
        if phase is None:
            raise PeerViolation(f"step {step} has unknown phase {meta.phase}")
        if epoch > _MAX_STEP or tokens > _MAX_STEP:
            raise PeerViolation(f"step {step} has epoch {epoch} and {tokens} tokens, at most {_MAX_STEP}")
        compute_s = meta.compute_s if meta.HasField("compute_s") else None
        if compute_s is not None and not 0 <= compute_s < math.inf:
            raise PeerViolation(f"step {step} has compute_s {compute_s}", Reason.NOT_FINITE)
        steps.append(StepMeta(step, epoch, phase, tokens, meta.dummy, compute_s))
    return tuple(steps)
