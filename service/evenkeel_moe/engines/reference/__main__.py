"""`python -m evenkeel_moe.engines.reference CONFIG RANK PARENT`: one rank process, as the supervisor starts it."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import structlog

from evenkeel_moe.engines.reference.config import ExitCode, RankConfig

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(ExitCode.FAILED)


def main(arguments: list[str]) -> None:
    """Read the configuration, run the rank, end the process with its ExitCode."""
    path, rank, parent = arguments
    die_with_parent(int(parent))
    log_json()
    from evenkeel_moe.engines.reference.rank import (
        run_rank,
    )  # torch loads only once we know we may live

    leave(
        run_rank(
            RankConfig.from_json(Path(path).read_text(encoding="utf-8")).replace(rank=int(rank))
        )
    )


def log_json() -> None:
    """One JSON object per log line on stderr, tracebacks inside."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def leave(code: int) -> NoReturn:
    """End now: threads of torch and grpc may hang in C++ on a broken group, and nothing is left to save."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
