"""The largest right message of a rank fits its limit, and little more does."""

from hypothesis import given

from evenkeel_moe.model.load import STEP
from evenkeel_moe.wire.codec import encode_rank_message
from evenkeel_moe.wire.limits import MAX_HELLO_BYTES, most_message_bytes
from evenkeel_moe.wire.reports import MAX_REPORT_STEPS
from tests.wire import strategies as gen


@given(gen.rank_messages)
def test_every_message_of_a_rank_fits(message):
    assert encode_rank_message(message).ByteSize() <= most_message_bytes(gen.SHAPE)


@given(gen.hellos)
def test_every_hello_fits(hello):
    assert encode_rank_message(hello).ByteSize() <= MAX_HELLO_BYTES


def test_largest_report_fits():
    shape = gen.SHAPE
    step = STEP.itemsize + 4 * shape.num_layers * shape.num_logical_experts
    assert MAX_REPORT_STEPS * step < most_message_bytes(shape) < MAX_REPORT_STEPS * step + (1 << 19)
