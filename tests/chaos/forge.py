"""Forges the record of a run, at the level of bytes and lines, to show that the judge finds it."""

import gzip
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.judge.case import DUMPS, WIRE, Case, wave_of
from tests.chaos.judge.rules_waves import HOLDING
from tests.chaos.judge.schema import controller_message, rank_message
from tests.chaos.judge.wire import Moment, WireMessage
from tests.chaos.judge.wire_log import (
    TO_CLIENT,
    TO_SERVER,
    Record,
    RecordKind,
    pack_record,
)

__all__ = ["Forger", "unpack"]

_UNKNOWN_FIELD = 0x7A
"""Tag of a field that no message has, with a length like that of a nested message."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a recorded run.

    Its logs are plain in the archive, which compresses better, and are compressed here.
    """
    with tarfile.open(archive) as file:
        # Python below 3.11.4 has no filters; from 3.12 on, extracting without one is a warning.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder)
    for name in (WIRE, DUMPS):
        plain = folder / name.removesuffix(".gz")
        with gzip.open(folder / name, "wb", compresslevel=1) as out:
            out.write(plain.read_bytes())
        plain.unlink()


class Forger:
    """Changes the record of one run.

    Args:
        folder: of the run; it is changed.
        case: the facts before any change.
        records: of the wire before any change.
    """

    def __init__(self, folder: Path, case: Case, records: Sequence[Record]) -> None:
        self.folder = folder
        self.case = case
        self._records = list(records)

    # --- what ranks wrote ---

    def lines(self, name: str, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Change the lines of a file of the ranks."""
        path = self.folder / "ranks" / name
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    # --- the store ---

    def last_dump(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the keys of the dump after the run, which are named without their prefix."""
        dumps = self._dumps()
        final = next(dump for dump in reversed(dumps) if dump["final"])
        keys = final["keys"]
        prefix = next(iter(keys)).rpartition(":")[0] + ":"
        plain = {key.removeprefix(prefix): value for key, value in keys.items()}
        change(plain)
        final["keys"] = {prefix + key: value for key, value in plain.items()}
        self._write_dumps(dumps)

    def drop_last_dump(self) -> None:
        """Remove the dump after the run."""
        self._write_dumps([dump for dump in self._dumps() if not dump["final"]])

    def _dumps(self) -> list[dict[str, Any]]:
        with gzip.open(self.folder / DUMPS, "rt", encoding="utf-8") as file:
            return [json.loads(text) for text in file]

    def _write_dumps(self, dumps: list[dict[str, Any]]) -> None:
        with gzip.open(self.folder / DUMPS, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(dump) + "\n" for dump in dumps)

    # --- the wire ---

    def first(self, kind: str, wanted: Callable[[Any], bool] = lambda _: True) -> WireMessage:
        """Return the first message of a kind whose body is wanted."""
        return next(m for m in self.case.messages if m.kind == kind and wanted(m.body))

    def decided_wave(self) -> tuple[WireMessage, WireMessage]:
        """Return the first Commit that rests on votes alone, and the last yes before it."""
        for commit in (message for message in self.case.messages if message.kind == "commit"):
            wave = wave_of(commit.body.wave)
            before = [
                message
                for message in self.case.messages
                if message.from_rank and message.passed is not None and message.passed < commit.read
            ]
            votes = [m for m in before if m.kind == "vote" and wave_of(m.body.wave) == wave]
            told = [
                message
                for message in before
                if message.kind == "rank_state"
                and message.body.state in HOLDING
                and wave_of(message.body.wave) == wave
            ]
            if len(votes) == self.case.generations[wave.generation].num_ranks and not told:
                return commit, max(votes, key=lambda vote: vote.passed or Moment(0, 0))
        raise AssertionError("no Commit rests on votes alone")

    def rewrite(self, message: WireMessage, change: Callable[[Any], None]) -> None:
        """Replace a message on the wire by one of the same length."""
        old = _whole(message).SerializeToString()
        new = _whole(message)
        change(getattr(new, message.kind))
        self._replace(message, old, new.SerializeToString())

    def hide(self, message: WireMessage) -> None:
        """Turn a message on the wire into one that says nothing."""
        self.patch(message, lambda whole: bytes([_UNKNOWN_FIELD]) + whole[1:])

    def patch(self, message: WireMessage, change: Callable[[bytes], bytes]) -> None:
        """Change the bytes of a message on the wire, but not their number."""
        old = _whole(message).SerializeToString()
        self._replace(message, old, change(old))

    def delay(self, message: WireMessage, until: Moment) -> None:
        """Let a rank's message, and what follows on its connection, arrive after a moment."""
        assert message.passed is not None
        moved = [
            record
            for record in self._records[message.passed.position : until.position + 1]
            if record.kind is RecordKind.PASSED
            and record.connection == message.stream.connection
            and record.direction == TO_SERVER
        ]
        gone = {id(record) for record in moved}
        late = [replace(record, ns=until.ns) for record in moved]
        kept = [r for r in self._records[: until.position + 1] if id(r) not in gone]
        self._records = [*kept, *late, *self._records[until.position + 1 :]]

    def refuse_write(self, connection: int, sent: Moment) -> None:
        """Let the store answer a write by its refusal: another term has taken over."""
        for position in range(sent.position, len(self._records)):
            record = self._records[position]
            if (record.kind, record.connection, record.direction) == (
                RecordKind.READ,
                connection,
                TO_CLIENT,
            ):
                self._records[position] = _patched(record, b":0\r\n", b":9\r\n")
                return

    def overwrite(self, moment: Moment, data: bytes) -> None:
        """Put other bytes in place of the first ones of a chunk."""
        record = self._records[moment.position]
        payload = data + record.payload[len(data) :]
        self._records[moment.position] = replace(record, payload=payload)

    def write_wire(self) -> None:
        """Write the changed log of the wire."""
        with gzip.open(self.folder / WIRE, "wb", compresslevel=1) as file:
            file.write(b"".join(pack_record(record) for record in self._records))

    def _replace(self, message: WireMessage, old: bytes, new: bytes) -> None:
        position = message.read.position
        self._records[position] = _patched(self._records[position], old, new)


def _whole(message: WireMessage) -> Any:
    """Return a copy of the message with its oneof."""
    whole = (rank_message() if message.from_rank else controller_message())()
    getattr(whole, message.kind).CopyFrom(message.body)
    return whole


def _patched(record: Record, old: bytes, new: bytes) -> Record:
    assert len(old) == len(new) and old in record.payload
    return replace(record, payload=record.payload.replace(old, new, 1))
