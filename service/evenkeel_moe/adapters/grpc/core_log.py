"""Takes over what gRPC's core writes to standard error, a line for every fault of a peer."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Iterator

import structlog

_log = structlog.get_logger(__name__)
_READ_BYTES = 1 << 16
_MOST_DETAIL = 300
_LINE = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ (?P<source>[\w./-]+:\d+)\] ?(?P<words>.*)")
"""A severity, the time, the thread, the line of the core's source, and words for people."""


@contextlib.contextmanager
def core_log() -> Iterator[None]:
    """Log the lines of gRPC's core as `grpc_core`, and pass on what others write.

    The core has no other place for its lines than file descriptor 2. `reason` is the line of its
    source, so that the limit of the log counts each cause by itself. Where the event loop cannot
    keep up with a flood, lines are lost: a thread of the core never waits for us.
    """
    loop, python = asyncio.get_running_loop(), sys.stderr
    read, write = os.pipe()
    stderr = os.dup(2)
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    os.dup2(write, 2)
    os.close(write)
    left = b""

    def take() -> None:
        nonlocal left
        with contextlib.suppress(BlockingIOError):
            *lines, left = (left + os.read(read, _READ_BYTES)).split(b"\n")
            for line in lines:
                _take_line(line, stderr)

    with open(stderr, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as sys.stderr:
        loop.add_reader(read, take)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            loop.remove_reader(read)
            take()
            os.close(read)
            sys.stderr = python


def _take_line(line: bytes, stderr: int) -> None:
    found = _LINE.fullmatch(line.decode("utf-8", "backslashreplace"))
    if found is None:
        os.write(stderr, line + b"\n")
    else:
        _log.warning("grpc_core", reason=found["source"], detail=found["words"][:_MOST_DETAIL])
