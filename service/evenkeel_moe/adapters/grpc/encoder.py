"""Encodes the controller's messages for the wire."""

from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.wire.link import ToRankLink
from evenkeel_moe.wire.to_rank import encode_controller_message


class Encoder:
    """Encodes messages, and keeps the bytes of the newest Prepare.

    One Prepare goes to every rank of a group, again and again while they copy, and may hold
    thousands of transfers. Its bytes are reused for that very object.
    """

    def __init__(self) -> None:
        self._newest: Prepare | None = None
        self._data = b""

    def encode(self, message: ToRankLink) -> bytes:
        """Return the bytes of a message.

        Raises:
            EvenkeelError, ValueError: the message has no encoding.
        """
        if message is self._newest:
            return self._data
        data = encode_controller_message(message).SerializeToString()
        if isinstance(message, Prepare):
            self._newest, self._data = message, data
        return data
