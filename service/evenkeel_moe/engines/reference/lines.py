"""The JSON lines that the processes of a run write; `config` lists their keys."""

import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from evenkeel_moe.adapters.clock import SystemClock

_log = structlog.get_logger(__name__)


class LineWriter:
    """Appends one JSON object per line to a file. Thread-safe.

    Args:
        path: the file; its folder is made if it is missing.
        logged: kinds of lines that the log of the process gets too.
        always: keys of every line.
    """

    def __init__(self, path: Path, *, logged: Collection[str] = (), **always: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = _is_cut(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if cut:
            self._file.write("\n")
        self._logged = logged
        self._always = always
        self._lock = threading.Lock()
        self._clock = SystemClock()

    def write(self, kind: str, **keys: Any) -> None:
        """Write one line; does nothing once closed."""
        line = {"kind": kind, "unix": self._clock.unix(), **self._always, **keys}
        text = json.dumps(line, separators=(",", ":"))
        with self._lock:
            if not self._file.closed:
                self._file.write(text + "\n")
                if kind in self._logged:
                    _log.info(kind, **self._always, **keys)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def _is_cut(path: Path) -> bool:
    """Return True if a process was killed while it wrote the last line."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, if it exists, without a line that a crash cut off."""
    return _parsed(path.read_bytes()) if path.is_file() else []


def ends_of_lines(folder: Path) -> dict[Path, int]:
    """Return where the lines of the ranks end now, in bytes: what `read_new_lines` starts from."""
    return {path: path.stat().st_size for path in folder.glob("rank-*.jsonl")}


def read_new_lines(folder: Path, offsets: dict[Path, int]) -> Iterator[Mapping[str, Any]]:
    """Yield the complete lines that the ranks wrote since the last call, of all groups.

    Mutates: `offsets`, the bytes read of each file.
    """
    for path in sorted(folder.glob("rank-*.jsonl")):
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            text = file.read()
        whole = text.rfind(b"\n") + 1
        offsets[path] = offsets.get(path, 0) + whole
        yield from _parsed(text[:whole])


def _parsed(text: bytes) -> list[dict[str, Any]]:
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
