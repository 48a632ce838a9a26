"""The JSON lines that the processes of a run write; `config` lists their keys."""

import json
import threading
from collections.abc import Collection
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
        self._file = path.open("a", encoding="utf-8", buffering=1)
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


_TAIL_BYTES = 16_384
"""More than the longest line of a rank, which names each rank a few times."""


def newest_step(path: Path) -> int | None:
    """Return the step of the last `step` line near the end of a file; None without one.

    It reads the end of the file alone, so that a long run may be asked again and again.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # The first line may be cut off by the seek, the last one by its writer.
        if isinstance(found, dict) and found.get("kind") == "step":
            return int(found["step"])
    return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, if it exists, without a line that a crash cut off."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
