"""Reads how much memory this process may take."""

import os
from collections.abc import Sequence
from pathlib import Path

_CONTROL_GROUP = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The limit of the container, in version 2 and 1 of Linux control groups."""


def memory_limit_bytes(files: Sequence[Path] = _CONTROL_GROUP) -> int:
    """Return the limit of the container, or the memory of the machine if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for text in map(_read, files) if text.isdecimal()]
    return min([machine, *limits])


def _read(path: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
