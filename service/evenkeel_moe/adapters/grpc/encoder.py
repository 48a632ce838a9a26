"""What the controller says, as the bytes of the wire."""

from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.wire.codec import encode_controller_message
from evenkeel_moe.wire.link import ToRankLink

__all__ = ["Encoder"]


class Encoder:
    """Messages to bytes.

    One Prepare goes to every rank of a group, again and again while they copy, and may name thousands of transfers:
    the bytes of the newest are kept, for that very object.
    """

    def __init__(self) -> None:
        self._newest: Prepare | None = None
        self._data = b""

    def encode(self, message: ToRankLink) -> bytes:
        """The bytes of a message.

        Raises:
            EvenkeelError, ValueError: it cannot be said on the wire.
        """
        if message is self._newest:
            return self._data
        data = encode_controller_message(message).SerializeToString()
        if isinstance(message, Prepare):
            self._newest, self._data = message, data
        return data
