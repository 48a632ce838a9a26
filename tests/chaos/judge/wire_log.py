"""The log of a run's wire: all bytes that proxies read and passed on, in one order.

A log is a gzip file of records. A record is a header, then its payload. The order of the records is
the order of the events, for all connections of a run, because one process writes them all.
"""

import gzip
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

__all__ = [
    "TO_CLIENT",
    "TO_SERVER",
    "Record",
    "RecordKind",
    "WireWriter",
    "pack_record",
    "read_records",
]

TO_SERVER, TO_CLIENT = 0, 1
_HEADER = struct.Struct("<BBIQI")
"""Kind, direction, connection, Unix nanoseconds, bytes of the payload."""
_COUNT = struct.Struct("<I")
_MOST_BYTES = 1 << 30


class RecordKind(IntEnum):
    """The event that a record is about."""

    OPENED = 0
    """A connection was opened; the payload names its `server` and `door` as JSON."""
    READ = 1
    """The proxy read the bytes of the payload from one side: their sender has sent them."""
    PASSED = 2
    """The proxy wrote so many of the bytes that it had read to the other side."""
    CLOSED = 3
    CUT_SHORT = 4
    """The connection's bytes are not recorded from here on."""


@dataclass(frozen=True, slots=True)
class Record:
    """One event of one connection."""

    kind: RecordKind
    direction: int
    """TO_SERVER or TO_CLIENT."""
    connection: int
    ns: int
    """Unix nanoseconds."""
    payload: bytes

    @property
    def count(self) -> int:
        """The number of bytes that a PASSED record is about."""
        return int(_COUNT.unpack(self.payload)[0])


class WireWriter:
    """Writes the log of a run.

    Args:
        path: the file.
        most_bytes: the most bytes of all connections that are recorded.
    """

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._file = gzip.open(path, "wb", compresslevel=1)
        self._left = most_bytes
        self._limits: dict[int, int] = {}
        """Bytes that may still be recorded, by connection."""
        self._connections = 0

    def opened(self, server: str, door: str, most_bytes: int = _MOST_BYTES) -> int:
        """Record a new connection and return its number.

        Args:
            server: the name of the process behind the proxy.
            door: the kind of clients that come to this proxy.
            most_bytes: the most bytes of this connection that are recorded.
        """
        self._connections += 1
        self._limits[self._connections] = most_bytes
        about = json.dumps({"server": server, "door": door}).encode()
        self._write(RecordKind.OPENED, 0, self._connections, about)
        return self._connections

    def read(self, connection: int, direction: int, data: bytes) -> None:
        """Record bytes that were read from one side."""
        if connection not in self._limits:
            return
        if len(data) > min(self._left, self._limits[connection]):
            del self._limits[connection]
            self._write(RecordKind.CUT_SHORT, direction, connection, b"")
            return
        self._left -= len(data)
        self._limits[connection] -= len(data)
        self._write(RecordKind.READ, direction, connection, data)

    def passed(self, connection: int, direction: int, count: int) -> None:
        """Record that bytes were written to the other side."""
        if connection in self._limits:
            self._write(RecordKind.PASSED, direction, connection, _COUNT.pack(count))

    def closed(self, connection: int) -> None:
        """Record the end of a connection."""
        self._limits.pop(connection, None)
        self._write(RecordKind.CLOSED, 0, connection, b"")

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(self, kind: RecordKind, direction: int, connection: int, payload: bytes) -> None:
        self._file.write(pack_record(Record(kind, direction, connection, time.time_ns(), payload)))


def pack_record(record: Record) -> bytes:
    """Return a record as it is in a log."""
    size = len(record.payload)
    header = _HEADER.pack(record.kind, record.direction, record.connection, record.ns, size)
    return header + record.payload


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a log, up to the place where a crash cut it off."""
    with gzip.open(path, "rb") as file:
        try:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                kind, direction, connection, ns, length = _HEADER.unpack(header)
                payload = file.read(length)
                if len(payload) < length:
                    return
                yield Record(RecordKind(kind), direction, connection, ns, payload)
        except EOFError:
            return
