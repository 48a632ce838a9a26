"""The messages and the writes to the store of a run, as decoded from the log of its wire."""

import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from tests.chaos.judge.http2 import GrpcReader, Undecodable
from tests.chaos.judge.resp import Push, RespReader
from tests.chaos.judge.schema import controller_message, rank_message
from tests.chaos.judge.wire_log import TO_CLIENT, TO_SERVER, Record, RecordKind, read_records

__all__ = ["Moment", "RankStream", "StoreWrite", "Wire", "WireMessage", "read_wire"]

_METHOD = "/evenkeel.v1.RankLink/Attach"
_SIDES = ("to server", "to client")
_NOT_COMMANDS = frozenset({b"PSYNC", b"SYNC", b"SUBSCRIBE", b"PSUBSCRIBE"})
"""After these the store no longer answers command by command."""


class Moment(NamedTuple):
    """A place in the order of all events of the wire."""

    position: int
    """Number of its record in the log; the order of two moments is that of their positions."""
    ns: int
    """Unix nanoseconds."""

    @property
    def unix(self) -> float:
        """Unix seconds."""
        return self.ns / 1e9


@dataclass(eq=False, slots=True)
class RankStream:
    """One call of Attach."""

    connection: int
    number: int
    """The HTTP/2 stream."""
    controller: str
    """The replica that serves it."""
    door: str
    messages: "list[WireMessage]" = field(default_factory=list)
    """Both directions; each direction in the order in which it was sent."""

    @property
    def identity(self) -> Any:
        """The identity that its Hello names; None without a Hello."""
        first = next((m for m in self.messages if m.from_rank), None)
        return first.body.identity if first is not None and first.kind == "hello" else None


@dataclass(eq=False, slots=True)
class WireMessage:
    """One message of the protocol."""

    stream: RankStream
    from_rank: bool
    kind: str
    """Name of the field of the oneof, such as `vote`; empty if none is set."""
    body: Any
    """The message in that field."""
    start: int
    """Offset of its first frame in the bytes of its direction."""
    read: Moment
    """It was sent before this moment."""
    passed: Moment | None = None
    """It arrived after this moment; None if it was never passed on."""

    @property
    def place(self) -> str:
        """Its place in the log, in words."""
        side = _SIDES[TO_SERVER if self.from_rank else TO_CLIENT]
        return f"connection {self.stream.connection} {side}, byte {self.start}"


@dataclass(eq=False, slots=True)
class StoreWrite:
    """One fenced write to the store."""

    deployment: str
    table: str
    """`documents`, `plans` or `epochs`."""
    name: str
    body: bytes
    term: int
    node: str
    """The node of the store to which it went."""
    connection: int
    start: int
    sent: Moment
    accepted: bool = False
    answered: Moment | None = None
    """The answer arrived after this moment; None if it was never passed on."""

    @property
    def place(self) -> str:
        """Its place in the log, in words."""
        return f"connection {self.connection} {_SIDES[TO_SERVER]}, byte {self.start}"


