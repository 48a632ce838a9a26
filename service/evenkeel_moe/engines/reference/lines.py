"""The JSON lines that the processes of a run write; `config` lists their keys."""

import json
import threading
from pathlib import Path
from typing import Any

from evenkeel_moe.adapters.clock import SystemClock


class LineWriter:
    """Appends one JSON object per line to a file. Thread-safe.

    Args:
        path: the file; its folder is made if it is missing.
        always: keys of every line.
    """

    def __init__(self, path: Path, **always: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
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

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


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
