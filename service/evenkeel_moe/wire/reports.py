"""Codec of load reports. Packed arrays of steps and counts keep a report down to microseconds."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, PeerViolation, Reason
from evenkeel_moe.model.load import (
    MAX_TOKENS,
    PHASE_CODE,
    STEP,
    CountingSide,
    LoadReport,
    StepTable,
)
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.v1 import telemetry_pb2 as pb
from evenkeel_moe.wire.fields import check_count, enum

MAX_REPORT_STEPS = 4096
"""Most steps of one report."""
# `STEP` holds the phase as its number on the wire.
assert all(pb.Phase.Value(f"PHASE_{phase.name}") == code for phase, code in PHASE_CODE.items())
_STEP = STEP.newbyteorder("<")
_SIDE = enum(CountingSide, pb.CountingSide, "COUNTING_SIDE")


def encode_report(report: LoadReport) -> pb.LoadReport:
    """Return the wire form of a report. The identity is not sent: the stream's Hello has it.

    Raises:
        InvalidInput: a count is outside 0..2**31-1 and would be changed by its 32 bits.
    """
    counts = report.counts
    if counts.size and (counts.min() < 0 or counts.max() > MAX_TOKENS):
        raise InvalidInput(
            f"counts range over {counts.min()}..{counts.max()}, the wire takes 0..{MAX_TOKENS}"
        )
    return pb.LoadReport(
        side=f"COUNTING_SIDE_{report.side.name}",
        step_table=report.steps.astype(_STEP).tobytes(),
        counts=counts.astype("<i4").tobytes(),
        dropped_steps=report.dropped_steps,
    )


def decode_report(message: pb.LoadReport, identity: RankIdentity, shape: ModelShape) -> LoadReport:
    """Return a report, checked against the shape that the rank declared.

    Raises:
        PeerViolation: BAD_LENGTH, NEGATIVE_COUNT, NOT_FINITE or MALFORMED, with the numbers.
    """
    side = _SIDE.read(message, "side")
    steps = _decode_steps(message.step_table)
    counts = _decode_counts(message.counts, len(steps), side, shape)
    return LoadReport(
        deployment=identity.deployment,
        generation=identity.generation,
        rank=identity.rank,
        incarnation=identity.incarnation,
        side=side,
        steps=steps,
        counts=counts,
        dropped_steps=check_count("dropped_steps", message.dropped_steps),
    )


def reported_steps(message: pb.LoadReport) -> list[int]:
    """Return the step numbers of a report that was refused, as far as they can be read.

    Of more steps than a report may hold, only the last are returned: a rank forgets all steps up
    to the highest.
    """
    table = message.step_table  # Read once: protobuf copies it each time.
    num_rows = len(table) // STEP.itemsize
    first = max(0, num_rows - MAX_REPORT_STEPS)
    whole_rows = table[first * STEP.itemsize : num_rows * STEP.itemsize]
    return [int(step) for step in np.frombuffer(whole_rows, _STEP)["step"]]


def _decode_counts(
    data: bytes, num_steps: int, side: CountingSide, shape: ModelShape
) -> NDArray[np.int32]:
    """Return a view of the message's bytes. The assembler makes the only copy."""
    width = shape.slots_per_rank if side is CountingSide.DESTINATION else shape.num_logical_experts
    want = 4 * num_steps * shape.num_layers * width
    if len(data) != want:
        raise PeerViolation(
            f"counts have {len(data)} bytes,"
            f" {num_steps} steps x {shape.num_layers} layers x {width} x 4 = {want}",
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


def _decode_steps(data: bytes) -> StepTable:
    num_steps, rest = divmod(len(data), STEP.itemsize)
    if num_steps > MAX_REPORT_STEPS:
        raise PeerViolation(
            f"report holds {num_steps} steps, at most {MAX_REPORT_STEPS} are allowed"
        )
    if rest:
        raise PeerViolation(
            f"step table has {len(data)} bytes,"
            f" {num_steps} rows of {STEP.itemsize} and {rest} more",
            Reason.BAD_LENGTH,
        )
    # Imported here because agents load this module too and must not load the compiler.
    from evenkeel_moe.wire.step_checks import check_steps

    steps: StepTable = np.frombuffer(data, _STEP)
    check_steps(steps)
    return steps
