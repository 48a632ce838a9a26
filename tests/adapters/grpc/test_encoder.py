"""Encoding: a Prepare is encoded once, and a message without an encoding is refused."""

import pytest

from evenkeel_moe.adapters.grpc import encoder
from evenkeel_moe.adapters.grpc.encoder import Encoder
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.wire.codec import encode_controller_message
from evenkeel_moe.wire.link import FlowControl
from tests.adapters.serving import make_prepare


def test_a_prepare_is_encoded_once_for_all_ranks_and_resends(monkeypatch):
    encoded = []

    def counting(message):
        encoded.append(message)
        return encode_controller_message(message)

    monkeypatch.setattr(encoder, "encode_controller_message", counting)
    one, equal, other = make_prepare(), make_prepare(), make_prepare(1, checksum=7)
    encode = Encoder().encode
    for _ in range(5):  # Ranks, and resends with other messages between them.
        assert encode(one) == encode_controller_message(one).SerializeToString()
        assert (
            encode(FlowControl(2.0))
            == encode_controller_message(FlowControl(2.0)).SerializeToString()
        )
    assert [type(message) for message in encoded] == [Prepare, *[FlowControl] * 5]
    assert encode(other) == encode_controller_message(other).SerializeToString() != encode(one)
    encode(equal)
    sent = [message for message in encoded if isinstance(message, Prepare)]
    assert [id(message) for message in sent] == [id(one), id(other), id(one), id(equal)]


def test_a_message_that_cannot_be_said_is_refused_each_time_and_keeps_nothing():
    encode, good, bad = Encoder().encode, make_prepare(), make_prepare(checksum=-1)
    data = encode(good)
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            encode(bad)
        assert encode(good) == data
