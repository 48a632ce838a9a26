"""Reads the gRPC messages of one direction of a connection from its bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpack import Decoder, HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PushPromiseFrame,
)

__all__ = ["PREFACE", "GrpcMessage", "GrpcReader", "Undecodable"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = 9
_MESSAGE_HEADER = 5
"""A byte that is 1 if the message is compressed, and the length as 4 bytes."""
_MOST_FRAME = 1 << 22
"""The most bytes of a frame; a length above this is taken for noise."""
_MOST_TABLE = 1 << 16
"""The most bytes of a header table that a peer may ask for."""


class Undecodable(Exception):
    """Bytes that are not gRPC over HTTP/2."""


@dataclass(frozen=True, slots=True)
class GrpcMessage:
    """One message."""

    stream: int
    """The number of its HTTP/2 stream."""
    start: int
    """Offset of the frame in which it begins, in the bytes of its direction."""
    end: int
    """Offset behind the frame in which it ends."""
    body: bytes


@dataclass(slots=True)
class _Partial:
    """The bytes of a stream that are not a whole message yet."""

    start: int = 0
    data: bytearray = field(default_factory=bytearray)


class GrpcReader:
    """Reads one direction of one connection.

    Args:
        from_client: True for the direction that begins with the client's preface.
    """

    def __init__(self, *, from_client: bool) -> None:
        self._preface_left = len(PREFACE) if from_client else 0
        self._buffer = bytearray()
        self._offset = 0
        """Offset of the buffer in the bytes of the direction."""
        self._partials: dict[int, _Partial] = {}
        self._headers = Decoder()
        self._headers.max_allowed_table_size = _MOST_TABLE
        self._block = bytearray()
        self.paths: dict[int, str] = {}
        """The path that the client asked for, by stream; empty in the other direction."""

    def feed(self, data: bytes) -> Iterator[GrpcMessage]:
        """Take further bytes; yield the messages that they complete.

        Raises:
            Undecodable: the bytes are not gRPC over HTTP/2.
        """
        self._buffer += data
        if self._preface_left:
            begin = bytes(self._buffer[: len(PREFACE)])
            if not PREFACE.startswith(begin):
                raise Undecodable("it does not begin with the preface of HTTP/2")
            if len(begin) < len(PREFACE):
                return
            self._drop(len(PREFACE))
            self._preface_left = 0
        while (size := self._frame_size()) is not None:
            start, raw = self._offset, bytes(self._buffer[:size])
            self._drop(size)
            yield from self._take(_parse(raw, start), start)

    def _frame_size(self) -> int | None:
        """Return the bytes of the next frame; None if it is not complete."""
        if len(self._buffer) < _FRAME_HEADER:
            return None
        size = _FRAME_HEADER + int.from_bytes(self._buffer[:3], "big")
        if size > _MOST_FRAME:
            raise Undecodable(f"a frame of {size} bytes at byte {self._offset}")
        return size if len(self._buffer) >= size else None

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._offset += count

    def _take(self, frame: Frame, start: int) -> Iterator[GrpcMessage]:
        match frame:
            case DataFrame():
                yield from self._take_data(frame, start)
            case HeadersFrame() | ContinuationFrame():
                self._block += frame.data
                if "END_HEADERS" in frame.flags:
                    self._take_headers(frame.stream_id, start)
            case PushPromiseFrame():
                raise Undecodable(f"a push at byte {start}, which gRPC does not have")

    def _take_headers(self, stream: int, start: int) -> None:
        try:
            headers = self._headers.decode(bytes(self._block), raw=True)
        except HPACKError as error:
            raise Undecodable(f"headers at byte {start}: {error}") from None
        self._block.clear()
        for name, value in headers:
            if bytes(name) == b":path":
                self.paths[stream] = bytes(value).decode(errors="replace")

    def _take_data(self, frame: DataFrame, start: int) -> Iterator[GrpcMessage]:
        partial = self._partials.setdefault(frame.stream_id, _Partial())
        if not partial.data:
            partial.start = start
        partial.data += frame.data
        while len(partial.data) >= _MESSAGE_HEADER:
            size = _MESSAGE_HEADER + int.from_bytes(partial.data[1:_MESSAGE_HEADER], "big")
            if partial.data[0]:
                raise Undecodable(f"a compressed message at byte {partial.start}")
            if len(partial.data) < size:
                return
            body = bytes(partial.data[_MESSAGE_HEADER:size])
            yield GrpcMessage(frame.stream_id, partial.start, self._offset, body)
            del partial.data[:size]
            partial.start = start


def _parse(raw: bytes, start: int) -> Frame:
    try:
        frame, _ = Frame.parse_frame_header(memoryview(raw[:_FRAME_HEADER]))
        frame.parse_body(memoryview(raw[_FRAME_HEADER:]))
    except (HyperframeError, ValueError) as error:
        raise Undecodable(f"the frame at byte {start}: {error!r:.200}") from None
    return frame
