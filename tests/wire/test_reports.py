"""Load reports keep steps and counts on the wire; impossible ones are refused with the numbers."""

import dataclasses

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.load import STEP, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.v1 import agent_pb2, telemetry_pb2
from evenkeel_moe.wire.from_rank import decode_rank_message, encode_rank_message
from evenkeel_moe.wire.reports import MAX_REPORT_STEPS, reported_steps
from tests.wire.wires import HELLO, make_report, over_the_wire, refusal, same


def test_counts_of_another_length_are_refused_with_the_arithmetic():
    error = refusal(make_report(counts=b"\0" * 68))
    assert error.reason is Reason.BAD_LENGTH
    assert "68 bytes, 2 steps x 3 layers x 3 x 4 = 72" in str(error)


def test_negative_counts_are_refused_with_how_many():
    counts = np.arange(18, dtype="<i4")
    counts[4] = -3
    error = refusal(make_report(counts=counts.tobytes()))
    assert error.reason is Reason.NEGATIVE_COUNT
    assert "1 of 18 counts are negative, smallest -3" in str(error)


def make_steps(place, **fields):
    """A report with fields of one row of its table set by force."""
    wire = make_report()
    table = np.frombuffer(wire.load_report.step_table, STEP).copy()
    for name, value in fields.items():
        table[name][place] = value
    wire.load_report.step_table = table.tobytes()
    return wire


@pytest.mark.parametrize("value", [float("inf"), -1.0, 1e308, 100_001.0])
def test_a_compute_time_that_is_no_duration_is_refused(value):
    error = refusal(make_steps(0, compute_s=value))
    assert error.reason is Reason.NOT_FINITE and f"step 7 has compute_s {value}" in str(error)


@pytest.mark.parametrize("second", [7, 6, -1, 1 << 62])
def test_steps_must_rise(second):
    error = refusal(make_steps(1, step=second))
    assert error.reason is Reason.MALFORMED and f"step {second} follows step 7" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 1 << 31),
        ("tokens", -1),
        ("epoch", 1 << 62),
        ("epoch", -1),
        ("phase", 0),
        ("phase", 4),
        ("dummy", 2),
    ],
)
def test_step_fields_out_of_range_are_refused(field, value):
    error = refusal(make_steps(1, **{field: value}))
    assert error.reason is Reason.MALFORMED and str(value) in str(error)


def test_a_step_table_cut_off_in_a_row_is_refused_with_the_arithmetic():
    error = refusal(make_report(step_table=make_report().load_report.step_table[:-1]))
    assert error.reason is Reason.BAD_LENGTH and "79 bytes, 1 rows of 40 and 39 more" in str(error)


def test_the_step_numbers_of_a_refused_report_can_still_be_read():
    """The answer names them, so that the rank drops them."""
    wire = make_steps(1, step=-5)
    assert reported_steps(wire.load_report) == [7, -5]
    wire.load_report.step_table = wire.load_report.step_table[:-1]
    assert reported_steps(wire.load_report) == [7]


def test_of_far_too_many_steps_of_a_refused_report_only_the_last_are_read():
    """All of them would be a tenth of a second of the event loop's time in 60 MB."""
    wire = agent_pb2.RankMessage()
    wire.load_report.step_table = step_table(
        StepMeta(step, 0, Phase.DECODE, 1) for step in range(5000)
    ).tobytes()
    assert reported_steps(wire.load_report) == list(range(5000 - MAX_REPORT_STEPS, 5000))


def test_an_unknown_side_is_refused():
    assert refusal(make_report(side=0)).reason is Reason.MALFORMED


def test_a_report_of_too_many_steps_is_refused_before_anything_is_allocated():
    wire = agent_pb2.RankMessage()
    wire.load_report.side = telemetry_pb2.COUNTING_SIDE_SOURCE
    wire.load_report.step_table = b"\0" * (4097 * STEP.itemsize)
    assert "4097 steps, at most 4096" in str(refusal(wire))


def test_counts_of_a_recorder_arrive_with_their_values():
    report = decode_rank_message(make_report(), HELLO)
    assert isinstance(report, LoadReport)
    recorded = dataclasses.replace(report, counts=report.counts.astype(np.int64))
    assert same(decode_rank_message(over_the_wire(encode_rank_message(recorded)), HELLO), report)


@pytest.mark.parametrize("value", [-1, 1 << 31])
def test_counts_out_of_range_are_refused_by_the_sender(value):
    report = decode_rank_message(make_report(), HELLO)
    assert isinstance(report, LoadReport)
    counts = report.counts.astype(np.int64)
    counts[0, 0, 0] = value
    with pytest.raises(InvalidInput, match=str(value)):
        encode_rank_message(dataclasses.replace(report, counts=counts))
