"""Codecs of messages declared by the types of their fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.v1 import telemetry_pb2 as pb
from evenkeel_moe.wire.fields import MessageCodec, count, enum, read_numbers
from evenkeel_moe.wire.from_rank import decode_rank_message
from tests.wire.wires import HELLO


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


@pytest.mark.parametrize(
    ("members", "error"), [("SOURCE TARGET", ValueError), ("SOURCE", AssertionError)]
)
def test_an_enum_whose_names_are_not_those_of_the_wire_is_refused(members, error):
    with pytest.raises(error):
        enum(Enum("Side", members), pb.CountingSide, "COUNTING_SIDE")  # type: ignore[arg-type]


class ReadInParts(Sequence):
    """Numbers as protobuf has them. It notes how many are asked for at a time."""

    def __init__(self, size):
        self.size, self.lengths = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, part):
        self.lengths.append(len(range(self.size)[part]))
        return range(self.size)[part]

    def __iter__(self):
        raise AssertionError("read in one call")


@pytest.mark.parametrize("size", [0, 1, 1 << 14, (1 << 14) + 1, 100_000])
def test_many_numbers_are_read_in_parts_so_that_other_threads_get_their_turn(size):
    message: Any = SimpleNamespace(checksums=ReadInParts(size))
    assert read_numbers(message, "checksums") == tuple(range(size))
    assert max(message.checksums.lengths, default=0) <= 1 << 14


def test_millions_of_tiles_are_refused_before_they_are_read():
    message = agent_pb2.CostCurve(tile_tokens=1, tile_seconds=[float("nan")] * 4097)
    with pytest.raises(PeerViolation, match="4097 tiles, 1 to 4096"):
        decode_rank_message(agent_pb2.RankMessage(cost_curve=message), HELLO)
