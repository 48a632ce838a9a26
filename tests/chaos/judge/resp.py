"""Reads commands to a store and its answers from the bytes of a connection (RESP2 and RESP3)."""

from collections.abc import Iterator
from typing import Any

__all__ = ["ErrorAnswer", "Push", "RespReader"]


class ErrorAnswer(str):
    """The text of an error that the store answered."""


class Push(tuple[Any, ...]):
    """A message of the store that answers no command."""


class _Incomplete(Exception):
    """The value has not arrived as a whole."""


class RespReader:
    """Reads the values of one direction of one connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._offset = 0
        """Offset of the buffer in the bytes of the direction."""

    def feed(self, data: bytes) -> Iterator[tuple[Any, int, int]]:
        """Take further bytes; yield each whole value with the offsets of its start and end.

        Raises:
            ValueError: the bytes are not RESP.
        """
        self._buffer += data
        while self._buffer:
            try:
                value, end = self._value(0)
            except _Incomplete:
                return
            start = self._offset
            del self._buffer[:end]
            self._offset += end
            yield value, start, self._offset

    def _line(self, at: int) -> tuple[bytes, int]:
        end = self._buffer.find(b"\r\n", at)
        if end < 0:
            raise _Incomplete
        return bytes(self._buffer[at:end]), end + 2

    def _value(self, at: int) -> tuple[Any, int]:
        line, at = self._line(at)
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest.decode(errors="replace"), at
            case b"-":
                return ErrorAnswer(rest.decode(errors="replace")), at
            case b":" | b"(":
                return int(rest), at
            case b",":
                return float(rest), at
            case b"#":
                return rest == b"t", at
            case b"_":
                return None, at
            case b"$" | b"=" | b"!":
                return self._bulk(kind, int(rest), at)
            case b"*" | b"~" | b">" | b"%":
                return self._many(kind, int(rest), at)
        raise ValueError(f"{line[:40]!r} begins no value")

    def _bulk(self, kind: bytes, length: int, at: int) -> tuple[Any, int]:
        if length < 0:
            return None, at
        if len(self._buffer) < at + length + 2:
            raise _Incomplete
        body = bytes(self._buffer[at : at + length])
        found = ErrorAnswer(body.decode(errors="replace")) if kind == b"!" else body
        return found, at + length + 2

    def _many(self, kind: bytes, length: int, at: int) -> tuple[Any, int]:
        if length < 0:
            return None, at
        values = []
        for _ in range(2 * length if kind == b"%" else length):
            value, at = self._value(at)
            values.append(value)
        return (Push(values) if kind == b">" else values), at
