"""Encodes and decodes every message of a rank's stream, in both directions.

Encoding trusts our own values. Decoding takes what a remote party sent: a message that
cannot be right raises PeerViolation with the numbers, and no other error.
"""

from evenkeel_moe.wire.from_rank import decode_rank_message, encode_rank_message
from evenkeel_moe.wire.to_rank import decode_controller_message, encode_controller_message

__all__ = [
    "decode_controller_message",
    "decode_rank_message",
    "encode_controller_message",
    "encode_rank_message",
]
