"""Control characters in texts of ranks: names with some are refused, in words they are replaced."""

from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.texts import printable_line
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.wire import link
from evenkeel_moe.wire.codec import decode_rank_message, encode_rank_message
from tests.wire.test_codec import KEY
from tests.wire.wires import HELLO, over_the_wire, refusal

STEERING = "\x1b]52;c;cm0=\x1b\\ \x07 \x7f \x9b2J \u202e \u2066 \u200f"
"""Sets the clipboard of a terminal, clears it, and turns the direction of writing around."""


@pytest.mark.parametrize(
    "field",
    [
        "node",
        "gpu_uuid",
        "placement_digest",
        "checksums_digest",
        "gate_digest",
        "device",
        "weight_format",
        "dispatch",
    ],
)
@pytest.mark.parametrize(
    "char", [*"\x1b\x07\x7f\x9b\u202e\u2066\u200f\u2028\u2029\u200b\ufe0f", 3 * "\u0301"]
)
def test_control_characters_in_a_name_of_a_hello_are_refused(field, char):
    wire = encode_rank_message(HELLO)
    setattr(wire.hello, field, f"n{char}1")
    told = str(refusal(wire, None))
    assert told.startswith(f"{field} ") and "control characters" in told
    assert printable_line(told) == told


def test_control_characters_in_a_capability_are_refused():
    wire = encode_rank_message(HELLO)
    wire.hello.capabilities.append("\x1b[2J")
    assert "control characters" in str(refusal(wire, None))


def test_control_characters_in_what_went_wrong_are_replaced_and_the_rest_is_kept():
    heartbeat = link.Heartbeat(1, 2, 3, f"out of memory\n{STEERING}.")
    no = m.Vote(KEY, False, Reason.CHECKSUM_MISMATCH, heartbeat.trouble)
    answer: Any = decode_rank_message(over_the_wire(encode_rank_message(heartbeat)), HELLO)
    vote: Any = decode_rank_message(over_the_wire(encode_rank_message(no)), HELLO)
    assert vote.detail == answer.trouble
    assert answer.trouble.isprintable()
    assert answer.trouble.startswith("out of memory \ufffd]52;c;cm0=\ufffd\\ \ufffd ")
    assert answer.trouble.endswith(".") and len(answer.trouble) == len(heartbeat.trouble)