@dataclass(slots=True)
class Wire:
    """All that was decoded."""

    streams: list[RankStream] = field(default_factory=list)
    """In the order of their first message."""
    messages: list[WireMessage] = field(default_factory=list)
    """In the order in which the proxies read them."""
    writes: list[StoreWrite] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Connections of ranks or of the store that are not wholly decoded."""
    undecoded_strangers: int = 0
    """Connections of other clients that are not wholly decoded."""
    connections: int = 0


def read_wire(path: Path) -> Wire:
    """Decode a log."""
    wire = Wire()
    links: dict[int, _RankConnection | _StoreConnection] = {}
    for index, record in enumerate(read_records(path)):
        moment = Moment(index, record.ns)
        if record.kind is RecordKind.OPENED:
            wire.connections += 1
            links[record.connection] = _opened(wire, record)
            continue
        link = links[record.connection]
        try:
            _follow(link, record, moment)
        except (Undecodable, DecodeError, ValueError) as error:
            link.given_up = True
            if link.door == "strangers":
                wire.undecoded_strangers += 1
            else:
                wire.faults.append(f"connection {record.connection} of {link.door}: {error}")
    return wire


def _opened(wire: Wire, record: Record) -> "_RankConnection | _StoreConnection":
    about = json.loads(record.payload)
    kind = _StoreConnection if about["door"] == "store" else _RankConnection
    return kind(wire, record.connection, about["server"], about["door"])


def _follow(link: "_RankConnection | _StoreConnection", record: Record, moment: Moment) -> None:
    if link.given_up:
        return
    match record.kind:
        case RecordKind.READ:
            link.read(record.direction, record.payload, moment)
        case RecordKind.PASSED:
            link.passed(record.direction, record.count, moment)
        case RecordKind.CUT_SHORT:
            raise Undecodable("not all of its bytes were recorded")
        case _:
            pass


class _Connection:
    """One connection: knows which of the bytes it read were passed on."""

    def __init__(self, wire: Wire, number: int, server: str, door: str) -> None:
        self.wire = wire
        self.number = number
        self.server = server
        self.door = door
        self.given_up = False
        self._passed = [0, 0]
        self._waiting: tuple[deque[tuple[int, Callable[[Moment], None]]], ...] = (deque(), deque())

    def passed(self, direction: int, count: int, moment: Moment) -> None:
        """Take note of bytes that were passed on, and of what is complete by them."""
        self._passed[direction] += count
        waiting = self._waiting[direction]
        while waiting and waiting[0][0] <= self._passed[direction]:
            waiting.popleft()[1](moment)

    def when_passed(self, direction: int, end: int, note: Callable[[Moment], None]) -> None:
        """Call `note` with the moment at which the bytes up to `end` were passed on."""
        self._waiting[direction].append((end, note))


class _RankConnection(_Connection):
    """A connection to the gRPC port of a controller."""

    def __init__(self, wire: Wire, number: int, server: str, door: str) -> None:
        super().__init__(wire, number, server, door)
        self._readers = (GrpcReader(from_client=True), GrpcReader(from_client=False))
        self._streams: dict[int, RankStream] = {}

    def read(self, direction: int, data: bytes, moment: Moment) -> None:
        """Decode further bytes of one direction."""
        for found in self._readers[direction].feed(data):
            if self._readers[TO_SERVER].paths.get(found.stream) != _METHOD:
                continue
            kind = rank_message() if direction == TO_SERVER else controller_message()
            whole = kind.FromString(found.body)
            name = whole.WhichOneof("body") or ""
            stream = self._stream(found.stream)
            body = getattr(whole, name) if name else None
            message = WireMessage(stream, direction == TO_SERVER, name, body, found.start, moment)
            stream.messages.append(message)
            self.wire.messages.append(message)
            self.when_passed(direction, found.end, _note(message, "passed"))

    def _stream(self, number: int) -> RankStream:
        if number not in self._streams:
            stream = RankStream(self.number, number, self.server, self.door)
            self._streams[number] = stream
            self.wire.streams.append(stream)
        return self._streams[number]


class _StoreConnection(_Connection):
    """A connection to a node of the store."""

    def __init__(self, wire: Wire, number: int, server: str, door: str) -> None:
        super().__init__(wire, number, server, door)
        self._readers = (RespReader(), RespReader())
        self._unanswered: deque[StoreWrite | None] = deque()

    def read(self, direction: int, data: bytes, moment: Moment) -> None:
        """Decode further bytes of one direction."""
        for value, start, end in self._readers[direction].feed(data):
            if direction == TO_SERVER:
                self._command(value, start, moment)
            elif not isinstance(value, Push):
                self._answer(value, end)
            if self.given_up:
                return

    def _command(self, parts: list[Any], start: int, moment: Moment) -> None:
        if parts[0].upper() in _NOT_COMMANDS:
            self.given_up = True
            return
        write = _fenced_write(parts, self.server, self.number, start, moment)
        self._unanswered.append(write)
        if write is not None:
            self.wire.writes.append(write)

    def _answer(self, value: Any, end: int) -> None:
        if not self._unanswered:
            raise Undecodable(f"an answer to no command before byte {end}")
        write = self._unanswered.popleft()
        if write is not None:
            write.accepted = value == 0
            self.when_passed(TO_CLIENT, end, _note(write, "answered"))


def _note(target: object, name: str) -> Callable[[Moment], None]:
    return lambda moment: setattr(target, name, moment)


def _fenced_write(
    parts: list[Any], node: str, connection: int, start: int, moment: Moment
) -> StoreWrite | None:
    """Return what a script writes if it is a write of a record; docs/store.md names the keys."""
    if parts[0].upper() != b"EVAL":
        return None
    count = int(parts[2])
    keys, values = parts[3 : 3 + count], parts[3 + count :]
    if count < 3 or not keys[0].endswith(b":term"):
        return None
    found = re.fullmatch(r".*\{(.+)\}:(\w+)", keys[2].decode())
    if found is None:
        return None
    deployment, table = found.groups()
    body = values[6] if table == "plans" else values[5]
    name = values[4].decode()
    term = int(values[0])
    return StoreWrite(deployment, table, name, body, term, node, connection, start, moment)
