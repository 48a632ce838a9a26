"""`python -m evenkeel_moe.engines.reference CONFIG RANK`: one rank process."""

import os
import sys
from pathlib import Path
from typing import NoReturn

import structlog

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.rank import run_rank


def main(path: str, rank: str) -> NoReturn:
    """Read the configuration, run the rank, and exit with its ExitCode."""
    log_json()
    leave(run_rank(read_config(path, rank)))


def read_config(path: str, rank: str) -> RankConfig:
    """Return the configuration in a file, for one rank."""
    return RankConfig.from_json(Path(path).read_text(encoding="utf-8")).replace(rank=int(rank))


def log_json() -> None:
    """Log one JSON object per line to stderr, with tracebacks inside."""
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
    """Exit at once: threads of torch and gRPC may hang in C++ on a broken group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
