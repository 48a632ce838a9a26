"""The JSON lines a process of a run writes; `config` lists their keys."""

import json
import threading
from pathlib import Path
from typing import Any

from evenkeel_moe.adapters.clock import SystemClock

__all__ = ["LineWriter"]


class LineWriter:
    """Appends one JSON object per line to a file; threads may share it."""

    def __init__(self, path: Path, **always: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._always = always
        self._lock = threading.Lock()
        self._clock = SystemClock()

    def write(self, kind: str, **keys: Any) -> None:
        """Write one line."""
        unix = self._clock.unix()
        text = json.dumps(
            {"kind": kind, "unix": unix, **self._always, **keys}, separators=(",", ":")
        )
        with self._lock:
            if not self._file.closed:
                self._file.write(text + "\n")

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            self._file.close()
