"""Codecs of messages declared by the types of their fields."""

from dataclasses import dataclass

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.v1 import telemetry_pb2 as pb
from evenkeel_moe.wire.fields import MessageCodec, count


@dataclass(frozen=True)
class Receipt:
    highest_step: int | None
    rejected_steps: int
    reason: Reason | None


@dataclass(frozen=True)
class Unknown:
    highest_stop: int


@dataclass(frozen=True)
class Unsupported:
    rejected_steps: set[int]


@pytest.mark.parametrize("receipt", [Receipt(None, 0, None), Receipt(0, 3, Reason.LATE_STEP)])
def test_none_is_not_sent_and_is_not_zero(receipt):
    codec = MessageCodec(Receipt, pb.ReportAck)
    message = codec.encode(receipt)
    assert message.HasField("highest_step") == (receipt.highest_step is not None)
    assert codec.decode(message) == receipt


def test_a_codec_for_fields_that_the_message_or_the_model_lacks_is_refused():
    with pytest.raises(AssertionError):
        MessageCodec(Unknown, pb.ReportAck)
    with pytest.raises(AssertionError):
        MessageCodec(Receipt, pb.ReportAck, highest_stop=count())


def test_a_type_without_a_codec_is_refused():
    with pytest.raises(KeyError):
        MessageCodec(Unsupported, pb.ReportAck)
